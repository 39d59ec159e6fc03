"""Ledger: stimulus in, instructions out."""

import random

import pytest

from rlhf_tasks.protocol import instructions as do
from rlhf_tasks.protocol.instructions import RESET, RESTORE, SETUP, Cause
from rlhf_tasks.protocol.ledger import Ledger
from rlhf_tasks.protocol.phases import TRANSITIONS, Phase, State, Timeouts
from rlhf_tasks.protocol.sequencer import Deadlines
from rlhf_tasks.spec import ExecutionPlan, NodeFailure, NodeKey, NodeResult, SaveNode
from tests.rlhf_tasks.protocol.plans import call, on, plan_of, random_plan, small_plan
from tests.rlhf_tasks.protocol.simulation import Network, World


def pair_plan() -> ExecutionPlan:
    """Two ranks train together, then save."""
    both = on([0, 1])
    train = call("train", "actor", "train_step", both)
    return plan_of(2, {"actor": both}, [train, SaveNode(name="save", role="actor", placement=both)])


def ledger(**changes) -> Ledger:
    settings = {"run": "run", "attempt": 0, "n_ranks": 2, "total_iterations": 9, "committed_step": 0}
    return Ledger(pair_plan(), deadlines=Deadlines(floor_s=10), **(settings | changes))


def key(node: str, iteration: int = 0, generation: int = 0) -> NodeKey:
    return NodeKey("run", 0, generation, iteration, node)


def result(rank: int, node: str, iteration: int = 0, generation: int = 0) -> NodeResult:
    return NodeResult(key=key(node, iteration, generation), rank=rank, started_s=0, ended_s=1)


def failure(rank: int, node: str, iteration: int = 0, generation: int = 0) -> NodeFailure:
    of = key(node, iteration, generation)
    return NodeFailure(key=of, rank=rank, error="broke", traceback="where")


def running(now: float = 0, **changes) -> Ledger:
    """A ledger whose two ranks hold the commit."""
    books = ledger(**changes)
    books.start(now)
    return rebuilt(books, now)


def rebuilt(books: Ledger, now: float = 0) -> Ledger:
    """Both ranks reset and restore."""
    for stimulus in (books.rank_reset, books.rank_restored):
        for rank in (0, 1):
            stimulus(rank, books.generation, now)
    assert books.phase is Phase.RUNNING
    return books


def do_nodes(books: Ledger, iteration: int, now: float = 0) -> None:
    """Both ranks answer for both nodes."""
    for node in ("train", "save"):
        for rank in (0, 1):
            books.rank_done(result(rank, node, iteration, books.generation), now)


def do_parts(books: Ledger, iteration: int, now: float = 0) -> list:
    """Both parts become durable; what the last one brings."""
    books.part_durable(0, key("save", iteration, books.generation), "a", now)
    return books.part_durable(1, key("save", iteration, books.generation), "b", now)


def kinds(instructions: list) -> list[type]:
    return [type(instruction) for instruction in instructions]


# --- the happy path -------------------------------------------------------------------------------------


def test_from_the_start_to_ready():
    books = ledger()
    assert books.start(0) == [do.ResetRank(0, 0), do.ResetRank(1, 0)]
    assert books.rank_reset(0, 0, 1) == []
    assert books.rank_reset(0, 0, 1) == [], "a repeat"
    assert books.rank_reset(1, 0, 2) == [do.RestoreRank(0, 0, 0), do.RestoreRank(1, 0, 0)]
    assert books.rank_restored(1, 0, 3) == []
    assert books.enterable is None
    assert books.rank_restored(0, 0, 3) == [do.Ready(generation=0, iteration=0)]
    assert books.enterable == 0


