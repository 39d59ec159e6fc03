"""Rank clocks: overhead is idle time in which the next node could have run; waiting for work is not."""

import pytest

from prefect_rlhf.flows.view.clocks import (
    OVERHEAD,
    WAITING,
    Span,
    idle_while_ready_s,
    overlapping_s,
    predecessors_of,
    running_s,
    spans_of,
    without_waits,
    work_s,
)
from prefect_rlhf.flows.view.pictures.colours import CALL_KINDS
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests.flows.reported_run import RECORDED


def span(rank, iteration, node, started_s, ended_s, generation=(1, 0)):
    return Span(rank, iteration, node, "inference", started_s, ended_s, generation)


def test_a_gap_between_ready_and_start_is_overhead():
    spans = [span(0, 0, "a", 0.0, 1.0), span(0, 0, "b", 1.5, 2.0)]
    assert idle_while_ready_s(spans, {(0, "b"): [(0, "a")]}) == {0: pytest.approx(0.5)}


def test_waiting_for_a_predecessor_on_another_rank_is_not_overhead():
    spans = [span(0, 0, "a", 0.0, 1.0), span(1, 0, "x", 0.0, 4.0), span(0, 0, "b", 4.1, 5.0)]
    idle = idle_while_ready_s(spans, {(0, "b"): [(0, "a"), (0, "x")]})
    assert idle[0] == pytest.approx(0.1)


def test_a_predecessor_ends_when_its_last_rank_ends():
    spans = [span(0, 0, "x", 0.0, 1.0), span(1, 0, "x", 0.0, 3.0), span(0, 0, "b", 3.0, 4.0)]
    assert idle_while_ready_s(spans, {(0, "b"): [(0, "x")]})[0] == 0.0


def test_overlap_across_iterations_counts_only_common_seconds():
    spans = [span(1, 0, "train", 0.0, 4.0), span(0, 1, "generate", 3.0, 6.0), span(1, 1, "train", 7.0, 9.0)]
    assert overlapping_s(spans, "train", "generate", 1) == pytest.approx(1.0)
    assert overlapping_s(spans, "train", "generate", 0) == 0.0


@pytest.mark.parametrize("generation", [(1, 1), (2, 0)])
def test_time_between_generations_and_attempts_is_downtime(generation):
    spans = [
        span(0, 0, "a", 0.0, 1.0),
        span(0, 0, "b", 1.5, 2.0),
        span(0, 1, "a", 36_000.0, 36_001.0, generation),
        span(0, 1, "b", 36_001.25, 36_002.0, generation),
    ]
    after = {(0, "b"): [(0, "a")], (1, "a"): [(0, "b")], (1, "b"): [(1, "a")]}
    assert idle_while_ready_s(spans, after) == {0: pytest.approx(0.75)}
    assert running_s(spans) == pytest.approx(4.0)


@pytest.fixture
def two_hosts():
    """A recorded plan of two ranks, each on a host of its own, and its lineage."""
    plan = ExecutionPlan.model_validate(RECORDED["plan"])
    return plan.model_copy(update={"devices_per_host": 1}), RECORDED["lineage"]


def behind(lineage, seconds):
    """The lineage as the second rank's clock would have it if it were behind."""
    return [
        {**row, "clocks": {r: [s - seconds * (r == "1") for s in span] for r, span in row["clocks"].items()}}
        for row in lineage
    ]


def test_clocks_that_may_agree_are_left_as_they_are(two_hosts):
    plan, lineage = two_hosts
    assert spans_of(plan, lineage) == spans_of(plan.model_copy(update={"devices_per_host": 2}), lineage)


@pytest.mark.parametrize("seconds", [-86_400.0, 3.0, 3600.0])
def test_the_clock_of_another_host_is_aligned_by_what_came_before_what(two_hosts, seconds):
    plan, lineage = two_hosts
    true = {(span.rank, span.iteration, span.node): span for span in spans_of(plan, lineage)}
    moved = spans_of(plan, behind(lineage, seconds))
    off_s = [span.started_s - true[span.rank, span.iteration, span.node].started_s for span in moved]
    assert max(map(abs, off_s)) < 0.05, "half of the shortest way there and back"
    ends = {(span.iteration, span.node, span.rank): span.ended_s for span in moved}
    before = predecessors_of(plan, {span.iteration for span in moved})
    for span in (span for span in moved if span.kind in CALL_KINDS):
        for iteration, node in before[span.iteration, span.node]:
            for rank in (0, 1):
                assert ends.get((iteration, node, rank), span.started_s) <= span.started_s + 1e-9


@pytest.mark.parametrize(
    ("first", "then", "wrong"),
    [
        (("release_actor_of_actor_generate", "0"), ("reward_inference", "1"), 3600.0),
        (("actor_generate", "1"), ("ref_inference", "0"), -3600.0),
    ],
)
def test_one_order_that_the_clocks_contradict_is_put_right(two_hosts, first, then, wrong):
    """`wrong` seconds behind, the second host's clock has the later node begin before the earlier one has ended."""
    plan, lineage = two_hosts
    only = [
        {**next(row for row in lineage if row["node"] == node), "clocks": {rank: span}}
        for (node, rank), span in ((first, [10.0, 11.0]), (then, [11.5, 12.0]))
    ]
    times = {span.node: span for span in spans_of(plan, behind(only, wrong))}
    assert times[then[0]].started_s == pytest.approx(times[first[0]].ended_s)
    assert {span.rank: span.started_s for span in spans_of(plan, behind(only, -wrong))} == {
        0: only[0 if first[1] == "0" else 1]["clocks"]["0"][0],
        1: only[0 if first[1] == "1" else 1]["clocks"]["1"][0] + wrong,
    }, "nothing contradicts the clocks"


def test_the_time_of_a_rank_is_work_waiting_and_overhead():
    """Rank 1 begins a second late, and rank 0 waits for it in the node; then both idle for half a second."""
    spans = [
        Span(0, 0, "generate", "generate", 0.0, 3.0),
        Span(1, 0, "generate", "generate", 1.0, 3.0),
        Span(0, 0, "train", "train_step", 3.5, 6.0),
    ]
    work = work_s(spans, {(0, "train"): [(0, "generate")]})
    assert work[0] == {"generate": 2.0, "train_step": 2.5, WAITING: 1.0, OVERHEAD: 0.5}
    assert work[1] == {"generate": 2.0, WAITING: 4.0, OVERHEAD: 0.0}, "until the last rank has ended"


def test_waits_are_cut_off_the_nodes_in_which_a_rank_was_early():
    spans = [Span(0, 0, "move", "transfer", 0.0, 3.0), Span(1, 0, "move", "transfer", 2.0, 3.0)]
    parts = [(span.rank, span.kind, span.started_s, span.ended_s) for span in without_waits(spans)]
    assert parts == [(0, WAITING, 0.0, 2.0), (0, "transfer", 2.0, 3.0), (1, "transfer", 2.0, 3.0)]
