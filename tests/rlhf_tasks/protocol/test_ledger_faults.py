"""Ledger: lost ranks, errors, rebuilds, commits that fail."""

import pytest

from prefect_rlhf.rlhf_tasks.protocol.account import State
from prefect_rlhf.rlhf_tasks.protocol.ledger import Phase
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    RESET,
    RESTORE,
    SETUP,
    Aborted,
    Cause,
    Committed,
    Faulted,
    GaveUp,
    Ready,
    ResetRank,
    RestartRank,
    RestoreRank,
    WriteCommit,
)
from prefect_rlhf.rlhf_tasks.protocol.progress import Timeouts
from tests.rlhf_tasks.protocol.ledgers import (
    committed,
    do_nodes,
    do_parts,
    failure,
    key,
    kinds,
    ledger,
    rebuilt,
    result,
    running,
)


def test_a_lost_rank_aborts_what_cannot_commit_and_rebuilds():
    books = running()
    books.enter(0, 0, 0)
    books.enter(1, 0, 0)
    books.rank_entered(1, key("train"), 0)
    cause = Cause("lost: killed", (1,), "train", 0)
    assert books.rank_lost(1, "killed", 5) == [
        Faulted(generation=0, cause=cause),
        Aborted(iteration=0, generation=0, cause=cause),
        Aborted(iteration=1, generation=0, cause=cause),
        ResetRank(0, 1),
        RestartRank(1, lost=True),
    ]
    assert str(cause) == "rank 1, call train, iteration 1: lost: killed"
    assert books.rank_reset(0, 1, 6) == []
    assert books.rank_started(1, 7) == [ResetRank(1, 1)]
    assert books.rank_reset(1, 1, 8) == [RestoreRank(0, 1, 0), RestoreRank(1, 1, 0)]
    books.rank_restored(0, 1, 9)
    assert books.rank_restored(1, 1, 9) == [Ready(1, 0)]
    (send, _) = books.enter(0, 1, 9)
    assert (send.requests[0].number, send.requests[0].key) == (0, key("train", 0, 1))


def test_after_a_fault_iterations_run_alone_until_the_next_commit():
    books = running()
    books.rank_lost(1, "killed", 0)
    books.rank_started(1, 0)
    rebuilt(books)
    books.enter(0, 1, 0)
    assert books.enterable is None
    do_nodes(books, 0)
    do_parts(books, 0)
    books.commit_done(1, 0)
    books.enter(1, 1, 0)
    assert books.enterable == 2


def test_a_complete_iteration_commits_through_a_fault_and_the_restore_waits_for_it():
    books = running()
    books.enter(0, 0, 0)
    books.enter(1, 0, 0)
    do_nodes(books, 0)
    do_parts(books, 0)
    aborted = [i.iteration for i in books.rank_lost(1, "killed", 0) if isinstance(i, Aborted)]
    assert aborted == [1]
    books.rank_started(1, 0)
    books.rank_reset(0, 1, 0)
    assert books.rank_reset(1, 1, 0) == []
    assert books.commit_done(1, 0) == [
        committed(0),
        RestoreRank(0, 1, 1),
        RestoreRank(1, 1, 1),
    ]


def test_an_error_waits_for_news_of_a_lost_rank_that_explains_it():
    books = running(timeouts=Timeouts(blame_s=2))
    books.enter(0, 0, 0)
    assert books.rank_failed(failure(0, "train"), 0) == []
    assert books.rank_lost(1, "killed", 1)[0] == Faulted(
        generation=0, cause=Cause("lost: killed", (1,), "train", 0)
    )


@pytest.mark.parametrize("rank_lost_too", [True, False])
def test_an_error_that_no_other_loss_explains_is_the_cause(rank_lost_too):
    books = running(timeouts=Timeouts(blame_s=2))
    books.enter(0, 0, 0)
    books.rank_failed(failure(0, "train"), 0)
    books.rank_failed(failure(1, "train"), 0.1)
    assert books.tick(2) == []
    told = books.rank_lost(0, "exited", 2) if rank_lost_too else books.tick(2.1)
    assert told[0] == Faulted(generation=0, cause=Cause("broke", (0,), "train", 0, "where"))


