"""Ledger: stimulus in, instructions out."""

import pytest

from prefect_rlhf.rlhf_tasks.protocol.account import State
from prefect_rlhf.rlhf_tasks.protocol.ledger import TRANSITIONS, Phase
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    SETUP,
    Committed,
    Finished,
    IterationDone,
    NodeEnded,
    NotEntered,
    Ready,
    ResetRank,
    RestoreRank,
    Send,
    WriteCommit,
)
from prefect_rlhf.rlhf_tasks.protocol.progress import Timeouts
from tests.rlhf_tasks.protocol.ledgers import (
    committed,
    do_nodes,
    do_parts,
    key,
    kinds,
    ledger,
    pair_plan,
    result,
    running,
)

# --- the happy path -------------------------------------------------------------------------------------


PACE = {"io_floor_s": 100, "io_least_bytes_per_s": 10}


def test_from_the_start_to_ready():
    books = ledger()
    assert books.start(0) == [ResetRank(0, 0), ResetRank(1, 0)]
    assert books.rank_reset(0, 0, 1) == []
    assert books.rank_reset(0, 0, 1) == [], "a repeat"
    assert books.rank_reset(1, 0, 2) == [RestoreRank(0, 0, 0), RestoreRank(1, 0, 0)]
    assert books.rank_restored(1, 0, 3) == []
    assert books.enterable is None
    assert books.rank_restored(0, 0, 3) == [Ready(generation=0, iteration=0)]
    assert books.enterable == 0


def test_a_run_without_a_commit_initialises_its_roles_and_commits_step_0_first():
    books = ledger(committed_step=None)
    books.start(0)
    books.rank_reset(0, 0, 0)
    assert books.rank_reset(1, 0, 0) == [RestoreRank(0, 0, None), RestoreRank(1, 0, None)]
    assert do_parts(books, SETUP) == [], "a rank is still initialising"
    books.rank_restored(0, 0, 0)
    (commit,) = books.rank_restored(1, 0, 0)
    assert commit == WriteCommit(0, (), {"save": {0: "a", 1: "b"}}, 0, {"actor": 0}, pair_plan())
    assert books.enterable is None
    assert books.commit_done(0, 0) == [Ready(0, 0)]


def test_one_iteration_from_entry_to_commit():
    books = running()
    sends = books.enter(0, 0, 0)
    assert [(s.rank, [(r.number, r.key) for r in s.requests]) for s in sends] == [
        (rank, [(0, key("train")), (1, key("save"))]) for rank in (0, 1)
    ]
    assert books.enter(0, 0, 0) == [], "idempotent"
    for rank in (0, 1):
        assert books.rank_entered(rank, key("train"), 0) == []
    assert books.rank_done(result(0, "train"), 0) == []
    assert books.rank_done(result(0, "train"), 0) == []
    (done,) = books.rank_done(result(1, "train"), 0)
    assert done == NodeEnded(iteration=0, generation=0, node="train", started_s=0, ended_s=1)
    books.rank_done(result(0, "save"), 0)
    assert kinds(books.rank_done(result(1, "save"), 0)) == [NodeEnded, IterationDone]
    parts = {"save": {0: "a", 1: "b"}}
    assert do_parts(books, 0) == [WriteCommit(1, (0,), parts, 8, {"actor": 1}, pair_plan())]
    assert do_parts(books, 0) == [], "repeats"
    assert books.commit_done(1, 0) == [committed(0)]
    assert books.commit_done(1, 0) == []


def test_two_iterations_are_in_flight_and_the_third_waits_for_the_first_ones_commit():
    books = running()
    assert kinds(books.enter(0, 0, 0)) == [Send, Send]
    assert kinds(books.enter(1, 0, 0)) == [Send, Send]
    (refused,) = books.enter(2, 0, 0)
    assert refused.reason == "iterations 1 to 2 are in flight; 3 may enter when 1 is committed."
    do_nodes(books, 0)
    do_parts(books, 0)
    assert books.enterable is None, "written is not committed"
    books.commit_done(1, 0)
    assert books.enterable == 2


@pytest.mark.parametrize(
    ("iteration", "generation", "reason"),
    [
        (1, 0, "the next one is 1"),
        (0, 1, "this is generation 0"),
    ],
)
def test_an_iteration_is_refused_out_of_turn(iteration, generation, reason):
    (refused,) = running().enter(iteration, generation, 0)
    assert isinstance(refused, NotEntered)
    assert reason in refused.reason


