"""A death at every transition: whatever ends when, the run ends with the same bits, and says who it was. Runs that
decide what comes next decide the same."""

import functools
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.rlhf_tasks.protocol.messages import (
    Clear,
    Committed,
    Done,
    Finished,
    GaveUp,
    IterationDone,
    Load,
    NodeEnded,
    Ready,
    ResetRank,
    RestoreRank,
    Run,
    Send,
    Told,
    WriteCommit,
)
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, NodeFailure
from tests.rlhf_tasks.protocol.plans import deciding_plan, random_deciding_plan, random_plan, small_plan
from tests.rlhf_tasks.protocol.simulation import Controller, Rank, World

ITERATIONS = 3
Plans = Callable[[], ExecutionPlan]
KINDS = pytest.mark.parametrize("plan", [small_plan, pytest.param(deciding_plan, marks=pytest.mark.whole)])


class Trace:
    """Numbers every (process, moment, instruction) of a run; acts at some of the numbers."""

    def __init__(self, at: dict[int, object] | None = None) -> None:
        self.at = at or {}
        self.seen: list[tuple[Rank | Controller, str, object]] = []

    def __call__(self, world: World, process: Rank | Controller, moment: str, instruction: object) -> None:
        number = len(self.seen)
        self.seen.append((process, moment, instruction))
        if number in self.at:
            self.at[number](world, process)


def kill_itself(world: World, process: Rank | Controller) -> None:
    """A rank kills itself; a controller's death begins the next attempt."""
    if isinstance(process, Rank):
        world.kill(process.rank)
    else:
        world.restart_controller()


def kill_rank(rank: int):
    return lambda world, process: world.kill(rank)


def hang_itself(world: World, process: Rank | Controller) -> None:
    """A rank's engine thread stops answering for good, interrupts included."""
    if isinstance(process, Rank):
        world.hang(process.rank)


@functools.cache
def undisturbed(plan: Plans = small_plan):
    """(final state, trace) of a quiet run."""
    trace = Trace()
    world = World(plan(), iterations=ITERATIONS, watch=trace)
    assert isinstance(world.run_to_end(), Finished)
    return world.final, trace


def run_with(at: dict[int, object], plan: Plans = small_plan) -> World:
    """A run that is disturbed, and ends as the quiet one."""
    world = World(plan(), iterations=ITERATIONS, watch=Trace(at))
    outcome = world.run_to_end()
    assert isinstance(outcome, Finished), outcome
    assert world.final == undisturbed(plan)[0], at
    world.check_orders()
    return world


def numbers(kind: type[Rank | Controller], plan: Plans = small_plan) -> list[int]:
    return [n for n, (process, _, _) in enumerate(undisturbed(plan)[1].seen) if isinstance(process, kind)]


@pytest.mark.parametrize("plan", [small_plan, deciding_plan])
def test_the_trace_covers_every_instruction_of_a_quiet_run(plan):
    """The enumeration below is only worth what it enumerates."""
    kinds = {type(instruction) for _, _, instruction in undisturbed(plan)[1].seen}
    assert kinds == {
        *(Clear, Load, Run, Told, Done),
        *(ResetRank, RestoreRank, Ready, Send, NodeEnded, IterationDone),
        *(WriteCommit, Committed, Finished),
    }


def test_a_run_that_decides_skips_calls_and_ends_early():
    """What is killed below has something to decide otherwise."""
    (step, *_, decided, _), _ = undisturbed(deciding_plan)
    assert step == 2
    values = [made["decided"] for _, _, made in decided]
    assert [v["runs_actor_train"]["value"] > 0 for v in values if "runs_actor_train" in v] == [False, True]
    assert [v["stop"]["value"] > 0 for v in values if "stop" in v] == [False, True]


@KINDS
def test_a_rank_killed_before_and_after_each_of_its_instructions(plan):
    for number in numbers(Rank, plan):
        run_with({number: kill_itself}, plan)


@KINDS
@pytest.mark.parametrize("rank", range(3))
def test_each_rank_killed_before_and_after_each_instruction_of_the_controller(rank, plan):
    for number in numbers(Controller, plan):
        if not isinstance(undisturbed(plan)[1].seen[number][2], Finished):
            run_with({number: kill_rank(rank)}, plan)


@KINDS
def test_a_rank_that_hangs_at_each_of_its_instructions_is_restarted(plan):
    for number in numbers(Rank, plan):
        _, moment, instruction = undisturbed(plan)[1].seen[number]
        if (moment, type(instruction)) in {("before", Run), ("before", Clear), ("before", Load)}:
            world = run_with({number: hang_itself}, plan)
            assert world.now < 200, "a hang is noticed by a deadline"


@pytest.mark.parametrize("plan", [small_plan, deciding_plan])
def test_the_controller_killed_before_and_after_each_of_its_instructions(plan):
    """Another attempt has what was decided from the journal."""
    for number in numbers(Controller, plan):
        if not isinstance(undisturbed(plan)[1].seen[number][2], Finished):
            world = run_with({number: kill_itself}, plan)
            assert world.attempt.spec.attempt == 1


