"""One Prefect server and one cluster of two ranks for all tests of flows; each takes 10-20 s to start."""

import pytest

from flows.cluster import local_cluster
from flows.server import own_server


@pytest.fixture(scope="session")
def prefect(tmp_path_factory):
    with own_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session")
def cluster(prefect, tmp_path_factory):
    with local_cluster(2, prefect.environment, folder=tmp_path_factory.mktemp("dask")) as cluster:
        yield cluster
