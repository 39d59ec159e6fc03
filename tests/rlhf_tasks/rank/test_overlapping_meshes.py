"""Calls on randomly overlapping meshes whose requests arrive in portions of any size: none wrong, none stuck.

Real gloo collectives and the real inbox; two calls that pair up wrongly give a wrong sum.
"""

import random
import time
import zlib

import pytest
import torch
import torch.distributed as dist

from prefect_rlhf.rlhf_tasks.protocol.inbox import Inbox
from prefect_rlhf.rlhf_tasks.protocol.messages import Clear, Load, Run, Told
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Sequencer
from prefect_rlhf.rlhf_tasks.spec import NodeResult
from tests.rlhf_tasks.protocol.plans import random_plan
from tests.rlhf_tasks.settings import DEADLINES

RANKS = 4
NODES = 60


def drive(rank: int, world: int, seed: int) -> list[tuple[str, float]]:
    """Feed a rank's inbox with its requests, some at a time; (node, sum) as they ran."""
    plan = random_plan(random.Random(seed), world, NODES)
    groups = {
        devices: dist.new_group(list(devices)) for devices in sorted({node.devices for node in plan.nodes})
    }
    inbox, ran = Inbox(rank), []
    arriving = list(Sequencer(plan, "test", 1, DEADLINES).requests(0).get(rank, ()))
    portions = random.Random(f"{seed}/{rank}")
    waiting = inbox.reset("test", 1, 0, "client")
    while waiting or arriving:
        if not waiting:
            size = portions.randint(1, 9)
            waiting, arriving = inbox.deliver(arriving[:size]), arriving[size:]
            continue
        match waiting.pop(0):
            case Clear(key=key):
                waiting += inbox.cleared(key) + inbox.restore("test", 1, 0, None)
            case Load(key=key):
                waiting += inbox.loaded(key)
            case Run(request=request):
                mark = zlib.crc32(request.key.node.encode()) % 10_007
                total = torch.tensor([float(mark)])
                dist.all_reduce(total, group=groups[plan.node(request.key.node).devices])
                ran.append((request.key.node, total.item() / mark))
                now_s = time.time()
                done = NodeResult(key=request.key, rank=rank, started_s=now_s, ended_s=now_s)
                waiting += inbox.finished(done)
            case Told(kind="refused", reason=reason):
                raise AssertionError(reason)
    return ran


@pytest.mark.dist
@pytest.mark.parametrize("seed", [1, 2])
def test_requests_run_once_in_plan_order(ranks, seed):
    plan = random_plan(random.Random(seed), RANKS, NODES)
    assert len(plan.nodes) >= NODES
    for rank, ran in enumerate(ranks.run(RANKS, drive, seed)):
        expected = [(node.name, float(len(node.devices))) for node in plan.on(rank)]
        assert ran == expected, f"rank {rank}"
