"""A pause: at a commit, whoever dies, and the run ends with the same bits."""

import functools

import pytest

from prefect_rlhf.rlhf_tasks.protocol.ledger import Phase
from prefect_rlhf.rlhf_tasks.protocol.messages import Committed, Faulted, Finished, Held, Ready, WriteCommit
from tests.rlhf_tasks.protocol.ledgers import committed, do_nodes, do_parts, failure, kinds, rebuilt, running
from tests.rlhf_tasks.protocol.plans import small_plan
from tests.rlhf_tasks.protocol.simulation import Rank, World

ITERATIONS = 5


def finish(books, iteration: int) -> list:
    """Both ranks do an iteration and it is committed; what the commit brings."""
    do_nodes(books, iteration)
    do_parts(books, iteration)
    return books.commit_done(iteration + 1, 0)


# --- the ledger -----------------------------------------------------------------------------------------


def test_what_is_delivered_is_completed_and_nothing_more_is_entered_until_the_pause_ends():
    books = running()
    books.enter(0, 0, 0), books.enter(1, 0, 0)
    assert books.pause(0) == []
    finish(books, 0)
    (refused,) = books.enter(2, 0, 0)
    assert refused.reason == "the run is paused."
    assert finish(books, 1) == [committed(1), Held(step=2)]
    assert books.enterable is None
    assert books.pause(0) == [], "a repeat"
    assert books.tick(1e6) == [], "nothing is overdue"
    assert books.resume(1e6) == []
    assert books.enterable == 2
    books.pause(1e6)
    assert books.resume(1e6) == [], "twice"


def test_a_pause_between_two_iterations_holds_at_once():
    books = running(committed_step=4)
    assert books.pause(0) == [Held(step=4)]
    books.resume(0)
    assert books.pause(0) == [Held(step=4)], "each pause is told"


@pytest.mark.parametrize(("delivered", "last"), [(2, 2), (3, 2), (4, 4)])
def test_with_fewer_snapshots_the_next_iteration_entered_ends_in_one(delivered, last):
    """snapshot_every=3: iteration 2 ends in a snapshot by itself."""
    books = running(snapshot_every=3)
    for iteration in range(delivered):
        books.enter(iteration, 0, 0)
        do_nodes(books, iteration)
        if iteration == 2:
            do_parts(books, 2)
            books.commit_done(3, 0)
    told = books.pause(0)
    if last == delivered:
        sends = books.enter(last, 0, 0)
        assert all(request.in_snapshot for send in sends for request in send.requests)
        assert books.enter(last + 1, 0, 0)[0].reason == "the run is paused."
        told = finish(books, last)
    assert told[-1] == Held(step=last + 1)
    books.resume(0)
    after = [request.in_snapshot for send in books.enter(last + 1, 0, 0) for request in send.requests]
    assert set(after) == {last + 1 in (2, 5)}, "the schedule continues"


def test_a_stop_ends_a_pause_and_a_run_that_is_held_is_finished_by_it():
    books = running()
    books.enter(0, 0, 0)
    books.pause(0)
    finish(books, 0)
    assert books.stop_after(0, 0) == [Finished(step=1)]


def test_a_stop_finishes_a_run_that_is_held_after_a_fault_took_what_was_in_flight():
    books = running(committed_step=3)
    books.enter(3, 0, 0), books.enter(4, 0, 0)
    books.rank_lost(1, "killed", 0)
    books.rank_started(1, 0)
    books.pause(0)
    rebuilt(books)
    assert books.stop_after(0, 0) == [Finished(step=3)]


def test_a_stop_while_ranks_reset_lets_the_commit_that_is_written_be_the_last():
    books = running(committed_step=3)
    books.enter(3, 0, 0), books.enter(4, 0, 0)
    do_nodes(books, 3), do_parts(books, 3)
    books.rank_lost(1, "killed", 0)
    assert books.stop_after(0, 0) == []
    assert books.commit_done(4, 0) == [committed(3), Finished(step=4)]


def test_a_stop_finishes_a_run_that_is_held_at_the_snapshot_of_its_pause():
    books = running(snapshot_every=3)
    books.enter(0, 0, 0)
    books.pause(0)
    books.enter(1, 0, 0)
    do_nodes(books, 0)
    assert finish(books, 1)[-1] == Held(step=2)
    assert books.stop_after(0, 0) == [Finished(step=2)]


def test_a_stop_before_any_iteration_lets_one_run():
    books = running()
    books.pause(0)
    assert books.stop_after(0, 0) == []
    books.enter(0, 0, 0)
    assert kinds(finish(books, 0)) == [Committed, Finished]


def test_after_a_fault_a_paused_run_holds_at_its_last_commit():
    books = running()
    books.enter(0, 0, 0)
    books.pause(0)
    books.rank_failed(failure(0, "train"), 0)
    books.tick(9)
    assert books.phase is Phase.RESETTING
    rebuilt(books, 9)
    assert books.enterable is None
    assert books._held == 0


def test_a_rank_that_dies_while_the_run_is_held_is_replaced_and_the_run_stays_held():
    books = running()
    assert books.pause(0) == [Held(step=0)]
    assert Faulted in kinds(books.rank_lost(1, "killed", 0))
    books.rank_started(1, 0)
    for stimulus in (books.rank_reset, books.rank_restored):
        for rank in (0, 1):
            told = stimulus(rank, 1, 0)
    assert told == [Ready(1, 0)], "the hold has been told"
    assert books.enterable is None


# --- whole runs on a simulated cluster ------------------------------------------------------------------


def paused(seed: int = 0, **options) -> World:
    world = World(small_plan(), iterations=ITERATIONS, seed=seed, pause_after=1, **options)
    assert world.run_to_end() == Finished(step=ITERATIONS)
    world.check_orders()
    assert world.held_at
    return world


@functools.cache
def undisturbed() -> World:
    world = World(small_plan(), iterations=ITERATIONS)
    assert world.run_to_end() == Finished(step=ITERATIONS)
    return world


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_paused_run_ends_with_the_same_bits(every, seed):
    options = {"pause_after": every - 1, "snapshot_every": every, "iterations": 2 * every + 4}
    world = World(small_plan(), seed=seed, **options)
    plain = World(small_plan(), iterations=2 * every + 4)
    assert world.run_to_end() == plain.run_to_end()
    assert world.final == plain.final
    (held,) = world.held_at
    more = 0 if every == 1 else 1
    assert held <= world.delivered_when_paused + more, "of `every` above 1, one more iteration is entered"


@pytest.mark.whole
def test_whoever_dies_when_the_run_pauses_the_run_ends_with_the_same_bits():
    """Every process that has a turn is killed once, from the order until the first commit after the pause."""
    moments = []

    def listen(world, process, moment, instruction):
        moments.append((world.is_paused, instruction))

    paused(watch=listen)
    begin = next(n for n, (is_paused, _) in enumerate(moments) if is_paused)
    held = next(n for n, (_, i) in enumerate(moments) if isinstance(i, Held))
    end = next(n for n, (_, i) in enumerate(moments) if n > held and isinstance(i, WriteCommit))
    assert begin < held < end
    for number in range(begin, end + 1):
        count = iter(range(len(moments) * 9))

        def strike(world, process, moment, instruction, number=number, count=count):
            if next(count) == number:
                if isinstance(process, Rank):
                    world.kill(process.rank)
                else:
                    world.restart_controller()

        assert paused(watch=strike).final == undisturbed().final, number
