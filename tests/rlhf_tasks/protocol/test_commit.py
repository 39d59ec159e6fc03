"""Which step may be committed when, and when a commit is worth what it costs."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.rlhf_tasks.protocol.commit import (
    MOST_UNWRITTEN,
    WRITING_SHARE,
    Cadence,
    CommitOrder,
    SnapshotSchedule,
)
from prefect_rlhf.rlhf_tasks.protocol.messages import SETUP, Committed, Finished
from tests.rlhf_tasks.protocol.ledgers import do_nodes, do_parts, failure, key, rebuilt, result, running
from tests.rlhf_tasks.protocol.plans import small_plan
from tests.rlhf_tasks.protocol.simulation import World


def order(committed: int | None = 0, every: int = 1, total: int = 10) -> CommitOrder:
    return CommitOrder(SnapshotSchedule(every, total), committed)


@pytest.mark.parametrize(
    ("every", "total", "snapshots"),
    [(1, 3, [SETUP, 0, 1, 2]), (2, 5, [SETUP, 1, 3, 4]), (3, 6, [SETUP, 2, 5]), (9, 4, [3])],
)
def test_every_kth_iteration_and_the_last_end_in_a_snapshot(every, total, snapshots):
    schedule = SnapshotSchedule(every, total)
    found = [t for t in range(SETUP, total) if schedule.is_snapshot(t)]
    assert [t for t in found if t != SETUP] == [t for t in snapshots if t != SETUP]
    assert schedule.is_snapshot(SETUP)


def test_a_snapshot_interval_of_zero_is_refused():
    with pytest.raises(ValueError, match="snapshot_every=0"):
        SnapshotSchedule(0, 3)


def test_commits_follow_the_iterations_not_their_completion():
    commits = order()
    commits.complete(1)
    assert commits.start_next() is None
    commits.complete(0)
    assert commits.start_next() == 1
    assert commits.start_next() is None, "one at a time"
    assert commits.written(1) == range(0, 1)
    assert commits.start_next() == 2
    assert commits.written(2) == range(1, 2)
    assert (commits.committed, commits.pending) == (2, False)


def test_step_0_comes_first():
    commits = order(committed=None)
    commits.complete(0)
    assert commits.start_next() is None
    commits.complete(SETUP)
    assert commits.start_next() == 0
    assert commits.written(0) == range(SETUP, 0)
    assert commits.start_next() == 1


def test_a_commit_covers_the_iterations_since_the_last_snapshot():
    commits = order(every=3)
    for iteration in (0, 2, 1):
        assert commits.start_next() is None
        commits.complete(iteration)
    assert commits.start_next() == 3
    assert commits.written(3) == range(0, 3)


def test_a_fault_spares_what_a_commit_can_still_cover():
    commits = order(every=2)
    for iteration in (0, 1, 2):
        commits.complete(iteration)
    assert commits.lost([0, 1, 2, 3]) == [2, 3]
    assert commits.pending
    assert commits.start_next() == 2
    commits.written(2)
    assert commits.first_incomplete == 2, "iteration 2 was forgotten and is to be done again"


def test_what_a_failed_commit_covered_is_done_again():
    commits = order()
    commits.complete(0)
    commits.start_next()
    commits.failed()
    assert (commits.pending, commits.committed, commits.lost([0, 1])) == (False, 0, [0, 1])


def decided(iteration_s: float, commit_s: float, max_s: float, iterations: int = 200) -> list[int]:
    """The iterations that end in a snapshot, where iteration t + 1 is delivered when t begins to run, and a commit
    takes `commit_s` seconds beside the next iterations."""
    cadence, chosen = Cadence(max_s), list[int]()
    cadence.begin(0, 0.0)
    writing: list[tuple[float, int]] = []

    def deliver(iteration: int) -> None:
        wanted = cadence.wants(iteration)
        cadence.delivered(iteration, wanted)
        if wanted:
            chosen.append(iteration)

    deliver(0)
    for iteration in range(iterations):
        now = (iteration + 1) * iteration_s
        while writing and writing[0][0] + commit_s <= now:
            began_s, which = writing.pop(0)
            cadence.wrote(which, began_s + commit_s)
            cadence.committed(which)
            assert len(writing) < MOST_UNWRITTEN
        deliver(iteration + 1)
        cadence.iteration_ended(iteration, now)
        if iteration in chosen:
            cadence.writing(iteration, now)
            writing.append((now, iteration))
    return [iteration for iteration in chosen if iteration < iterations]


def gaps(chosen: list[int]) -> set[int]:
    """The distances between snapshots, once a commit and an iteration are measured."""
    return {later - earlier for earlier, later in pairwise(chosen[2:])}


@pytest.mark.parametrize(
    ("iteration_s", "commit_s", "max_s", "gap"),
    [
        (10.0, 0.5, 1e9, 1),  # 5% of one iteration
        (10.0, 0.6, 1e9, 2),
        (25.0, 80.0, 1e9, 64),  # 7B + 7B: 161 GB at 2 GB/s beside iterations of 25 s
        (25.0, 80.0, 900.0, 32),  # what is at risk counts for more: 32 iterations and the writing are 880 s
        (25.0, 80.0, 10.0, 5),  # a bound that cannot be held: one commit after the other
    ],
)
def test_a_commit_comes_as_often_as_it_is_worth(iteration_s, commit_s, max_s, gap):
    chosen = decided(iteration_s, commit_s, max_s)
    assert chosen[0] == 0, "nothing is measured yet"
    assert gaps(chosen) == {gap}


@given(st.floats(0.1, 1000), st.floats(0.01, 100), st.floats(10, 1e5))
def test_writing_stays_below_its_share_and_no_more_than_max_s_is_at_risk(iteration_s, commit_s, max_s):
    """Where both cannot be had, the bound on what is at risk counts; no bound holds against iterations that are
    longer than itself."""
    chosen = decided(iteration_s, commit_s, max_s)
    for gap in gaps(chosen):
        at_risk_s = gap * iteration_s + commit_s
        assert at_risk_s <= max_s + 1e-6 or gap * iteration_s <= max(
            3 * iteration_s, commit_s + 3 * iteration_s
        )
        cheap = commit_s <= WRITING_SHARE * gap * iteration_s + 1e-6
        assert cheap or at_risk_s + iteration_s > max_s - 1e-6, "too early"


def test_time_counts_while_anything_is_written_and_once():
    cadence = Cadence(1e9)
    cadence.writing("a", 0.0)
    cadence.writing("b", 5.0)
    cadence.writing("a", 6.0)
    cadence.wrote("a", 10.0)
    cadence.wrote("b", 20.0)
    cadence.wrote("b", 25.0)
    cadence.writing("manifest", 30.0)
    cadence.wrote("manifest", 31.0)
    cadence.committed(0)
    assert cadence.commit_s == 21.0


def test_one_long_iteration_does_not_change_the_cadence():
    """A pause of hours, or an evaluation."""
    cadence = Cadence(1e9)
    cadence.begin(0, 0.0)
    for iteration, now in enumerate((10.0, 20.0, 40_000.0, 40_010.0)):
        cadence.iteration_ended(iteration, now)
    assert cadence.iteration_s == 10.0


def test_a_commit_that_a_fault_interrupted_says_nothing_of_what_one_costs():
    cadence = Cadence(1e9)
    cadence.begin(0, 0.0)
    for step, stopped in ((1, False), (2, True)):
        cadence.writing("part", 100.0 * step)
        cadence.wrote("part", 100.0 * step + 60)
        if stopped:
            cadence.stop_writing()
        cadence.committed(step - 1)
    assert cadence.commit_s == 60.0
    assert list(cadence._costs) == [60.0]


# --- in a ledger ------------------------------------------------------------------------------------------


def automatic(**changes):
    return running(**({"snapshot_every": "auto", "total_iterations": 100} | changes))


def run_until(books, last: int, iteration_s: float = 10.0, commit_s: float = 1.0) -> list[int]:
    """Enter and end iterations, one after the other; the steps that are committed."""
    steps, now = list[int](), 0.0
    for iteration in range(books.account.next_iteration, last):
        books.enter(iteration, books.generation, now)
        now += iteration_s
        do_nodes(books, iteration, now)
        if books.account.commits.is_snapshot(iteration):
            (commit,) = do_parts(books, iteration, now + commit_s)
            books.commit_done(commit.step, now + commit_s)
            steps.append(commit.step)
    return steps


def test_a_ledger_measures_what_its_commits_cost():
    assert run_until(automatic(), 10, commit_s=0.5) == list(range(1, 11))
    assert run_until(automatic(), 12, commit_s=2.0) == [1, 5, 9]


def test_all_ranks_are_told_alike_whether_an_iteration_ends_in_a_snapshot():
    books = automatic()
    for iteration in range(3):
        told = {r.in_snapshot for send in books.enter(iteration, 0, 0) for r in send.requests}
        assert told == {iteration == 0}
        do_nodes(books, iteration, 10.0 * iteration + 10)


def test_the_last_iteration_and_evaluated_ones_end_in_snapshots_whatever_they_cost():
    books = automatic(total_iterations=12, evaluated_every=4)
    assert run_until(books, 12, commit_s=1e6) == [1, 4, 8, 12]


def test_a_pause_and_a_stop_make_their_commits_whatever_they_cost():
    books = automatic()
    run_until(books, 3, commit_s=1e6)
    books.pause(50)
    assert [r.in_snapshot for send in books.enter(3, 0, 50) for r in send.requests] == [True] * 4
    assert books.enterable is None
    books = automatic()
    run_until(books, 3, commit_s=1e6)
    books.stop_after(0, 50)
    assert books.last_iteration == 3
    assert books.account.commits.is_snapshot(3)


def test_a_pause_makes_no_third_snapshot_in_the_making():
    """Each has a copy of the state in host memory."""
    books = running(snapshot_every=3, total_iterations=100)
    for iteration in range(7):
        books.enter(iteration, 0, iteration)
        do_nodes(books, iteration, iteration)
    books.pause(50)
    assert [refused.reason for refused in books.enter(7, 0, 50)] == [
        "the snapshots of 2 iterations are being written; 8 may enter after one."
    ]
    for iteration in (2, 5):
        (commit,) = do_parts(books, iteration, 60)
        books.commit_done(commit.step, 60)
    assert [r.in_snapshot for send in books.enter(7, 0, 61) for r in send.requests] == [True] * 4


def test_after_a_fault_what_is_done_again_is_committed_at_once():
    """Else a run that fails every hour, and commits every two, would never get on."""
    books = automatic()
    run_until(books, 3, commit_s=1e6)
    books.rank_lost(0, "killed", 40)
    books.rank_started(0, 41)
    rebuilt(books, 42)
    assert books.account.next_iteration == 1
    assert run_until(books, 6, commit_s=1e6) == [2]


def test_training_goes_on_while_a_commit_is_written():
    books = automatic()
    books.enter(0, 0, 0)
    do_nodes(books, 0, 10)
    for iteration in range(1, 9):
        assert books.enterable == iteration
        books.enter(iteration, 0, 10 * iteration)
        do_nodes(books, iteration, 10 * iteration + 10)
    told = do_parts(books, 0, 95)
    assert [type(told[0]).__name__, told[0].step] == ["WriteCommit", 1]
    assert [i.iteration for i in books.commit_done(1, 95) if isinstance(i, Committed)] == [0]


def test_a_part_that_is_never_written_costs_nothing_after_its_generation():
    books = automatic()
    books.enter(0, 0, 0)
    books.rank_entered(0, key("train"), 0)
    books.rank_done(result(0, "train"), 1)
    books.rank_done(result(0, "save"), 1)
    books.rank_failed(failure(1, "train"), 2)
    books.tick(100)
    rebuilt(books, 1000)
    assert run_until(books, 12, commit_s=0.25)[:2] == [1, 2]


# --- in simulated runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_chooses_its_commits_ends_in_the_same_bits_also_under_faults(seed):
    dense = World(small_plan(), iterations=12)
    dense.run_to_end()
    deaths = random.Random(seed)

    def kill(world, process, moment, instruction):
        if deaths.random() < 0.002 and len(world.faults) < 3:
            world.kill(deaths.randrange(3))

    chosen = World(small_plan(), iterations=12, seed=seed, snapshot_every="auto", max_restarts=9, watch=kill)
    assert chosen.run_to_end() == Finished(step=12)
    assert chosen.final == dense.final
    chosen.check_orders()
