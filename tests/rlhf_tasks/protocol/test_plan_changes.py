"""A change of the plan: at the first iteration not delivered, without losing a step, the same after any fault."""

import pytest

from rlhf_tasks.protocol import instructions as do
from rlhf_tasks.protocol.messages import Committed, Faulted, Finished, PlanChanged
from rlhf_tasks.protocol.phases import Phase, Timeouts
from rlhf_tasks.protocol.scheduled_plans import ScheduledPlan, plan_at
from rlhf_tasks.spec import ExecutionPlan, SaveNode
from tests.rlhf_tasks.protocol.ledgers import (
    committed,
    do_nodes,
    do_parts,
    failure,
    kinds,
    pair_plan,
    rebuilt,
    result,
    running,
)
from tests.rlhf_tasks.protocol.plans import call, on, plan_of, small_plan

ITERATIONS = 8


def single_plan() -> ExecutionPlan:
    """What `pair_plan` does, on rank 1 alone."""
    alone = on([1])
    train = call("train", "actor", "train_step", alone)
    return plan_of(2, {"actor": alone}, [train, SaveNode(name="save", role="actor", placement=alone)])


def finish(books, iteration: int) -> list:
    """Both ranks do an iteration and it is committed; what the commit brings."""
    do_nodes(books, iteration)
    do_parts(books, iteration)
    return books.commit_done(iteration + 1, 0)


def changing(delivered: int = 2, **changes):
    """A ledger that has delivered some iterations and written down that the next one goes by another plan."""
    books = running(**changes)
    for iteration in range(delivered):
        books.enter(iteration, books.generation, 0)
    (log,) = books.change_plan(single_plan(), {"train": 7.0}, 0)
    assert books.plan_logged(0) == [PlanChanged(planned=log.planned)]
    return books


# --- the ledger -----------------------------------------------------------------------------------------


def test_a_plan_begins_at_the_first_iteration_not_delivered():
    books = running()
    books.enter(0, 0, 0)
    books.enter(1, 0, 0)
    (log,) = books.change_plan(single_plan(), {}, 0)
    assert log.planned.iteration == 2
    finish(books, 0)
    assert books.enterable is None, "iteration 2 goes by a plan that is not written down yet"
    assert books.plan_logged(0) == [PlanChanged(planned=log.planned)]
    (refused,) = books.enter(2, 0, 0)
    assert "the plan changes at iteration 3" in refused.reason


def test_delivered_iterations_are_committed_under_their_own_plan_and_then_all_ranks_load_that_commit():
    books = changing()
    assert kinds(finish(books, 0)) == [Committed]
    do_nodes(books, 1)
    (commit,) = do_parts(books, 1)
    assert commit.plan == pair_plan()
    resets = [do.ResetRank(0, 1, keep_state=True), do.ResetRank(1, 1, keep_state=True)]
    assert books.commit_done(2, 0) == [committed(1), *resets]
    assert books.rank_reset(0, 1, 0) == []
    assert books.rank_reset(1, 1, 0) == [do.RestoreRank(0, 1, 2), do.RestoreRank(1, 1, 2)]
    books.rank_restored(0, 1, 0)
    assert books.rank_restored(1, 1, 0) == [do.Ready(1, 2)]
    (send,) = books.enter(2, 1, 0)
    assert send.rank == 1, "the new plan's only rank"
    assert [r.deadline_s for r in send.requests] == [70.0, 10.0], "the new plan's predictions"
    assert [r.versions["actor"] for r in send.requests] == [2, 3]
    assert {r.first_sample for r in send.requests} == {16}
    for node in ("train", "save"):
        books.rank_done(result(1, node, 2, 1), 0)
    save = result(1, "save", 2, 1).key
    (commit,) = books.part_durable(1, save, "b", 0)
    assert (commit.step, commit.plan, commit.parts) == (3, single_plan(), {"save": {1: "b"}})


def test_ranks_that_keep_their_state_have_time_to_copy_it_and_new_processes_keep_nothing():
    books = changing(timeouts=Timeouts(reset_s=5, restart_s=30), io_floor_s=50, io_least_bytes_per_s=1)
    for iteration in range(2):
        finish(books, iteration)
    assert books.phase is Phase.RESETTING
    assert books.tick(49) == []
    assert books.tick(51) == [do.RestartRank(0, lost=False), do.RestartRank(1, lost=False)]
    assert books.rank_started(1, 52) == [do.ResetRank(1, 1)]