@KINDS
@pytest.mark.whole
def test_a_second_death_at_every_transition_of_the_rebuild(plan):
    """Rank 1 dies in the middle of iteration 1; then anyone at any point until iterations run again."""
    _, trace = undisturbed(plan)
    first = next(
        n
        for n, (process, moment, i) in enumerate(trace.seen)
        if isinstance(process, Rank) and process.rank == 1 and moment == "after"
        and isinstance(i, Run) and i.request.key.iteration == 1
    )  # fmt: skip
    again = Trace({first: kill_itself})
    World(plan(), iterations=ITERATIONS, watch=again).run_to_end()
    ready = [n for n, (_, _, i) in enumerate(again.seen) if isinstance(i, Ready) and n > first]
    for number in range(first + 1, ready[0] + 2):
        for act in (kill_itself, kill_rank(0), kill_rank(1), hang_itself):
            run_with({first: kill_itself, number: act}, plan)


@settings(max_examples=40, derandomize=True)
@given(seed=st.integers(0, 10**6), n_nodes=st.integers(4, 70), n_devices=st.integers(1, 7), data=st.data())
@pytest.mark.parametrize("make", [random_plan, random_deciding_plan])
@pytest.mark.whole
def test_random_plans_random_deaths_and_late_messages(make, seed, n_nodes, n_devices, data):
    rng = random.Random(seed)
    plan = make(rng, n_devices, n_nodes)
    trace = Trace()
    quiet = World(plan, iterations=ITERATIONS, watch=trace)
    expected = quiet.run_to_end()
    acts = st.sampled_from([kill_itself, hang_itself, *map(kill_rank, range(n_devices))])
    at = data.draw(st.dictionaries(st.integers(0, 2 * len(trace.seen)), acts, max_size=3))
    delay_s = rng.uniform(0, 0.7)
    world = World(plan, iterations=ITERATIONS, seed=seed, delay_s=delay_s, watch=Trace(at))
    assert isinstance(expected, Finished)
    assert world.run_to_end() == expected
    assert world.final == quiet.final
    world.check_orders()


@pytest.mark.parametrize("seed", range(10))
def test_the_cause_names_the_lost_rank_and_its_call_not_the_peer_that_noticed_first(seed):
    def watch(world: World, process: Rank | Controller, moment: str, instruction: object) -> None:
        if isinstance(instruction, Run) and moment == "after" and process.rank == 1:
            key = instruction.request.key
            if (key.generation, key.iteration, key.node) == (0, 1, "generate"):
                world.kill(1)

    world = World(small_plan(), iterations=ITERATIONS, seed=seed, watch=watch)
    world.run_to_end()
    (fault,) = world.faults
    assert str(fault.cause) == "rank 1, call generate, iteration 2: lost: it was killed"


def test_the_same_rank_killed_in_every_generation_ends_the_attempt():
    """Rank 2 dies whenever it begins iteration 1: step 1 is committed, then comes a clear stop."""
    deaths = Counter()

    def watch(world: World, process: Rank | Controller, moment: str, instruction: object) -> None:
        if isinstance(instruction, Run) and process.rank == 2 and instruction.request.key.iteration == 1:
            deaths[instruction.request.key.generation] += 1
            world.kill(2)

    world = World(small_plan(), iterations=ITERATIONS, watch=watch)
    outcome = world.run_to_end()
    assert isinstance(outcome, GaveUp)
    assert "rank 2" in outcome.reason
    assert "3 rebuilds" in outcome.reason
    assert outcome.committed_step == 1
    assert max(world.commits.orders) == 1
    assert set(deaths.values()) == {1}
    assert len(deaths) <= 5


def fails_by_user_code(process: Rank, instruction: Run) -> None:
    """What the rank runs ends by an error of the user's code."""
    key = instruction.request.key
    error = NodeFailure(key=key, rank=process.rank, error="reward", traceback="mine", lasting=True)
    process.cluster.break_up(process.meeting)
    process.end(key, lambda: process.inbox.failed(error))


def peers_fail(world: World, process: Rank | Controller) -> None:
    """What the others are at ends by an error too, as it does when a peer leaves a collective."""
    for peer in world.cluster.processes:
        if peer is not None and peer is not process and peer.job is not None:
            world.later(0.2, peer.connection_closed, peer.job)


@pytest.mark.parametrize("meanwhile", [None, peers_fail, hang_itself])
def test_the_users_code_failing_at_each_node_ends_the_run_at_a_commit_and_repeats_nothing(meanwhile):
    """Whatever its peers report: no generation follows, no deadline is waited for, the commits are those of an
    undisturbed run."""
    expected, trace = undisturbed()
    for number in numbers(Rank):
        process, moment, instruction = trace.seen[number]
        if (moment, type(instruction)) != ("after", Run):
            continue
        when: list[float] = []

        def fail(world: World, process: Rank | Controller, instruction=instruction, when=when) -> None:
            when.append(world.now)
            fails_by_user_code(process, instruction)
            if meanwhile is not None:
                meanwhile(world, process)

        world = World(small_plan(), iterations=ITERATIONS, watch=Trace({number: fail}))
        outcome = world.run_to_end()
        key = instruction.request.key
        told = f"rank {process.rank}, call {key.node}, iteration {key.iteration + 1}: reward"
        assert outcome == GaveUp(reason=told, committed_step=max(world.commits.orders), traceback="mine"), (
            number
        )
        assert world.attempt.ledger.generation == 0
        assert world.now - when[0] < 5
        assert outcome.committed_step <= key.iteration + 1
        assert all(world.commits.metrics[t] == expected[-1][t] for t in world.commits.metrics)
