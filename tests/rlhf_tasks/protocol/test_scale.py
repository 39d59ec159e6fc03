"""The controller's work per iteration is linear in the ranks, up to 1,024 of them, and blind to tokens."""

import gc
import sys

import pytest

from bench.simulated_ranks import Drive, ppo_plan


def python_calls(n_ranks: int, n_seqs: int, iterations: int) -> int:
    """Python functions called, and generators resumed, by a run: a clock that a busy machine cannot shake.

    No garbage is collected meanwhile: what others have registered with the collector would be counted too.
    """
    drive = Drive(ppo_plan(n_ranks, n_seqs), iterations)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    gc.disable()
    sys.setprofile(count)
    try:
        drive.run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.whole
def test_building_and_running_1024_ranks_costs_eight_times_what_128_cost():
    assert python_calls(1024, 4096, 2) <= 8.2 * python_calls(128, 4096, 2)


def test_what_is_kept_of_a_rank_and_node_is_a_handful_of_objects():
    """The garbage collector visits each of them, the more often the more there are: kept results of every rank cost
    more than the state machines, and made 1,024 ranks dearer than eight times 128."""
    plan = ppo_plan(64, 64)
    drive = Drive(plan, 12)
    gc.collect()
    before = len(gc.get_objects())
    drive.run()
    gc.collect()
    kept = len(gc.get_objects()) - before
    assert kept <= 8 * sum(len(node.devices) for node in plan.nodes)


def test_the_number_of_sequences_costs_nothing():
    assert python_calls(16, 64, 2) == python_calls(16, 64_000, 2)
