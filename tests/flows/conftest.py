"""What tests of flows share: a cluster of Dask's own commands."""

import pytest
from distributed import Client

from flows.planned import Planned
from planner.price import MemoryPeak, PlanPrice
from planner.simulate import SteadyState
from tests.flows.dask_commands import CONTROLLER, LOOPBACK, RANK, SAFE, dask_scheduler, dask_worker
from tests.rlhf_tasks.plans import small_plan


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


@pytest.fixture
def whole_view(monkeypatch):
    """A run waits for all that Prefect shows of it: on a starved machine that lags more than a run would wait."""
    monkeypatch.setattr("flows.training.VIEW_LAG_S", 300.0)


@pytest.fixture
def expected(tmp_path):
    """What is expected of `small_plan`: a second for every node, three for an iteration."""
    plan = small_plan()
    seconds = dict.fromkeys((node.name for node in plan.nodes), 1.0)
    peaks = {device: MemoryPeak("generate", {"parameters": 10.0}) for device in (0, 1)}
    return Planned(
        PlanPrice(seconds, {}, SteadyState(3.0, (), {}), peaks, {"generate": 10.0, "actor_train": 8.0}),
        {"generate": 4.0, "actor_train": 2.0, "critic_train": 2.0},
        5,
        1e9,
        "preset of cpu-slot",
        tmp_path / "ran.json",
    )