def test_news_of_an_older_generation_changes_nothing():
    books = running()
    books.enter(0, 0, 0)
    books.rank_lost(1, "killed", 0)
    books.rank_started(1, 0)
    rebuilt(books)
    books.enter(0, 1, 0)
    for rank in (0, 1):
        assert books.rank_entered(rank, key("train"), 0) == []
        assert books.rank_done(result(rank, "train"), 0) == []
        assert books.rank_failed(failure(rank, "train"), 0) == []
        assert books.rank_refused(rank, key("train"), "late", 0) == []
        assert books.part_durable(rank, key("save"), "old", 0) == []
        assert books.rank_reset(rank, 0, 0) == books.rank_restored(rank, 0, 0) == []
    (refused,) = books.enter(0, 0, 0)
    assert "generation 0 has ended (rank 1, call train, iteration 1: lost: killed)" in refused.reason
    assert books.account.node_state(0, 1, "train") is State.WAITING


def test_a_stuck_rank_is_restarted_after_the_grace_and_its_late_reset_ignored():
    books = ledger(timeouts=Timeouts(reset_s=20))
    books.start(0)
    books.rank_reset(0, 0, 1)
    assert books.tick(20) == []
    assert books.tick(20.1) == [RestartRank(1, lost=False)]
    assert books.rank_reset(1, 0, 21) == []
    assert books.rank_lost(1, "restarted", 22) == []
    assert books.rank_started(1, 23) == [ResetRank(1, 0)]
    assert kinds(books.rank_reset(1, 0, 24)) == [RestoreRank, RestoreRank]


def test_a_rank_lost_while_others_reset_is_awaited_in_the_same_generation():
    books = ledger()
    books.start(0)
    books.rank_reset(1, 0, 1)
    assert books.rank_lost(1, "killed", 2) == [RestartRank(1, lost=True)]
    assert books.rank_reset(0, 0, 3) == []
    assert books.rank_started(1, 4) == [ResetRank(1, 0)]
    assert kinds(books.rank_reset(1, 0, 5)) == [RestoreRank, RestoreRank]


def test_a_rank_that_is_still_away_when_a_rebuild_fails_is_awaited_by_the_next_one():
    books = ledger(timeouts=Timeouts(reset_s=20, restart_s=120))
    books.start(0)
    books.rank_lost(1, "killed", 1)
    books.rank_reset(0, 0, 2)
    assert books.tick(140.1)[1:] == [ResetRank(0, 1), RestartRank(1, lost=True)]


@pytest.mark.parametrize("awaits_lost", [True, False])
def test_ranks_that_do_not_come_back_are_awaited_again_or_end_the_attempt_with_what_is_complete(awaits_lost):
    books = running(timeouts=Timeouts(reset_s=20, restart_s=120), awaits_lost=awaits_lost)
    books.enter(0, 0, 0)
    do_nodes(books, 0)
    do_parts(books, 0)
    books.rank_lost(1, "killed", 1)
    books.rank_reset(0, 1, 2)
    assert books.tick(140) == []
    told = books.tick(142)
    cause = Cause("did not come back within 140 s", (1,), missing=True, lasting=not awaits_lost)
    assert told[0] == Faulted(generation=1, cause=cause)
    if awaits_lost:
        assert RestartRank(1, lost=True) in told
        return
    assert kinds(told) == [Faulted], "the commit of iteration 1 is being written"
    assert books.commit_done(1, 143)[-1] == GaveUp(
        reason="rank 1: did not come back within 140 s", committed_step=1, missing=(1,)
    )


def test_a_rank_that_cannot_reset_gets_a_new_process():
    books = ledger()
    books.start(0)
    assert books.rank_failed(failure(1, RESET, SETUP), 0) == [RestartRank(1, lost=False)]


def test_a_rank_whose_process_was_replaced_unnoticed_is_a_fault():
    books = running()
    books.enter(0, 0, 0)
    instructions = books.rank_started(1, 0)
    assert instructions[0].cause.error == "lost: its process was replaced"
    assert instructions[-2:] == [ResetRank(0, 1), ResetRank(1, 1)]


@pytest.mark.parametrize("how", ["lost", "failed", "refused"])
def test_a_fault_while_restoring_starts_another_generation(how):
    books = ledger()
    books.start(0)
    for rank in (0, 1):
        books.rank_reset(rank, 0, 0)
    if how == "lost":
        told = books.rank_lost(1, "killed", 0)
    elif how == "failed":
        told = books.rank_failed(failure(1, RESTORE, SETUP), 0) or books.tick(2)
    else:
        told = books.rank_refused(1, key(RESTORE, SETUP), "no lease", 0) or books.tick(2)
    assert isinstance(told[0], Faulted)
    assert told[0].cause.iteration is None
    assert (books.phase, books.generation) == (Phase.RESETTING, 1)


