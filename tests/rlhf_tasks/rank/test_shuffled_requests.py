"""Calls on randomly overlapping meshes whose requests arrive shuffled and duplicated: none wrong, none stuck.

Real gloo collectives and the real inbox; two calls that pair up wrongly give a wrong sum.
"""

import random
import time
import zlib

import pytest
import torch
import torch.distributed as dist

from rlhf_tasks.protocol.inbox import Inbox
from rlhf_tasks.protocol.instructions import Clear, Load, Run
from rlhf_tasks.protocol.messages import Told
from rlhf_tasks.protocol.sequencer import Sequencer
from rlhf_tasks.spec import NodeResult
from tests.rlhf_tasks.protocol.plans import random_plan
from tests.rlhf_tasks.settings import DEADLINES

RANKS = 4
NODES = 60


def drive(rank: int, world: int, seed: int) -> list[tuple[str, float]]:
    """Feed a rank's inbox with its requests in any order, each up to three times; (node, sum) as they ran."""
    plan = random_plan(random.Random(seed), world, NODES)
    groups = {
        devices: dist.new_group(list(devices)) for devices in sorted({node.devices for node in plan.nodes})
    }
    inbox, ran = Inbox(rank), []
    requests = Sequencer(plan, "test", 1, DEADLINES).requests(0).get(rank, ())
    disorder = random.Random(f"{seed}/{rank}")
    arriving = [request for request in requests for _ in range(disorder.randint(1, 3))]
    disorder.shuffle(arriving)
    waiting = inbox.reset("test", 1, 0, "client", 0.0) + inbox.restore("test", 1, 0, None, 0.0)
    restored = False
    while waiting or arriving:
        if not waiting:
            waiting = inbox.deliver([arriving.pop()], 0.0)
            continue
        match waiting.pop(0):
            case Clear(key=key):
                waiting += inbox.cleared(key, 0.0)
                if not restored:
                    restored = True
                    waiting += inbox.restore("test", 1, 0, None, 0.0)
            case Load(key=key):
                waiting += inbox.loaded(key, 0.0)
            case Run(request=request):
                mark = zlib.crc32(request.key.node.encode()) % 10_007
                total = torch.tensor([float(mark)])
                dist.all_reduce(total, group=groups[plan.node(request.key.node).devices])
                ran.append((request.key.node, total.item() / mark))
                now_s = time.time()
                done = NodeResult(key=request.key, rank=rank, started_s=now_s, ended_s=now_s)
                waiting += inbox.finished(done, 0.0)
            case Told(kind="refused", reason=reason):
                assert "reset has not ended" in reason, reason
    return ran


@pytest.mark.dist
@pytest.mark.parametrize("seed", [1, 2])
def test_shuffled_and_repeated_requests_run_once_in_plan_order(ranks, seed):
    plan = random_plan(random.Random(seed), RANKS, NODES)
    assert len(plan.nodes) >= NODES
    for rank, ran in enumerate(ranks.run(RANKS, drive, seed)):
        expected = [(node.name, float(len(node.devices))) for node in plan.on(rank)]
        assert ran == expected, f"rank {rank}"
