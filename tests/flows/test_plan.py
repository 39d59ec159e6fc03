"""The flow `plan`: its figures, its artifacts and its block, on a real Prefect server."""

import asyncio

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact
from prefect.exceptions import ParameterTypeError

from prefect_rlhf.blocks import StoredPlan
from prefect_rlhf.flows.plan import plan
from prefect_rlhf.planner.pricing.figures import write_profiles
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config, manual_assignments
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from tests.flows.plan_documents import KEYS, measured, ppo
from tests.markdown import plain, table_of
from tests.ppo_calls import PPO_CALLS

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
]


ARTIFACTS = ["execution-plan", "plan-calls", "plan-timeline", "plan-alternatives", "plan-modes"]


async def artifacts_by_key() -> dict[str, Artifact]:
    """The newest artifact of each key that the flow makes; other flows use some of these keys too."""
    made = ArtifactFilter(key=ArtifactFilterKey(any_=ARTIFACTS))
    async with get_client() as client:
        found = await client.read_artifacts(artifact_filter=made)
    found.sort(key=lambda artifact: artifact.created)
    return {artifact.key: artifact for artifact in found if artifact.key}


@pytest.fixture(scope="module")
def planned(prefect, tmp_path_factory):
    """(figures, artifacts by key, the configuration that was planned), with a profile and a doubtful cluster file."""
    config = make_config(ppo(name="My_Plan.1", batch_size=1024))
    assert isinstance(config, PPOConfig)
    folder = tmp_path_factory.mktemp("planned")
    write_profiles([measured()], folder / "measured.json")
    slow = {"between_hosts": {"bytes_per_s": 25}}
    cluster = {"n_hosts": 1, "devices_per_host": 2, "device": "cpu-slot", **slow}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    files = {"cluster": str(folder / "cluster.yaml"), "profile": str(folder / "measured.json")}
    figures = asyncio.run(plan(config, mode="heuristic", time_limit_s=2, **files))
    return figures, asyncio.run(artifacts_by_key()), config


def test_the_figures_are_those_of_the_command_line(planned):
    figures, _, _ = planned
    assert set(figures) == KEYS
    assert set(figures["assignments"]) == set(PPO_CALLS)


def test_a_time_limit_of_nothing_is_refused(planned):
    for limit_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ParameterTypeError, match="time_limit_s"):
            asyncio.run(plan(planned[2], mode="heuristic", time_limit_s=limit_s))


def test_the_seed_is_the_one_that_was_given_or_else_the_configurations(planned, monkeypatch):
    seeds = []

    def find(problem, mode, limit_s, seed):
        seeds.append(seed)
        raise ConfigError("seen")

    monkeypatch.setattr("prefect_rlhf.flows.plan.find_plan", find)
    for given in ({}, {"seed": 0}, {"seed": 7}):
        with pytest.raises(ConfigError, match="seen"):
            asyncio.run(plan(planned[2].model_copy(update={"seed": 5}), **given))
    assert seeds == [5, 0, 7]
    for seed in (-1, 1.5, 2**63):
        with pytest.raises(ParameterTypeError, match="seed"):
            asyncio.run(plan(planned[2], seed=seed))


def test_table_graph_and_timeline_are_artifacts(planned):
    _, artifacts, _ = planned
    assert {row["call"] for row in table_of(artifacts["plan-calls"].data)} == set(PPO_CALLS)
    assert "data:image/svg+xml;base64," in artifacts["execution-plan"].data
    assert "data:image/svg+xml;base64," in artifacts["plan-timeline"].data
    assert "lower bound" in artifacts["plan-timeline"].data


def test_the_profile_that_was_given_is_gone_by_and_named(planned):
    figures, artifacts, _ = planned
    assert figures["source"] == "measured profile of cpu-slot"
    assert "Priced by: measured profile of cpu-slot." in artifacts["plan-timeline"].data


def test_warnings_of_cluster_and_profile_are_shown(planned):
    _, artifacts, _ = planned
    told = [line for line in artifacts["plan-timeline"].data.splitlines() if line.startswith("> ")]
    assert len(told) == 2
    assert "between_hosts.bytes_per_s=25 is implausible" in told[0]
    assert "The measured profile of cpu-slot ends at " in told[1]


def test_each_call_has_its_alternative_and_what_is_to_be_said_of_it(planned):
    figures, artifacts, _ = planned
    text = artifacts["plan-alternatives"].data
    rows = table_of(text)
    assert {row["call"] for row in rows} == set(PPO_CALLS)
    for row in rows:
        assert int(row["dp"]) * int(row["tp"]) * int(row["pp"]) == (1 if row["devices"] in ("0", "1") else 2)
        [reason] = [line for line in text.splitlines() if plain(line).startswith(f"- {row['call']}: ")]
        faster = float(row["s per iteration"]) < figures["iteration_time_s"] * (1 - 1e-3)
        assert ("the plan is not the best" in reason) or not faster
    assert "the other calls may have moved too" in artifacts["plan-alternatives"].description


def test_the_hours_under_each_mode_are_an_artifact(planned):
    figures, artifacts, config = planned
    assert config.total_iterations == 100
    rows = {row["mode"]: row for row in table_of(artifacts["plan-modes"].data)}
    assert list(rows) == ["search", "mcmc", "heuristic", "symmetric", "hybrid", "disjoint", "colocated"]
    assert float(rows["heuristic"]["s per iteration"]) == pytest.approx(figures["iteration_time_s"], rel=1e-3)
    for mode in ("search", "mcmc", "heuristic", "symmetric"):
        hours = float(rows[mode]["s per iteration"]) / 36
        assert float(rows[mode]["hours"]) == pytest.approx(hours, rel=1e-3)
    assert rows["disjoint"]["hours"] == ""
    assert "devices of their own" in rows["disjoint"]["against the best of these"]
    about = artifacts["plan-modes"].description
    assert about == "100 iterations under the plan of each mode; time limits: search 2 s, mcmc 2 s."


def test_the_block_holds_a_plan_that_a_run_accepts(planned):
    figures, _, config = planned
    block = StoredPlan.load("my-plan-1")
    assert (block.algorithm, block.n_hosts, block.devices_per_host) == ("ppo", 1, 2)
    assert block.iteration_time_s == figures["iteration_time_s"]
    read = manual_assignments(config.model_copy(update={"plan": block.assignments}))
    assert read is not None
    for name, given in figures["assignments"].items():
        assert list(read[name].placement.devices) == given["devices"]
