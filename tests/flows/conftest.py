"""One Prefect server and one cluster of two ranks for all tests of flows; each takes 10-20 s to start."""

import pytest

from flows.cluster import local_cluster
from flows.planned import Planned
from flows.server import own_server
from planner.price import MemoryPeak, PlanPrice
from planner.simulate import SteadyState
from tests.rlhf_tasks.plans import small_plan


@pytest.fixture(scope="session")
def prefect(tmp_path_factory):
    with own_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session")
def cluster(prefect, tmp_path_factory):
    with local_cluster(2, prefect.environment, folder=tmp_path_factory.mktemp("dask")) as cluster:
        yield cluster


@pytest.fixture
def expected(tmp_path):
    """What is expected of `small_plan`: a second for every node, three for an iteration."""
    plan = small_plan()
    seconds = dict.fromkeys((node.name for node in plan.nodes), 1.0)
    peaks = {device: MemoryPeak("generate", {"parameters": 10.0}) for device in (0, 1)}
    return Planned(
        PlanPrice(seconds, {}, SteadyState(3.0, (), {}), peaks),
        5,
        "preset of cpu-slot",
        tmp_path / "ran.json",
    )