def test_a_refused_lease_ends_the_attempt_with_the_holders_name():
    books = ledger()
    books.start(0)
    (given_up,) = books.rank_refused(1, key(RESET, SETUP), "held by run 'other'", 0)
    assert given_up == GaveUp(reason="rank 1, call reset: held by run 'other'", committed_step=0)
    assert books.enter(0, 0, 0)[0].reason == "the attempt has ended."


def test_a_gap_or_a_refused_request_is_a_fault():
    books = running()
    books.enter(0, 0, 0)
    assert books.rank_refused(1, key("save"), "request 0 was not delivered", 0) == []
    assert str(books.tick(2)[0].cause) == "rank 1, call save, iteration 1: request 0 was not delivered"


def test_three_rebuilds_without_a_commit_then_a_clear_stop():
    books = running(max_restarts=3)
    for _ in range(3):
        assert isinstance(books.rank_lost(1, "killed", 0)[-1], RestartRank)
        books.rank_started(1, 0)
        rebuilt(books)
    assert books.rank_lost(1, "killed", 0)[-1] == GaveUp(
        reason="rank 1: lost: killed (after 3 rebuilds without a commit in between)", committed_step=0
    )


@pytest.mark.parametrize("max_rebuilds", [0, 1])
def test_a_commit_in_between_allows_further_rebuilds_also_when_it_ends_during_one(max_rebuilds):
    books = running(max_restarts=max_rebuilds)
    for generation in range(6):
        books.enter(generation, generation, 0)
        do_nodes(books, generation)
        do_parts(books, generation)
        assert isinstance(books.rank_lost(1, "killed", 0)[-1], RestartRank)
        books.commit_done(generation + 1, 0)
        books.rank_started(1, 0)
        rebuilt(books)
    assert books.committed_step == 6


def test_a_commit_that_fails_is_done_again_and_one_that_hangs_ends_the_attempt():
    books = running(io_floor_s=30, io_least_bytes_per_s=10)
    books.enter(0, 0, 0)
    do_nodes(books, 0)
    do_parts(books, 0, now=5)
    told = books.commit_failed(1, "bits", False, 6)
    assert kinds(told) == [Faulted, Aborted, ResetRank, ResetRank]
    assert str(told[0].cause) == "step 1 could not be committed: bits"
    rebuilt(books, 7)
    books.enter(0, 1, 8)
    do_nodes(books, 0, 8)
    do_parts(books, 0, now=9)
    for now in range(9, 900, 10):
        books.disk_moved(20 * now, now)
        assert books.tick(now) == []
    assert books.tick(899 + 30) == []
    (end,) = books.tick(899 + 30.1)
    assert end.reason.startswith(
        "step 1 is not committed: the controller has written fewer than 300 bytes in 30"
    )
    assert end.committed_step == 0


# --- the user's code ----------------------------------------------------------------------------------------


def by_user_code(rank, node, iteration=0, generation=0):
    return failure(rank, node, iteration, generation).model_copy(update={"lasting": True})


def test_a_fault_of_the_users_code_ends_the_attempt_at_once_without_a_rebuild():
    books = running()
    books.enter(0, 0, 0)
    books.enter(1, 0, 0)
    cause = Cause("broke", (0,), "train", 0, "where", lasting=True)
    assert books.rank_failed(by_user_code(0, "train"), 5) == [
        Faulted(generation=0, cause=cause),
        Aborted(iteration=0, generation=0, cause=cause),
        Aborted(iteration=1, generation=0, cause=cause),
        GaveUp(reason="rank 0, call train, iteration 1: broke", committed_step=0, traceback="where"),
    ]
    assert books.phase is Phase.STOPPED


def ending():
    """Iteration 0 is complete and being committed; the user's code has failed in iteration 1."""
    books = running()
    books.enter(0, 0, 0)
    books.enter(1, 0, 0)
    do_nodes(books, 0)
    do_parts(books, 0)
    told = books.rank_failed(by_user_code(0, "train", 1), 0)
    assert kinds(told) == [Faulted, Aborted]
    assert (told[1].iteration, books.phase) == (1, Phase.ENDING)
    return books