def test_a_resumed_attempt_goes_on_after_its_commit():
    books = running(committed_step=4, cursor=32)
    (send, _) = books.enter(4, 0, 0)
    request = send.requests[0]
    assert (request.number, request.first_sample, request.versions) == (0, 32, {"actor": 4})


def test_a_run_that_is_finished_already_ends_at_once():
    assert ledger(committed_step=9).start(0) == [Finished(step=9)]


def test_too_few_ranks_are_refused():
    with pytest.raises(ValueError, match="needs 2 devices; there are 1"):
        ledger(n_ranks=1)


# --- the end, and snapshots -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "wanted", "delivered", "last"),
    [(1, 3, 1, 3), (1, 0, 1, 1), (1, 50, 0, 8), (2, 2, 1, 2), (4, 0, 1, 2), (4, 5, 1, 5), (4, 8, 1, 8)],
)
def test_a_stop_takes_effect_after_what_is_delivered_and_makes_a_snapshot(every, wanted, delivered, last):
    books = running(snapshot_every=every)
    for iteration in range(delivered + 1):
        books.enter(iteration, 0, 0)
    assert books.stop_after(wanted, 0) == []
    assert books.last_iteration == last
    assert books.account.commits.is_snapshot(last)


def test_the_commit_of_the_last_iteration_finishes_the_attempt():
    books = running()
    books.enter(0, 0, 0)
    books.stop_after(0, 0)
    (refused,) = books.enter(1, 0, 0)
    assert refused.reason == "iteration 1 is the last one."
    do_nodes(books, 0)
    do_parts(books, 0)
    assert books.commit_done(1, 0) == [committed(0), Finished(step=1)]
    assert books.tick(1e9) == books.rank_lost(0, "gone", 0) == []


def test_fewer_snapshots_count_complete_iterations_and_commit_several_at_once():
    books = running(snapshot_every=3)
    for iteration in range(3):
        books.enter(iteration, 0, 0)
        do_nodes(books, iteration)
    assert books.enterable == 3
    (commit,) = do_parts(books, 2)
    assert (commit.step, commit.iterations) == (3, (0, 1, 2))
    assert books.commit_done(3, 0) == [committed(t) for t in (0, 1, 2)]


def test_iterations_go_on_while_a_snapshot_is_written_but_only_two_snapshots_are_unfinished():
    books = running(snapshot_every=2)
    for iteration in range(5):
        assert books.enter(iteration, 0, 0) != []
        do_nodes(books, iteration)
    (refused,) = books.enter(5, 0, 0)
    assert refused.reason == "the snapshots of 2 iterations are being written; 6 may enter after one."
    do_parts(books, 1)
    assert books.enterable == 5


def test_the_results_of_all_that_a_commit_makes_final_are_there_when_it_is_written():
    books = running(snapshot_every=20, total_iterations=20)
    for iteration in range(20):
        books.enter(iteration, 0, 0)
        do_nodes(books, iteration)
    do_parts(books, 19)
    final = [i.iteration for i in books.commit_done(20, 0) if isinstance(i, Committed)]
    assert final == list(range(20))
    assert all(len(books.account.results(iteration)["train"]) == 2 for iteration in final)


# --- watchers -------------------------------------------------------------------------------------------


def test_what_a_watcher_sees():
    books = running()
    account = books.account
    assert (account.iteration_state(0, 0), account.node_state(0, 0, "train")) == (State.WAITING,) * 2
    books.enter(0, 0, 0)
    books.rank_entered(0, key("train"), 0)
    assert account.node_state(0, 0, "train") is State.WAITING
    books.rank_entered(1, key("train"), 0)
    assert (account.iteration_state(0, 0), account.node_state(0, 0, "train")) == (State.RUNNING,) * 2
    do_nodes(books, 0)
    assert (account.iteration_state(0, 0), account.node_state(0, 0, "train")) == (State.DONE,) * 2
    assert account.results(0)["train"] == {0: result(0, "train"), 1: result(1, "train")}
    do_parts(books, 0)
    books.commit_done(1, 0)
    assert account.iteration_state(0, 0) is State.COMMITTED
    books.enter(1, 0, 0)
    books.rank_lost(1, "killed", 0)
    assert (account.iteration_state(1, 0), account.node_state(1, 0, "train")) == (State.ABORTED,) * 2
    assert account.iteration_state(1, 1) is State.WAITING, "the repetition"
    assert account.node_state(0, 0, "train") is State.DONE