def test_a_run_without_a_commit_initialises_its_roles_and_commits_step_0_first():
    books = ledger(committed_step=None)
    books.start(0)
    books.rank_reset(0, 0, 0)
    assert books.rank_reset(1, 0, 0) == [do.RestoreRank(0, 0, None), do.RestoreRank(1, 0, None)]
    assert do_parts(books, SETUP) == [], "a rank is still initialising"
    books.rank_restored(0, 0, 0)
    (commit,) = books.rank_restored(1, 0, 0)
    assert commit == do.WriteCommit(0, (), {"save": {0: "a", 1: "b"}}, 0, {"actor": 0})
    assert books.enterable is None
    assert books.commit_done(0, 0) == [do.Ready(0, 0)]


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
    assert done == do.NodeDone(0, "train", {0: result(0, "train"), 1: result(1, "train")})
    books.rank_done(result(0, "save"), 0)
    assert kinds(books.rank_done(result(1, "save"), 0)) == [do.NodeDone, do.IterationDone]
    assert do_parts(books, 0) == [do.WriteCommit(1, (0,), {"save": {0: "a", 1: "b"}}, 8, {"actor": 1})]
    assert do_parts(books, 0) == [], "repeats"
    assert books.commit_done(1, 0) == [do.IterationCommitted(0)]
    assert books.commit_done(1, 0) == []


def test_two_iterations_are_in_flight_and_the_third_waits_for_the_first_ones_commit():
    books = running()
    assert kinds(books.enter(0, 0, 0)) == [do.Send, do.Send]
    assert kinds(books.enter(1, 0, 0)) == [do.Send, do.Send]
    (refused,) = books.enter(2, 0, 0)
    assert refused.reason == "iterations 0 to 1 are in flight; 2 may enter when 0 is committed."
    do_nodes(books, 0)
    do_parts(books, 0)
    assert books.enterable is None, "written is not committed"
    books.commit_done(1, 0)
    assert books.enterable == 2


@pytest.mark.parametrize(
    ("iteration", "generation", "reason"),
    [
        (1, 0, "the next one is 0"),
        (0, 1, "this is generation 0"),
    ],
)
def test_an_iteration_is_refused_out_of_turn(iteration, generation, reason):
    (refused,) = running().enter(iteration, generation, 0)
    assert isinstance(refused, do.RefuseEntry)
    assert reason in refused.reason


def test_a_resumed_attempt_goes_on_after_its_commit():
    books = running(committed_step=4, cursor=32)
    (send, _) = books.enter(4, 0, 0)
    request = send.requests[0]
    assert (request.number, request.first_sample, request.versions) == (0, 32, {"actor": 4})


def test_a_run_that_is_finished_already_ends_at_once():
    assert ledger(committed_step=9).start(0) == [do.Finished(9)]


def test_too_few_ranks_are_refused():
    with pytest.raises(ValueError, match="needs 2 devices; there are 1"):
        ledger(n_ranks=1)


# --- the end, and snapshots -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "wanted", "delivered", "last"),
    [(1, 3, 1, 3), (1, 0, 1, 1), (1, 50, 0, 8), (2, 2, 1, 3), (4, 5, 1, 7), (4, 8, 1, 8)],
)
def test_a_stop_takes_effect_after_what_is_delivered_and_at_a_snapshot(every, wanted, delivered, last):
    books = running(snapshot_every=every)
    for iteration in range(delivered + 1):
        books.enter(iteration, 0, 0)
    assert books.stop_after(wanted, 0) == []
    assert books.last_iteration == last


def test_the_commit_of_the_last_iteration_finishes_the_attempt():
    books = running()
    books.enter(0, 0, 0)
    books.stop_after(0, 0)
    (refused,) = books.enter(1, 0, 0)
    assert refused.reason == "iteration 0 is the last one."
    do_nodes(books, 0)
    do_parts(books, 0)
    assert books.commit_done(1, 0) == [do.IterationCommitted(0), do.Finished(1)]
    assert books.tick(1e9) == books.rank_lost(0, "gone", 0) == []


def test_fewer_snapshots_count_complete_iterations_and_commit_several_at_once():
    books = running(snapshot_every=3)
    for iteration in range(3):
        books.enter(iteration, 0, 0)
        do_nodes(books, iteration)
    assert books.enterable == 3
    (commit,) = do_parts(books, 2)
    assert (commit.step, commit.iterations) == (3, (0, 1, 2))
    assert books.commit_done(3, 0) == [do.IterationCommitted(t) for t in (0, 1, 2)]


