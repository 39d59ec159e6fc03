"""Whole runs on a simulated cluster: ledger and inboxes together."""

import random

import pytest

from prefect_rlhf.rlhf_tasks.protocol.messages import Done, Finished, Run
from tests.rlhf_tasks.protocol.plans import random_plan, small_plan
from tests.rlhf_tasks.protocol.simulation import World


def test_a_quiet_run_commits_every_step_in_order():
    world = World(small_plan(), iterations=4)
    assert world.run_to_end() == Finished(step=4)
    assert list(world.commits.orders) == [0, 1, 2, 3, 4]
    world.check_orders()


@pytest.mark.parametrize("seed", range(10))
def test_late_messages_change_nothing(seed):
    plan = random_plan(random.Random(seed), n_devices=6, n_nodes=60)
    quiet = World(plan, iterations=3)
    noisy = World(plan, iterations=3, seed=seed, delay_s=0.5)
    assert quiet.run_to_end() == noisy.run_to_end() == Finished(step=3)
    assert noisy.final == quiet.final
    assert noisy.faults == []
    noisy.check_orders()


def overlaps(seed: int) -> bool:
    """Whether a rank begins iteration 1 before the critic of iteration 0 is trained."""
    order = []

    def watch(world, process, moment, instruction):
        if isinstance(instruction, Run) and moment == "after":
            order.append(("begins", *instruction.request.key[3:]))
        if isinstance(instruction, Done):
            order.append(("ends", *instruction.result.key[3:]))

    World(small_plan(), iterations=2, seed=seed, watch=watch).run_to_end()
    return order.index(("begins", 1, "to_generate")) < order.index(("ends", 0, "critic_train"))


def test_iterations_overlap_where_the_plan_allows():
    """Depends on how long the nodes happen to take; never when iterations follow each other strictly."""
    assert any(overlaps(seed) for seed in range(20))


@pytest.mark.parametrize("every", [2, 3])
def test_fewer_snapshots_give_the_same_end(every):
    dense, sparse = World(small_plan(), iterations=5), World(small_plan(), iterations=5, snapshot_every=every)
    dense.run_to_end(), sparse.run_to_end()
    assert sparse.final == dense.final
    assert len(sparse.commits.orders) < len(dense.commits.orders)
