"""When a run plans anew, and when it changes its plan: pure decisions, and the process that searches."""

import asyncio
from dataclasses import replace

import pytest

from flows.run import replanning
from flows.run.planned_and_measured import ENOUGH, planned
from flows.run.planning import hardware_of, problem_of
from flows.run.prepare import prepare
from flows.run.replanning import Proposal, Replanning, is_worth_it, propose_beside
from flows.run.run_folder import new_run_folder
from planner.plan.build import build_plan
from planner.plan.mesh import Cluster
from planner.pricing.run_history import read_figures
from rlhf_tasks.algorithms.configurations import ConfigError
from rlhf_tasks.checkpoint.plan_log import PLAN
from rlhf_tasks.protocol.scheduled_plans import ScheduledPlan
from tests.flows.run.test_planned_and_measured import lineage_of
from tests.rlhf_tasks.plans import small_plan, swapped_plan
from tests.tiny_runs import ppo_config


def proposal(new_s: float, present_s: float = 1.0) -> Proposal:
    return Proposal(
        plan=swapped_plan(),
        predicted_s={"generate": 2.0},
        iteration_time_s=new_s,
        present_iteration_time_s=present_s,
    )


@pytest.mark.parametrize(
    ("new_s", "left", "worth"),
    [
        (0.89, 100, True),
        (0.91, 100, False),
        (1.5, 100, False),
        (0.5, 3, True),
        (0.5, 2, False),
        (0.5, 0, False),
    ],
)
def test_a_plan_is_worth_a_change_when_it_is_clearly_faster_and_iterations_are_left(new_s, left, worth):
    assert is_worth_it(proposal(new_s), left) is worth


class Control:
    """What a run was told."""

    def __init__(self):
        self.plans = []

    def change_plan(self, plan, predicted_s):
        self.plans.append((plan, predicted_s))


@pytest.fixture
def watched(expected):
    """(replanning of a run of 20 iterations, what it asked for, what it said)."""
    asked, said = [], []

    async def propose(config, folder, iteration):
        asked.append(iteration)
        return found[0]

    found = [proposal(0.5)]
    plans = [ScheduledPlan(iteration=0, plan=small_plan())]
    watching = Replanning(None, None, plans, {0: expected}, 20, said.append, propose)
    return watching, found, asked, said


def follow(watching: Replanning, seconds: float, iterations: int, control: Control) -> None:
    """The run commits so many iterations, of which each takes so long."""

    async def commits():
        rows = lineage_of(seconds, iterations)
        for t in range(iterations):
            await watching.on_commit(t, [row for row in rows if row["iteration"] == t], control)
            if watching._judging is not None:
                await watching._judging
        await watching.close()

    asyncio.run(commits())


def test_drift_leads_to_a_new_plan(watched, expected):
    watching, _, asked, said = watched
    control = Control()
    follow(watching, 2.0, 9, control)
    assert asked == [0], "one judgement, of the plan that begins at iteration 0"
    assert control.plans == [(swapped_plan(), {"generate": 2.0})]
    assert {ran.seconds for ran in read_figures(expected.figures)} == {2.0}
    assert "planning anew" in said[0]
    assert "the plan changes" in said[1]


def test_the_first_iterations_say_nothing_yet(watched):
    watching, _, asked, _ = watched
    follow(watching, 2.0, ENOUGH, Control())
    assert asked == []


def test_a_run_that_goes_as_planned_keeps_its_plan(watched, expected):
    watching, _, asked, said = watched
    as_planned = replace(expected.price, duration_s=dict.fromkeys(expected.price.duration_s, 3.0))
    watching.expected[0] = replace(expected, price=as_planned)
    follow(watching, 3.0, 9, Control())
    assert (asked, said) == ([], [])


@pytest.mark.parametrize("answer", [None, proposal(0.95)])
def test_no_better_plan_is_no_change(watched, answer):
    watching, found, asked, said = watched
    found[0] = answer
    control = Control()
    follow(watching, 2.0, 9, control)
    assert (asked, control.plans) == ([0], [])
    assert said[1].endswith("the plan stays")


def test_nothing_is_decided_while_a_change_lies_ahead(watched):
    """As in a resumed run whose log has a change that it has not reached again."""
    watching, _, asked, _ = watched
    watching.plans += (ScheduledPlan(iteration=12, plan=swapped_plan()),)
    follow(watching, 2.0, 9, Control())
    assert asked == []


@pytest.mark.timeout(600)  # the first to search compiles that
@pytest.mark.whole
def test_the_process_beside_the_training_finds_a_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(replanning, "STARTING_S", 500.0)
    config = ppo_config(
        tmp_path,
        name="run",
        plan="auto",
        replan="auto",
        cluster={"devices_per_host": 2},
        planning={"time_limit_s": 60},
    )
    folder = new_run_folder(config)
    on_one = ppo_config(tmp_path, cluster={"devices_per_host": 1})
    calls = {n.name: n.assignment for n in prepare(on_one).plan.nodes if n.kind == "call"}
    problem = problem_of(config, hardware_of(config))
    present = build_plan(problem.graph, calls, Cluster(1, 2))
    (folder / PLAN).write_text(present.model_dump_json())
    found = asyncio.run(propose_beside(config, folder, 0))
    assert (
        found.iteration_time_s
        < found.present_iteration_time_s
        == planned(config, present, problem).price.iteration_time_s
    )
    assert found.plan.n_devices == 2
    assert found.predicted_s.keys() == {node.name for node in found.plan.nodes}
    (folder / PLAN).write_text("{")
    assert asyncio.run(propose_beside(config, folder, 0)) is None, "a process that fails proposes nothing"


@pytest.mark.parametrize("plan", ["heuristic", {"actor_generate": {"devices": [0]}}])
def test_only_a_plan_that_was_searched_is_replaced(tmp_path, plan):
    with pytest.raises(ConfigError, match="Set plan: auto or replan: never"):
        ppo_config(tmp_path, plan=plan, replan="auto")