def test_the_results_of_all_that_a_commit_makes_final_are_there_when_it_is_written():
    books = running(snapshot_every=20, total_iterations=20)
    for iteration in range(20):
        books.enter(iteration, 0, 0)
        do_nodes(books, iteration)
    do_parts(books, 19)
    final = [i.iteration for i in books.commit_done(20, 0) if isinstance(i, do.IterationCommitted)]
    assert final == list(range(20))
    assert all(len(books.account.results(iteration, "train")) == 2 for iteration in final)


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
    assert account.results(0, "train") == {0: result(0, "train"), 1: result(1, "train")}
    do_parts(books, 0)
    books.commit_done(1, 0)
    assert account.iteration_state(0, 0) is State.COMMITTED
    books.enter(1, 0, 0)
    books.rank_lost(1, "killed", 0)
    assert (account.iteration_state(1, 0), account.node_state(1, 0, "train")) == (State.ABORTED,) * 2
    assert account.abort_cause(1, 0) == Cause("lost: killed", (1,), "train", 1)
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
    assert books.account.node_state(3, 0, "train") is State.DONE
    assert books.account.results(3, "train") == {}


# --- faults ---------------------------------------------------------------------------------------------


def test_a_lost_rank_aborts_what_cannot_commit_and_rebuilds():
    books = running()
    books.enter(0, 0, 0)
    books.enter(1, 0, 0)
    books.rank_entered(1, key("train"), 0)
    cause = Cause("lost: killed", (1,), "train", 0)
    assert books.rank_lost(1, "killed", 5) == [
        do.Fault(0, cause),
        do.AbortIteration(0, 0, cause),
        do.AbortIteration(1, 0, cause),
        do.ResetRank(0, 1),
        do.RestartRank(1, lost=True),
    ]
    assert str(cause) == "rank 1, call train, iteration 0: lost: killed"
    assert books.rank_reset(0, 1, 6) == []
    assert books.rank_started(1, 7) == [do.ResetRank(1, 1)]
    assert books.rank_reset(1, 1, 8) == [do.RestoreRank(0, 1, 0), do.RestoreRank(1, 1, 0)]
    books.rank_restored(0, 1, 9)
    assert books.rank_restored(1, 1, 9) == [do.Ready(1, 0)]
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
    aborted = [i.iteration for i in books.rank_lost(1, "killed", 0) if isinstance(i, do.AbortIteration)]
    assert aborted == [1]
    books.rank_started(1, 0)
    books.rank_reset(0, 1, 0)
    assert books.rank_reset(1, 1, 0) == []
    assert books.commit_done(1, 0) == [
        do.IterationCommitted(0),
        do.RestoreRank(0, 1, 1),
        do.RestoreRank(1, 1, 1),
    ]


def test_an_error_waits_for_news_of_a_lost_rank_that_explains_it():
    books = running(timeouts=Timeouts(blame_s=2))
    books.enter(0, 0, 0)
    assert books.rank_failed(failure(0, "train"), 0) == []
    assert books.rank_lost(1, "killed", 1)[0] == do.Fault(0, Cause("lost: killed", (1,), "train", 0))


@pytest.mark.parametrize("rank_lost_too", [True, False])
def test_an_error_that_no_other_loss_explains_is_the_cause(rank_lost_too):
    books = running(timeouts=Timeouts(blame_s=2))
    books.enter(0, 0, 0)
    books.rank_failed(failure(0, "train"), 0)
    books.rank_failed(failure(1, "train"), 0.1)
    assert books.tick(2) == []
    told = books.rank_lost(0, "exited", 2) if rank_lost_too else books.tick(2.1)
    assert told[0] == do.Fault(0, Cause("broke", (0,), "train", 0, "where"))


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
    assert "generation 0 has ended (rank 1, call train, iteration 0: lost: killed)" in refused.reason
    assert books.account.node_state(0, 1, "train") is State.WAITING


def test_a_stuck_rank_is_restarted_after_the_grace_and_its_late_reset_ignored():
    books = ledger(timeouts=Timeouts(reset_s=20))
    books.start(0)
    books.rank_reset(0, 0, 1)
    assert books.tick(20) == []
    assert books.tick(20.1) == [do.RestartRank(1, lost=False)]
    assert books.rank_reset(1, 0, 21) == []
    assert books.rank_lost(1, "restarted", 22) == []
    assert books.rank_started(1, 23) == [do.ResetRank(1, 0)]
    assert kinds(books.rank_reset(1, 0, 24)) == [do.RestoreRank, do.RestoreRank]