def test_an_entry_under_the_generation_of_the_old_plan_is_refused_as_such():
    books = running()
    books.enter(0, 0, 0)
    books.rank_failed(failure(0, "train"), 0)
    books.tick(100)
    rebuilt(books, 100)
    books.enter(0, 1, 100)
    (refused,) = books.enter(0, 0, 100)
    assert "generation 0 has ended (rank 0, call train, iteration 1: broke)" in refused.reason
    books.change_plan(single_plan(), {}, 100)
    finish(books, 0)
    books.plan_logged(0)
    (refused,) = books.enter(1, 1, 0)
    assert "generation 1 has ended (the plan has changed)" in refused.reason


def test_a_plan_may_change_before_anything_is_in_flight_again():
    books = running()
    books.enter(0, 0, 0)
    finish(books, 0)
    (log,) = books.change_plan(single_plan(), {}, 0)
    assert log.planned.iteration == 1
    assert kinds(books.plan_logged(0)) == [PlanChanged, do.ResetRank, do.ResetRank]


def test_a_change_that_cannot_be_written_down_is_none():
    books = running()
    books.enter(0, 0, 0)
    books.change_plan(single_plan(), {}, 0)
    (refused,) = books.plan_not_logged("No space left on device", 0)
    assert "No space left" in refused.reason
    assert books.enterable == 1
    finish(books, 0)
    assert books.phase is Phase.RUNNING


def test_a_change_follows_a_snapshot():
    books = running(snapshot_every=3, total_iterations=9)
    books.enter(0, 0, 0)
    (log,) = books.change_plan(single_plan(), {}, 0)
    assert log.planned.iteration == 3


def test_no_change_after_the_last_iteration_nor_on_top_of_another():
    books = running(total_iterations=2)
    books.enter(0, 0, 0)
    books.enter(1, 0, 0)
    (refused,) = books.change_plan(single_plan(), {}, 0)
    assert refused.reason == "the run ends with iteration 2."
    (refused,) = changing().change_plan(pair_plan(), {}, 0)
    assert refused.reason == "the plan that begins at iteration 3 has not been used yet."


def test_an_early_stop_comes_before_a_later_change():
    books = changing()
    books.stop_after(1, 0)
    finish(books, 0)
    assert books.enter(2, 0, 0)[0].reason == "iteration 2 is the last one."
    assert kinds(finish(books, 1)) == [Committed, Finished]


def test_a_plan_for_more_devices_than_ranks_is_refused():
    with pytest.raises(ValueError, match="needs 3 devices; there are 2 ranks"):
        running().change_plan(small_plan(), {}, 0)


def test_after_a_fault_the_change_comes_where_it_was_written_down():
    books = changing()
    books.rank_failed(failure(0, "train"), 0)
    assert Faulted in kinds(books.tick(9))
    rebuilt(books, 9)
    for iteration in (0, 1):
        (first, second) = books.enter(iteration, 1, 9)
        assert (first.rank, second.rank) == (0, 1), "iterations before the change go by the old plan"
        brought = finish(books, iteration)
    assert kinds(brought) == [Committed, do.ResetRank, do.ResetRank]
    assert (books.generation, books.account.next_iteration) == (2, 2)


def test_changes_of_the_plan_are_no_faults():
    books = changing(max_restarts=0)
    finish(books, 0), finish(books, 1)
    rebuilt(books)
    assert books.enterable == 2
    books.enter(2, 1, 0)
    assert books.enterable == 3, "two are in flight again"


@pytest.mark.parametrize(("step", "plan"), [(1, pair_plan()), (2, single_plan()), (5, single_plan())])
def test_a_resumed_run_goes_by_the_log(step, plan):
    plans = (ScheduledPlan(iteration=0, plan=pair_plan()), ScheduledPlan(iteration=2, plan=single_plan()))
    resumed = running(plans=plans, committed_step=step, cursor=8 * step)
    sends = resumed.enter(step, 0, 0)
    assert [send.rank for send in sends] == list(plan.node("train").devices)
    assert plan_at(plans, step).plan == plan


def test_a_change_behind_the_snapshot_of_a_pause_comes_also_in_the_next_attempt():
    """snapshot_every=5: only the pause lets iteration 6 end in a snapshot, and the change of the plan follows it."""
    books = running(snapshot_every=5, total_iterations=20, committed_step=5)
    books.enter(5, 0, 0)
    books.pause(0)
    books.enter(6, 0, 0)
    (log,) = books.change_plan(single_plan(), {}, 0)
    assert log.planned.iteration == 7
    books.plan_logged(0)
    resumed = running(plans=(*books.account.plans,), snapshot_every=5, total_iterations=20, committed_step=5)
    resumed.enter(5, 0, 0)
    do_nodes(resumed, 5)
    resumed.enter(6, 0, 0)
    assert do.ResetRank in kinds(finish(resumed, 6)), "the commit before the change"
    rebuilt(resumed)
    assert resumed.enterable == 7
