"""The flow `plan`: its figures, its artifacts and its block, on a real Prefect server."""

import asyncio

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from blocks import ExecutionPlan
from flows.plan import plan
from rlhf_tasks.config import PPOConfig, make_config, manual_assignments
from tests.flows.test_plan_command import CALLS, KEYS, ppo

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
]


async def artifacts_by_key() -> dict[str, str]:
    """The newest artifact of each key that the flow makes; other flows use some of these keys too."""
    made = ArtifactFilter(key=ArtifactFilterKey(any_=["plan-calls", "execution-plan", "plan-timeline"]))
    async with get_client() as client:
        found = await client.read_artifacts(artifact_filter=made)
    found.sort(key=lambda artifact: artifact.created)
    return {artifact.key: str(artifact.data) for artifact in found if artifact.key}


@pytest.fixture(scope="module")
def planned(prefect):
    """(figures, artifact texts by key, the configuration that was planned)."""
    config = make_config(ppo(name="My_Plan.1"))
    assert isinstance(config, PPOConfig)
    figures = asyncio.run(plan(config, mode="heuristic"))
    return figures, asyncio.run(artifacts_by_key()), config


def test_the_figures_are_those_of_the_command_line(planned):
    figures, _, _ = planned
    assert set(figures) == KEYS
    assert set(figures["assignments"]) == CALLS


def test_table_graph_and_timeline_are_artifacts(planned):
    _, artifacts, _ = planned
    assert all(name in artifacts["plan-calls"] for name in CALLS)
    assert "```mermaid" in artifacts["execution-plan"]
    assert "data:image/png;base64," in artifacts["plan-timeline"]
    assert "lower bound" in artifacts["plan-timeline"]


def test_the_block_holds_a_plan_that_a_run_accepts(planned):
    figures, _, config = planned
    block = ExecutionPlan.load("my-plan-1")
    assert (block.algorithm, block.n_hosts, block.devices_per_host) == ("ppo", 1, 2)
    assert block.iteration_time_s == figures["iteration_time_s"]
    read = manual_assignments(config.model_copy(update={"plan": block.assignments}))
    assert read is not None
    for name, given in figures["assignments"].items():
        assert list(read[name].placement.devices) == given["devices"]