def test_a_rank_lost_while_others_reset_is_awaited_in_the_same_generation():
    books = ledger()
    books.start(0)
    books.rank_reset(1, 0, 1)
    assert books.rank_lost(1, "killed", 2) == [do.RestartRank(1, lost=True)]
    assert books.rank_reset(0, 0, 3) == []
    assert books.rank_started(1, 4) == [do.ResetRank(1, 0)]
    assert kinds(books.rank_reset(1, 0, 5)) == [do.RestoreRank, do.RestoreRank]


def test_a_rank_that_is_still_away_when_a_rebuild_fails_is_awaited_by_the_next_one():
    books = ledger(timeouts=Timeouts(reset_s=20, restart_s=120))
    books.start(0)
    books.rank_lost(1, "killed", 1)
    books.rank_reset(0, 0, 2)
    assert books.tick(140.1)[1:] == [do.ResetRank(0, 1), do.RestartRank(1, lost=True)]


def test_a_rank_that_cannot_reset_gets_a_new_process():
    books = ledger()
    books.start(0)
    assert books.rank_failed(failure(1, RESET, SETUP), 0) == [do.RestartRank(1, lost=False)]


def test_a_rank_whose_process_was_replaced_unnoticed_is_a_fault():
    books = running()
    books.enter(0, 0, 0)
    instructions = books.rank_started(1, 0)
    assert instructions[0].cause.error == "lost: its process was replaced"
    assert instructions[-2:] == [do.ResetRank(0, 1), do.ResetRank(1, 1)]


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
    assert isinstance(told[0], do.Fault)
    assert told[0].cause.iteration is None
    assert (books.phase, books.generation) == (Phase.RESETTING, 1)


def test_a_refused_lease_ends_the_attempt_with_the_holders_name():
    books = ledger()
    books.start(0)
    (given_up,) = books.rank_refused(1, key(RESET, SETUP), "held by run 'other'", 0)
    assert given_up == do.GiveUp("rank 1, call reset: held by run 'other'", 0)
    assert books.enter(0, 0, 0)[0].reason == "the attempt has ended."


def test_a_gap_or_a_refused_request_is_a_fault():
    books = running()
    books.enter(0, 0, 0)
    assert books.rank_refused(1, key("save"), "request 0 was not delivered", 0) == []
    assert str(books.tick(2)[0].cause) == "rank 1, call save, iteration 0: request 0 was not delivered"


def test_three_rebuilds_without_a_commit_then_a_clear_stop():
    books = running(max_rebuilds=3)
    for _ in range(3):
        assert isinstance(books.rank_lost(1, "killed", 0)[-1], do.RestartRank)
        books.rank_started(1, 0)
        rebuilt(books)
    assert books.rank_lost(1, "killed", 0)[-1] == do.GiveUp(
        "rank 1: lost: killed (after 3 rebuilds without a commit in between)", 0
    )


@pytest.mark.parametrize("max_rebuilds", [0, 1])
def test_a_commit_in_between_allows_further_rebuilds_also_when_it_ends_during_one(max_rebuilds):
    books = running(max_rebuilds=max_rebuilds)
    for generation in range(6):
        books.enter(generation, generation, 0)
        do_nodes(books, generation)
        do_parts(books, generation)
        assert isinstance(books.rank_lost(1, "killed", 0)[-1], do.RestartRank)
        books.commit_done(generation + 1, 0)
        books.rank_started(1, 0)
        rebuilt(books)
    assert books.committed_step == 6


def test_a_commit_that_fails_is_done_again_and_one_that_hangs_ends_the_attempt():
    books = running(timeouts=Timeouts(commit_s=30))
    books.enter(0, 0, 0)
    do_nodes(books, 0)
    do_parts(books, 0, now=5)
    told = books.commit_failed(1, "disk full", 6)
    assert kinds(told) == [do.Fault, do.AbortIteration, do.ResetRank, do.ResetRank]
    assert str(told[0].cause) == "step 1 could not be committed: disk full"
    rebuilt(books, 7)
    books.enter(0, 1, 8)
    do_nodes(books, 0, 8)
    do_parts(books, 0, now=9)
    assert books.tick(39) == []
    assert books.tick(39.1) == [do.GiveUp("step 1 was not committed within 30 s", 0)]


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
        "rank 1, call train, iteration 0: not finished 10 s after the last rank entered"
    )
    assert "raise runtime.deadline_floor_s" in str(cause)


