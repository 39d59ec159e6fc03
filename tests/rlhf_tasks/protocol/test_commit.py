"""Commits: in order of the iterations, whatever order they complete in."""

import pytest

from rlhf_tasks.protocol.commit import CommitOrder, SnapshotSchedule
from rlhf_tasks.protocol.instructions import SETUP


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
    assert [CommitOrder(schedule, 0).next_snapshot(t) for t in range(total)] == [
        min(s for s in snapshots if s >= t) for t in range(total)
    ]


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
