"""What the terminal says of a plan, line by line."""

from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from flows.run.planning import hardware_of, problem_of
from flows.view.plan_view import limiting, show_alternatives, show_calls, show_comparison
from planner.plan.steady_state import SteadyState
from planner.pricing.plans import PlanPrice
from planner.report.alternatives import Alternative
from planner.search.search import find_plan
from rlhf_tasks.algorithms.configurations import make_config
from rlhf_tasks.spec import CallAssignment, CallNode
from tests.flows.plan_documents import ppo
from tests.ppo_calls import PPO_CALLS
from tests.rlhf_tasks.plans import call, on, plan_of, small_plan


@pytest.fixture
def console() -> Console:
    return Console(width=140, file=StringIO())


def text_of(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def limits(plan, *cycle: str) -> str:
    return limiting(plan, PlanPrice({}, {}, SteadyState(3.0, cycle, {}), {}, {}))


def test_what_limits_a_plan_names_calls_first_and_six_nodes_at_most():
    assert (
        limits(small_plan(), "save_actor", "generate", "actor_train") == "generate → actor_train, save_actor"
    )
    calls = [f"call_{i}" for i in range(8)]
    eight = plan_of(tuple(call(name, "actor", "inference", on(0)) for name in calls), {"actor": on(0)}, 1)
    assert limits(eight, *calls) == f"{' → '.join(calls[:6])} and 2 more"
    names = [node.name for node in small_plan().nodes]
    assert all(not isinstance(small_plan().node(name), CallNode) for name in names if name.startswith("save"))
    assert limits(small_plan(), *names) == "generate → actor_train → critic_train, save_actor, save_critic"


def rejected(*rows: tuple[str, float, bool]) -> list[Alternative]:
    place = CallAssignment(placement=on(0))
    return [Alternative(name, place, time_s, time_s - 3, "a reason", better) for name, time_s, better in rows]


def test_a_faster_alternative_says_that_the_plan_is_not_the_best(console):
    show_alternatives(console, rejected(("a", 4.0, False), ("b", 2.5, True), ("c", 2.0, True)))
    assert "The plan is not the best: one with c elsewhere takes 2 s." in text_of(console)
    assert "as planned" not in text_of(console)


def test_alternatives_are_readable_on_80_columns():
    """A line with the call's name, place and seconds, and beneath whole words."""
    console = Console(width=80, file=StringIO())
    place = CallAssignment(placement=on(*range(8, 64)))
    reason = f"more load on the critical cycle {' -> '.join(PPO_CALLS)}"
    show_alternatives(console, [Alternative(name, place, 20.63, 1.0, reason, False) for name in PPO_CALLS])
    _, heads, *lines = text_of(console).splitlines()
    assert heads.split("  ")[0] == "call"
    assert "…" not in text_of(console)
    for name in PPO_CALLS:
        start = next(n for n, line in enumerate(lines) if line.startswith(name))
        assert lines[start].split() == [name, "8-63", "56", "1", "1", "20.63"]
        beneath = [line.strip() for line in lines[start + 1 : start + 4]]
        assert " ".join(beneath).startswith(reason)
        assert all(len(line) > 40 for line in beneath[:2]), "not a word on a line"
    assert max(map(len, lines)) <= 80


def test_of_slower_alternatives_no_such_thing_is_said(console):
    show_alternatives(console, rejected(("a", 4.0, False), ("b", 2.5, False)))
    assert "the other calls may have moved too" in text_of(console)
    assert "not the best" not in text_of(console)


def test_the_hours_tell_how_long_modes_were_given(console):
    found = {"manual": SimpleNamespace(iteration_time_s=4.0), "mcmc": SimpleNamespace(iteration_time_s=2.0)}
    show_comparison(console, {**found, "disjoint": "Too small."}, {"search": 60.0, "mcmc": 5.0}, 3600)
    head, _, *rows = text_of(console).splitlines()
    assert head == "3600 iterations under the plan of each mode; time limits: search 60 s, mcmc 5 s"
    assert [row.split() for row in rows] == [
        ["manual", "4", "4", "+100.0%"],
        ["mcmc", "2", "2"],
        ["disjoint", "-", "-", "Too", "small."],
    ]


def test_names_of_calls_are_whole_on_a_narrow_terminal():
    """80 columns; the class of the devices stands above the table where there is but one."""
    config, console = make_config(ppo()), Console(width=80, file=StringIO())
    problem = problem_of(config, hardware_of(config))
    result = find_plan(problem, "heuristic", 60.0)
    show_calls(console, result.plan, result.price, problem.model)
    shown = text_of(console)
    assert all(name in shown for name in PPO_CALLS)
    assert "…" not in shown
    heads = next(line for line in shown.splitlines() if "devices" in line and "dp" in line)
    assert "class" not in heads
