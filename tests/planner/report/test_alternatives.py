"""What is said of each call's best other place, whether the chosen plan is the best one or not."""

import pytest

from planner.plan.mesh import Cluster
from planner.pricing.problem import Problem
from planner.report.alternatives import rejected_alternatives
from planner.search.search import find_plan

pytestmark = pytest.mark.timeout(1800)  # the first run compiles


@pytest.fixture
def problem(small_problem) -> Problem:
    return small_problem(Cluster(1, 2))


def test_alternatives_have_another_mesh_and_a_reason(problem):
    result = find_plan(problem, "heuristic", 60.0)
    rows = rejected_alternatives(result)
    assert [row.call for row in rows] == [call.name for call in problem.graph.calls]
    for row in rows:
        chosen = result.plan.node(row.call).assignment.placement
        assert set(row.assignment.placement.devices) != set(chosen.devices)
        assert row.loses_s == pytest.approx(row.time_s - result.iteration_time_s)
        assert row.reason


def test_plans_that_are_faster_than_the_chosen_one_are_called_so(problem, assign):
    """All calls on one of two devices leave the other one idle."""
    on_one = {call.name: assign([0]) for call in problem.graph.calls}
    result = find_plan(problem, "manual", 60.0, evaluate=on_one)
    rows = rejected_alternatives(result)
    assert any(row.is_better for row in rows)
    for row in rows:
        assert row.is_better == (row.time_s < result.iteration_time_s * (1 - 1e-9))
        assert row.is_better == ("the plan is not the best" in row.reason)
        if row.is_better:
            assert row.reason.startswith(f"faster by {result.iteration_time_s - row.time_s:.3g} s")


def test_nothing_is_better_than_the_best_plan(problem):
    result = find_plan(problem, "search", time_limit_s=600)
    assert result.proven_optimal
    for row in rejected_alternatives(result):
        assert not row.is_better
        assert "not the best" not in row.reason
        if row.loses_s <= 1e-9 * result.iteration_time_s:
            assert row.reason == "takes as long"


def test_the_other_calls_may_move_too(problem, assign):
    """What the caption says: a row is a plan of its own, not the chosen one with one call changed."""
    on_one = {call.name: assign([0]) for call in problem.graph.calls}
    result = find_plan(problem, "manual", 60.0, evaluate=on_one)

    def alone_s(row) -> float:
        changed = {**on_one, row.call: row.assignment}
        return find_plan(problem, "manual", 60.0, evaluate=changed).iteration_time_s

    assert any(alone_s(row) > row.time_s * (1 + 1e-6) for row in rejected_alternatives(result))
