"""The controller's work per iteration is linear in the ranks, up to 1,024 of them, and blind to tokens."""

import gc
import sys
from types import FrameType

import pytest

from prefect_rlhf.rlhf_tasks import controller, protocol
from prefect_rlhf.rlhf_tasks.rehearsal.rehearsal import Rehearsal, carried_out
from tests.rlhf_tasks.protocol.plans import ppo_plan
from tests.rlhf_tasks.rehearsal.rehearsals import quick

MACHINES = tuple(path for package in (protocol, controller) for path in package.__path__)


def python_calls(n_ranks: int, n_seqs: int, iterations: int) -> int:
    """Python functions of the protocol and of the controller that are called, and their generators resumed, in a
    run on simulated ranks: a clock that a busy machine cannot shake.

    No garbage is collected meanwhile: what others have registered with the collector would be counted too.
    """
    rehearsal = Rehearsal(quick(ppo_plan(n_ranks, n_seqs), iterations))
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(MACHINES)

    gc.disable()
    sys.setprofile(count)
    try:
        carried_out(rehearsal)
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
    rehearsal = Rehearsal(quick(plan, 12))
    gc.collect()
    before = len(gc.get_objects())
    carried_out(rehearsal)
    gc.collect()
    kept = len(gc.get_objects()) - before
    assert rehearsal.attempt is not None
    assert kept <= 8 * sum(len(node.devices) for node in plan.nodes)


def test_the_number_of_sequences_costs_nothing():
    assert python_calls(16, 64, 2) == python_calls(16, 64_000, 2)