def test_memory_stays_bounded_over_many_iterations():
    books = running(total_iterations=100)
    for iteration in range(100):
        books.enter(iteration, 0, 0)
        do_nodes(books, iteration)
        do_parts(books, iteration)
        books.commit_done(iteration + 1, 0)
        assert len(books.account._iterations) <= 11
    account = books.account
    assert account.node_state(3, 0, "train") is State.DONE
    assert account.summary(3, "train") is None
    assert account.summary(98, "train") == account.summary(99, "train")
    assert [len(account.results(t)["train"]) for t in (97, 98, 99)] == [0, 0, 2]


# --- deadlines ------------------------------------------------------------------------------------------


def test_a_nodes_deadline_runs_from_its_last_ranks_entry():
    books = running(timeouts=Timeouts(entry_s=1e6))
    books.enter(0, 0, 0)
    books.rank_entered(0, key("train"), 0)
    assert books.tick(1000) == [], "a queued request does not expire"
    books.rank_entered(1, key("train"), 1000)
    books.rank_done(result(0, "train"), 1005)
    assert books.tick(1010) == []
    cause = books.tick(1010.1)[0].cause
    assert str(cause).startswith(
        "rank 1, call train, iteration 1: not finished 10 s after the last rank entered"
    )
    assert "raise patience" in str(cause)


def test_a_rank_that_has_work_and_enters_nothing_is_overdue():
    books = running(timeouts=Timeouts(entry_s=60))
    books.enter(0, 0, 0)
    books.rank_entered(0, key("train"), 0)
    assert books.tick(60) == []
    cause = books.tick(60.1)[0].cause
    assert str(cause) == "rank 1, call train, iteration 1: did not enter its next call within 60 s"


def test_a_rank_without_work_is_never_overdue():
    books = running(timeouts=Timeouts(entry_s=60))
    books.enter(0, 0, 0)
    do_nodes(books, 0)
    do_parts(books, 0)
    books.commit_done(1, 0)
    assert books.tick(1e6) == []


def test_a_part_of_which_nothing_is_written_is_overdue():
    books = running(**PACE)
    books.enter(0, 0, 0)
    do_nodes(books, 0, now=10)
    books.part_durable(0, key("save"), "a", 11)
    assert books.tick(110) == []
    cause = books.tick(110.1)[0].cause
    assert str(cause).startswith("rank 1, call save, iteration 1: the saved part does not become durable")
    assert "raise patience" in str(cause)


def test_a_part_may_take_for_ever_while_its_bytes_are_written_at_the_least_rate():
    """10 bytes a second are asked for, by a hundred seconds: each rank by its own bytes."""
    books = running(**PACE)
    books.enter(0, 0, 0)
    do_nodes(books, 0, now=0)
    for now in range(0, 5000, 50):
        books.rank_moved(0, 0, 20 * now, now)
        books.rank_moved(1, 0, 20 * now, now)
        assert books.tick(now) == []
    for now in range(5000, 5200, 50):
        books.rank_moved(0, 0, 20 * now, now)
        books.rank_moved(1, 0, 20 * 5000 + 5 * (now - 5000), now)
        told = books.tick(now)
    assert told[0].cause.ranks == (1,)


def test_restoring_may_take_for_ever_while_any_rank_reads():
    """The others may wait for it in a collective."""
    books = ledger(**PACE)
    books.start(0)
    for rank in (0, 1):
        books.rank_reset(rank, 0, 0)
    for now in range(0, 5000, 50):
        books.rank_moved(1, 0, 20 * now, now)
        assert books.tick(now) == []
    books.rank_restored(1, 0, 5000)
    assert books.tick(5100) == []
    assert books.tick(5101)[0].cause.ranks == (0,)


def test_what_a_rank_has_moved_in_an_older_generation_is_no_progress():
    books = running(**PACE)
    books.enter(0, 0, 0)
    do_nodes(books, 0, now=0)
    books.rank_moved(0, 7, 10**6, 90)
    books.rank_moved(1, 7, 10**6, 90)
    assert books.tick(101)[0].cause.ranks == (0,)


@pytest.mark.parametrize(("stage", "limit"), [("reset", 140), ("restore", 100)])
def test_a_rebuild_that_does_not_go_on_is_a_fault(stage, limit):
    books = ledger(timeouts=Timeouts(reset_s=20, restart_s=120), **PACE)
    books.start(0)
    for rank in (0, 1) if stage == "restore" else (0,):
        books.rank_reset(rank, 0, 0)
    books.tick(limit)
    assert books.generation == 0
    assert books.tick(limit + 0.1)[0].cause.ranks == ((0, 1) if stage == "restore" else (1,))
    assert books.generation == 1


def test_every_phase_has_a_row_in_the_table():
    assert set(TRANSITIONS) == set(Phase)
