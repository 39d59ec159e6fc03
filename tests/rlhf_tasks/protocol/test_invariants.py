"""What the state machines refuse because it contradicts plan or commits: a check that is left out is red here."""

import pytest

from prefect_rlhf.rlhf_tasks.protocol.commit import CommitOrder, SnapshotSchedule
from prefect_rlhf.rlhf_tasks.protocol.progress import IterationProgress, NodeProgress, Pace, Rebuild, Timeouts
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Sequencer
from prefect_rlhf.rlhf_tasks.system.invariants import InvariantError
from tests.rlhf_tasks.protocol.ledgers import pair_plan, result
from tests.rlhf_tasks.settings import DEADLINES


def test_no_iteration_is_completed_that_a_commit_covers():
    order = CommitOrder(SnapshotSchedule(1, 9), 3)
    with pytest.raises(InvariantError, match="iteration 2 is committed already"):
        order.complete(2)


def test_no_step_counts_as_committed_that_was_not_asked_for():
    order = CommitOrder(SnapshotSchedule(1, 9), 3)
    order.complete(3)
    assert order.start_next() == 4
    with pytest.raises(InvariantError, match="step 5 was written, and 4 was asked for"):
        order.written(5)


def test_a_generation_has_no_requests_for_what_lies_before_it():
    sequencer = Sequencer(pair_plan(), "run", 0, DEADLINES, first_iteration=4)
    with pytest.raises(InvariantError, match="iteration 3 precedes 4, with which the generation begins"):
        sequencer.requests(3)


def test_a_rank_answers_only_for_its_own_work_and_once():
    node = NodeProgress([0], 9.0)
    with pytest.raises(InvariantError, match=r"rank 1 answered for .* which is not its work"):
        node.answer(1, result(1, "train"), 0)
    node.answer(0, result(0, "train"), 0)
    with pytest.raises(InvariantError, match="rank 0 answered"):
        node.answer(0, result(0, "train"), 0)


def test_a_part_of_a_snapshot_comes_from_a_rank_of_its_placement():
    progress = IterationProgress(0, 0, {}, {"save": [0, 1]})
    with pytest.raises(InvariantError, match=r"rank 2 saved for save, which runs on \[0, 1\]"):
        progress.durable(2, "save", None)


def test_no_rank_restores_before_all_are_clean():
    rebuild = Rebuild(1, 2, (), 0, Timeouts(), Pace(100, 10))
    with pytest.raises(InvariantError, match="restore before every rank is clean"):
        rebuild.restore(3, 0)
