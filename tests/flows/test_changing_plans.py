"""PPO that changes its plan: the same losses, commits that name their plans, and a resumed run that does the same."""

import asyncio
import json
import shutil

import pytest
import yaml

from prefect_rlhf.flows.ppo import rlhf_ppo
from prefect_rlhf.flows.run.planning import hardware_of, problem_of
from prefect_rlhf.flows.run.progress import RunView
from prefect_rlhf.flows.run.replanning import Proposal
from prefect_rlhf.flows.run.run_folder import new_run_folder
from prefect_rlhf.flows.run.summary import read_jsonl
from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.figures import read_figures
from prefect_rlhf.rlhf_tasks.checkpoint.changes import PLAN, logged_changes, plan_digest
from prefect_rlhf.rlhf_tasks.checkpoint.commits import step_folder
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import read_manifest
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.spec import CallAssignment
from prefect_rlhf.rlhf_tasks.system import failpoints
from tests.ppo_calls import PPO_CALLS
from tests.tiny_runs import ppo_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    # Prefect leaves the sockets of its clients to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
ITERATIONS = 11
ONE, OTHER = ((0,), (1, 1, 1)), ((1,), (1, 1, 1))
SPLIT, SHARED = ((0, 1), (1, 2, 1)), ((0, 1), (2, 1, 1))
DIVIDED = ((0, 1), (1, 1, 1, 2))
FIRST = dict.fromkeys(
    PPO_CALLS,
    ONE,
)
LATER = FIRST | {
    "actor_generate": SHARED,
    "actor_train": SPLIT,
    "critic_inference": OTHER,
    "critic_train": DIVIDED,
    "ref_inference": DIVIDED,
}


async def nothing(_):
    pass


class Runs:
    """Runs in one folder on one cluster; the search is played, the training is real."""

    def __init__(self, cluster, base, monkeypatch):
        self.base, self.asked = base, []
        # A device a thousand times too slow: what is measured drifts for certain.
        (base / "slow.yaml").write_text(yaml.safe_dump({"like": "cpu-slot", "flops_per_s": 1e7}))
        self.changes = {
            "cluster": {"address": cluster.scheduler_address, "devices_per_host": 2},
            "planning": {"device": str(base / "slow.yaml"), "prompt_tokens": 12},
            "dtype": "float64",
            "total_iterations": ITERATIONS,
            "keep_last": 2 * ITERATIONS,
        }
        monkeypatch.setattr("prefect_rlhf.flows.run.replanning.propose_beside", self.propose)
        monkeypatch.setattr(RunView, "_draw", nothing)  # takes seconds, in which these short runs end

    def plan(self, placed):
        problem = problem_of(self.config, hardware_of(self.config))
        assignments = {
            call: CallAssignment(
                placement=Placement(devices, ParallelStrategy(*strategy)),
                offload=placed is LATER and call.endswith("train"),
            )
            for call, (devices, strategy) in placed.items()
        }
        return build_plan(problem.graph, assignments, Cluster(1, 2))

    async def propose(self, config, folder):
        self.asked.append(folder.name)
        if len(self.asked) > 1:
            return None
        return Proposal(plan=self.plan(LATER), iteration_time_s=100.0, present_iteration_time_s=1000.0)

    def begin(self, name, plan):
        """A run folder whose plan is made already, as the command line leaves it to the flow."""
        self.config = ppo_config(self.base, name=name, plan=plan, **self.changes)
        folder = new_run_folder(self.config)
        (folder / PLAN).write_text(self.plan(FIRST).model_dump_json())
        return folder

    def go_on(self, folder):
        return asyncio.run(rlhf_ppo(self.config, str(folder)))

    def forget_figures(self):
        shutil.rmtree(self.base / "runs" / "profiles", ignore_errors=True)


@pytest.fixture
def runs(cluster, tmp_path, monkeypatch):
    return Runs(cluster, tmp_path, monkeypatch)


def learned(folder):
    """Every metric of every iteration but times and what is made of them."""
    return [
        {name: value for name, value in row.items() if not name.startswith(("time/", "throughput/", "mfu"))}
        for row in read_jsonl(folder / "metrics.jsonl")
    ]


def plans_of_commits(folder):
    return [read_manifest(step_folder(folder, step)).plan_sha256 for step in range(ITERATIONS + 1)]


def test_a_run_changes_its_plan_and_one_that_dies_then_goes_on_by_the_new_plan(runs, capsys):
    plain = runs.begin("plain", "auto")
    summary = runs.go_on(plain)
    assert (summary["plan_changes"], runs.asked) == ([], [])
    assert summary["planned_and_measured"]["drifted"], (
        "whatever this machine is, it is not as slow as that device"
    )
    (figures,) = (runs.base / "runs" / "profiles").glob("ran-*.json")
    assert {ran.call for ran in read_figures(figures)} == set(FIRST), "the next run's planner goes by these"
    runs.forget_figures()

    changed = runs.begin("changed", "adaptive")
    summary = runs.go_on(changed)
    (change,) = logged_changes(changed)
    first = change.iteration
    assert 4 <= first <= ITERATIONS - 2
    assert (summary["plan_changes"], runs.asked[0]) == ([first], "changed")
    assert summary["calls"]["actor_train"]["tp"] == 2, "figures are those of the last plan"
    old, new = (plan_digest(runs.plan(placed)) for placed in (FIRST, LATER))
    assert plans_of_commits(changed) == [old] * (first + 1) + [new] * (ITERATIONS - first)
    told = capsys.readouterr().out
    assert "searching for a new plan" in told
    assert "a change costs" in told
    assert f"changed: a new plan from iteration {first + 1} on" in told
    same = learned(plain)
    assert len(same) == ITERATIONS
    for row, reference in zip(learned(changed), same, strict=True):
        assert row == pytest.approx(reference, rel=1e-9, abs=1e-12)

    runs.forget_figures(), runs.asked.clear()
    broken = runs.begin("broken", "adaptive")
    failpoints.arm("plan_logged:raise")
    with pytest.raises(RuntimeError, match="failpoint plan_logged"):
        runs.go_on(broken)
    failpoints.arm("")
    (change,) = logged_changes(broken)
    runs.go_on(broken)
    assert logged_changes(broken) == (change,)
    assert plans_of_commits(broken) == [old] * (change.iteration + 1) + [new] * (
        ITERATIONS - change.iteration
    )
    for row, reference in zip(learned(broken), same, strict=True):
        assert row == pytest.approx(reference, rel=1e-9, abs=1e-12)
    attempts = {json.loads(line)["attempt"] for line in (broken / "lineage.jsonl").read_text().splitlines()}
    assert attempts == {1, 2}