def test_a_rank_that_has_work_and_enters_nothing_is_overdue():
    books = running(timeouts=Timeouts(entry_s=60))
    books.enter(0, 0, 0)
    books.rank_entered(0, key("train"), 0)
    assert books.tick(60) == []
    cause = books.tick(60.1)[0].cause
    assert str(cause) == "rank 1, call train, iteration 0: did not enter its next call within 60 s"


def test_a_rank_without_work_is_never_overdue():
    books = running(timeouts=Timeouts(entry_s=60))
    books.enter(0, 0, 0)
    do_nodes(books, 0)
    do_parts(books, 0)
    books.commit_done(1, 0)
    assert books.tick(1e6) == []


def test_a_part_that_does_not_become_durable_is_overdue():
    books = running(timeouts=Timeouts(durable_s=100))
    books.enter(0, 0, 0)
    do_nodes(books, 0, now=10)
    books.part_durable(0, key("save"), "a", 11)
    assert books.tick(110) == []
    assert str(books.tick(110.1)[0].cause).startswith("rank 1, call save, iteration 0: the saved part")


@pytest.mark.parametrize(("stage", "limit"), [("reset", 140), ("restore", 300)])
def test_a_rebuild_that_does_not_end_is_a_fault(stage, limit):
    books = ledger(timeouts=Timeouts(reset_s=20, restart_s=120, restore_s=300))
    books.start(0)
    for rank in (0, 1) if stage == "restore" else (0,):
        books.rank_reset(rank, 0, 0)
    books.tick(limit)
    assert books.generation == 0
    assert books.tick(limit + 0.1)[0].cause.ranks == ((0, 1) if stage == "restore" else (1,))
    assert books.generation == 1


def test_every_phase_has_a_row_in_the_table():
    assert set(TRANSITIONS) == set(Phase)


# --- whole runs on a simulated cluster ------------------------------------------------------------------


def test_a_quiet_run_commits_every_step_in_order():
    world = World(small_plan(), iterations=4)
    assert world.run() == do.Finished(4)
    assert list(world.disk.commits) == [0, 1, 2, 3, 4]
    world.check_orders()


@pytest.mark.parametrize("seed", range(10))
def test_shuffled_doubled_and_lost_messages_change_nothing(seed):
    plan = random_plan(random.Random(seed), n_devices=6, n_nodes=60)
    quiet = World(plan, iterations=3)
    noisy = World(plan, iterations=3, seed=seed, network=Network(loss=0.2, duplicate=0.3, delay_s=0.5))
    assert quiet.run() == noisy.run() == do.Finished(3)
    assert noisy.final == quiet.final
    assert noisy.controller.faults == []
    noisy.check_orders()


def overlaps(seed: int) -> bool:
    """Whether a rank begins iteration 1 before the critic of iteration 0 is trained."""
    order = []

    def watch(world, process, moment, instruction):
        if isinstance(instruction, do.Run) and moment == "after":
            order.append(("begins", *instruction.request.key[3:]))
        if isinstance(instruction, do.Answer):
            order.append(("ends", *instruction.result.key[3:]))

    World(small_plan(), iterations=2, seed=seed, watch=watch).run()
    return order.index(("begins", 1, "to_generate")) < order.index(("ends", 0, "critic_train"))


def test_iterations_overlap_where_the_plan_allows():
    """Depends on how long the nodes happen to take; never when iterations follow each other strictly."""
    assert any(overlaps(seed) for seed in range(20))


@pytest.mark.parametrize("every", [2, 3])
def test_fewer_snapshots_give_the_same_end(every):
    dense, sparse = World(small_plan(), iterations=5), World(small_plan(), iterations=5, snapshot_every=every)
    dense.run(), sparse.run()
    assert sparse.final == dense.final
    assert len(sparse.disk.commits) < len(dense.disk.commits)