def test_what_is_complete_is_committed_before_the_users_fault_ends_the_attempt():
    assert ending().commit_done(1, 0) == [
        committed(0),
        GaveUp(reason="rank 0, call train, iteration 2: broke", committed_step=1, traceback="where"),
    ]


def test_a_commit_after_which_another_one_waits_is_written_too():
    books = running()
    for iteration in (0, 1):
        books.enter(iteration, 0, 0)
        do_nodes(books, iteration)
    books.part_durable(0, key("save", 0), "a", 0)
    assert kinds(books.part_durable(1, key("save", 0), "b", 0)) == [WriteCommit]
    do_parts(books, 1)
    assert kinds(books.rank_failed(by_user_code(1, "train", 1), 0)) == [Faulted]
    assert kinds(books.commit_done(1, 0)) == [Committed, WriteCommit]
    assert books.commit_done(2, 0)[-1] == GaveUp(
        reason="rank 1, call train, iteration 2: broke", committed_step=2, traceback="where"
    )


@pytest.mark.parametrize(
    "news",
    [
        lambda books: books.rank_lost(1, "killed", 0),
        lambda books: books.rank_started(1, 0),
        lambda books: books.rank_failed(failure(1, "train", 1), 0),
        lambda books: books.rank_failed(by_user_code(1, "train", 1), 0),
        lambda books: books.rank_refused(1, key("train", 1), "gap", 0),
        lambda books: books.rank_done(result(1, "train", 1), 0),
        lambda books: books.part_durable(1, key("save", 1), "b", 0),
        lambda books: books.tick(200),
    ],
)
def test_nothing_but_the_commit_counts_after_a_fault_of_the_users_code(news):
    books = ending()
    assert news(books) == []
    assert books.enter(1, 0, 0)[0].reason == "the attempt has ended."
    assert isinstance(books.commit_done(1, 0)[-1], GaveUp)


def test_a_fault_of_the_users_code_ends_the_attempt_also_where_that_commit_fails_or_hangs():
    cause = "rank 0, call train, iteration 2: broke"
    assert ending().commit_failed(1, "disk full", True, 0) == [
        GaveUp(reason=f"{cause}; step 1 could not be committed: disk full", committed_step=0)
    ]
    (end,) = ending().tick(301)
    assert end.reason.startswith(
        "step 1 is not committed: the controller has written fewer than 3000 bytes in 300 s"
    )


def test_a_fault_of_the_users_code_needs_no_lost_rank_to_explain_it():
    books = running(timeouts=Timeouts(blame_s=2))
    books.enter(0, 0, 0)
    assert books.rank_failed(failure(1, "train"), 0) == []
    told = books.rank_failed(by_user_code(0, "train"), 1)
    assert told[-1] == GaveUp(
        reason="rank 0, call train, iteration 1: broke", committed_step=0, traceback="where"
    )


def test_a_fault_of_the_users_code_in_a_generation_that_has_ended_changes_nothing():
    books = running()
    books.enter(0, 0, 0)
    books.rank_lost(1, "killed", 0)
    assert books.rank_failed(by_user_code(0, "train"), 0) == []
    assert books.phase is Phase.RESETTING


# --- the disk -----------------------------------------------------------------------------------------------


def writing():
    """Iteration 0 is complete and being committed, 1 is running."""
    books = running()
    books.enter(0, 0, 0)
    books.enter(1, 0, 0)
    do_nodes(books, 0)
    do_parts(books, 0)
    return books


def test_a_commit_that_a_full_disk_refuses_ends_the_attempt_at_once_without_a_rebuild():
    told = writing().commit_failed(1, "no space left", True, 6)
    assert kinds(told) == [Faulted, Aborted, Aborted, GaveUp]
    assert told[-1] == GaveUp(reason="step 1 could not be committed: no space left", committed_step=0)


def test_so_does_one_that_is_refused_while_the_ranks_reset():
    books = writing()
    books.rank_lost(1, "killed", 1)
    assert books.phase is Phase.RESETTING
    assert books.commit_failed(1, "no space left", True, 6)[-1] == GaveUp(
        reason="step 1 could not be committed: no space left", committed_step=0
    )
    assert books.phase is Phase.STOPPED
