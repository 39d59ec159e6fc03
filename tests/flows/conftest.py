"""What tests of flows share: a cluster of Dask's own commands."""

import pytest
from distributed import Client

from tests.flows.dask_commands import CONTROLLER, LOOPBACK, RANK, SAFE, dask_scheduler, dask_worker


@pytest.fixture(scope="session")
def commanded(tmp_path_factory):
    """The address of a scheduler with a controller and one rank, all started by commands."""
    folder = tmp_path_factory.mktemp("commanded")
    with (
        dask_scheduler(folder, **SAFE) as address,
        dask_worker(address, folder, *LOOPBACK, *CONTROLLER),
        dask_worker(address, folder, *LOOPBACK, *RANK),
    ):
        with Client(address, set_as_default=False, timeout=300) as client:
            client.wait_for_workers(2, timeout=300)
        yield address
