"""When a run plans anew, and when it changes its plan: pure decisions, and the process that searches."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from prefect_rlhf.flows.run import replanning
from prefect_rlhf.flows.run.planning import hardware_of, problem_of
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.replanning import ChangeCost, Proposal, Replanning, is_worth_it, propose_beside
from prefect_rlhf.flows.run.run_folder import new_run_folder
from prefect_rlhf.flows.run.summary import ENOUGH, planned
from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.figures import read_figures
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.checkpoint.changes import PLAN, RunPlan, log_change, logged_changes
from prefect_rlhf.rlhf_tasks.protocol.messages import Committed, Enterable, IterationRan
from tests.flows.run.test_summary import lineage_of
from tests.rlhf_tasks.plans import small_plan, swapped_plan
from tests.tiny_runs import ppo_config


def proposal(new_s: float, present_s: float = 1.0) -> Proposal:
    return Proposal(
        plan=swapped_plan(),
        iteration_time_s=new_s,
        present_iteration_time_s=present_s,
    )


@pytest.mark.parametrize(
    ("new_s", "left", "cost_s", "worth"),
    [
        (0.89, 100, 1.0, True),
        (0.91, 100, 1.0, False),
        (1.5, 100, 1.0, False),
        (0.5, 3, 1.0, True),
        (0.5, 2, 1.0, False),
        (0.5, 100, 49.0, True),
        (0.5, 100, 51.0, False),
        (0.5, 0, 0.0, False),
    ],
)
def test_a_plan_is_worth_a_change_when_it_is_clearly_faster_and_saves_more_than_the_change_costs(
    new_s, left, cost_s, worth
):
    assert is_worth_it(proposal(new_s), left, cost_s) is worth


def test_a_change_costs_what_a_commit_and_a_begin_have_taken():
    cost = ChangeCost()
    cost.begins(10.0)
    cost.hear(Enterable(iteration=0, generation=0), 13.0)
    cost.hear(Enterable(iteration=1, generation=0), 99.0)
    for iteration, ran_s in ((0, 20.0), (1, 30.0)):
        cost.hear(IterationRan(iteration=iteration, generation=0, metrics={}), ran_s)
    for iteration in (0, 1):  # one commit has both
        cost.hear(Committed(iteration=iteration, results={}), 32.0)
    assert (cost.start_s, cost.commit_s, cost.seconds) == (3.0, 2.0, 5.0)


@pytest.fixture
def watched(expected, tmp_path):
    """(replanning of a run of 20 iterations, what it asked for, what it said)."""
    asked, said = [], []

    async def propose(config, folder):
        asked.append(folder)
        return found[0]

    found = [proposal(0.5)]
    plans = (RunPlan(iteration=0, plan=small_plan()),)
    prepared = SimpleNamespace(config=None, plans=plans, iterations=20)
    watching = Replanning(prepared, tmp_path, {0: expected}, said.append, propose)
    return watching, found, asked, said


def follow(watching: Replanning, seconds: float, iterations: int) -> None:
    """The run commits so many iterations, of which each takes so long."""

    async def commits():
        rows = lineage_of(seconds, iterations)
        for t in range(iterations):
            watching.committed(t, [row for row in rows if row["iteration"] == t])
            if watching._judging is not None:
                await watching._judging
        await watching.close()

    asyncio.run(commits())


def test_drift_leads_to_a_new_plan(watched, expected, tmp_path, monkeypatch):
    watching, _, asked, said = watched
    watching.cost.commit_s, watching.cost.start_s = 0.25, 2.0
    follow(watching, 2.0, 9)
    assert asked == [tmp_path], "one judgement, of the plan that begins at iteration 0"
    assert watching.better is not None
    assert {ran.seconds for ran in read_figures(expected.figures)} == {2.0}
    assert "searching for a new plan" in said[0]
    assert said[1].startswith("the plan changes: ")
    assert said[1].endswith(
        "which saves 8 s in the 16 iterations left; a change costs 2.25 s (0.25 s until a commit is written, 2 s "
        "until the ranks have read it)"
    )
    assert watching.present.plan == small_plan(), "until the attempt has ended"

    monkeypatch.setattr(watching, "_problem", lambda: None)
    monkeypatch.setattr(replanning, "planned", lambda config, plan, problem: expected)
    assert asyncio.run(watching.take(9))
    assert (watching.present.iteration, watching.present.plan) == (9, swapped_plan())
    assert logged_changes(tmp_path) == watching.plans[1:]
    assert said[2] == "a new plan from iteration 10 on"
    assert not asyncio.run(watching.take(10)), "once"


def test_a_change_that_cannot_be_priced_is_none(watched, tmp_path, monkeypatch):
    watching, _, _, said = watched
    follow(watching, 2.0, 9)

    def refuse():
        raise ConfigError("cluster.yaml is gone")

    monkeypatch.setattr(watching, "_problem", refuse)
    assert not asyncio.run(watching.take(9))
    assert said[-1].endswith("cluster.yaml is gone")
    assert len(watching.plans) == 1
    assert logged_changes(tmp_path) == ()


def test_a_change_that_cannot_be_written_down_is_none(watched, tmp_path, monkeypatch):
    watching, _, _, said = watched
    follow(watching, 2.0, 9)
    monkeypatch.setattr(watching, "_problem", lambda: None)
    monkeypatch.setattr(replanning, "planned", lambda *_: watching.expected[0])
    (tmp_path / "plan-2.json").mkdir()
    assert not asyncio.run(watching.take(9))
    assert "the plan stays: the new one could not be priced or written to the log of plans" in said[-1]
    assert len(watching.plans) == 1


def test_a_plan_that_is_followed_meanwhile_ends_the_search_for_a_better_one(watched, expected, monkeypatch):
    watching, *_ = watched
    monkeypatch.setattr(replanning, "planned", lambda *_: expected)

    async def meanwhile():
        begun, ended = asyncio.Event(), asyncio.Event()

        async def search(config, folder):
            begun.set()
            await ended.wait()
            return proposal(0.5)

        watching._propose = search
        rows = lineage_of(2.0, 9)
        for t in range(9):
            watching.committed(t, [row for row in rows if row["iteration"] == t])
        await begun.wait()
        await watching.follow(9, swapped_plan(), None, "a device is lost")
        ended.set()
        await asyncio.wait([watching._judging])

    asyncio.run(meanwhile())
    assert watching.better is None


def test_a_better_plan_stays_out_where_the_change_costs_more_than_it_saves(watched):
    watching, _, _, said = watched
    watching.cost.start_s = 9.0
    follow(watching, 2.0, 9)
    assert watching.better is None
    assert said[1].startswith("the plan stays: ")


def test_the_first_iterations_say_nothing_yet(watched):
    watching, _, asked, _ = watched
    follow(watching, 2.0, ENOUGH)
    assert asked == []


def test_a_run_that_goes_as_planned_keeps_its_plan(watched, expected):
    watching, _, asked, said = watched
    as_planned = replace(expected.price, duration_s=dict.fromkeys(expected.price.duration_s, 3.0))
    watching.expected[0] = replace(expected, price=as_planned)
    follow(watching, 3.0, 9)
    assert (asked, said) == ([], [])


@pytest.mark.parametrize("answer", [None, proposal(0.95)])
def test_no_better_plan_is_no_change(watched, answer):
    watching, found, asked, said = watched
    found[0] = answer
    follow(watching, 2.0, 9)
    assert (len(asked), watching.better) == (1, None)
    assert "the plan stays" in said[1]


@pytest.mark.timeout(600)  # the first to search compiles that
@pytest.mark.whole
def test_the_process_beside_the_training_finds_a_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(replanning, "STARTING_S", 500.0)
    config = ppo_config(
        tmp_path,
        name="run",
        plan="adaptive",
        cluster={"devices_per_host": 2},
        planning={"time_limit_s": 60},
    )
    folder = new_run_folder(config)
    on_one = ppo_config(tmp_path, cluster={"devices_per_host": 1})
    calls = {n.name: n.assignment for n in prepare(on_one).plan.nodes if n.kind == "call"}
    problem = problem_of(config, hardware_of(config))
    present = build_plan(problem.graph, calls, Cluster(1, 2))
    (folder / PLAN).write_text(present.model_dump_json())
    found = asyncio.run(propose_beside(config, folder))
    assert (
        found.iteration_time_s
        < found.present_iteration_time_s
        == planned(config, present, problem).price.iteration_time_s
    )
    assert found.plan.n_devices == 2
    log_change(folder, 3, found.plan)
    again = asyncio.run(propose_beside(config, folder))
    assert again.present_iteration_time_s == found.iteration_time_s, "the plan that the run follows by then"
    (folder / PLAN).write_text("{")
    assert asyncio.run(propose_beside(config, folder)) is None, "a process that fails proposes nothing"
