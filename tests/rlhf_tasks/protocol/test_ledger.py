"""Ledger: stimulus in, instructions out."""

import random

import pytest

from tests.rlhf_tasks.protocol.plans import random_plan, small_plan
from tests.rlhf_tasks.protocol.simulation import Network, World


def test_a_quiet_run_commits_every_step_in_order():
    world = World(small_plan(), iterations=4)
    assert world.run().step == 4
    assert list(world.disk.commits) == [0, 1, 2, 3, 4]
    world.check_orders()


@pytest.mark.parametrize("seed", range(10))
def test_shuffled_doubled_and_lost_messages_change_nothing(seed):
    plan = random_plan(random.Random(seed), n_devices=6, n_nodes=60)
    quiet = World(plan, iterations=3)
    noisy = World(plan, iterations=3, seed=seed, network=Network(loss=0.2, duplicate=0.3, delay_s=0.5))
    quiet.run(), noisy.run()
    assert noisy.final == quiet.final
    assert noisy.controller.faults == []
    noisy.check_orders()
