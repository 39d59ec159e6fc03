"""What reallocation costs: planning for many ranks, and moving a model between real ones.

    python bench/reallocation.py                          # planning, one process
    torchrun --nproc-per-node 4 bench/reallocation.py     # moving; NCCL where each rank has a GPU, else gloo

Prints one JSON line per pair of layouts.
"""

import json
import os
import statistics
import time

import torch
import torch.distributed as dist

from rlhf_tasks.parallel.groups import ProcessGroups, all_reduce, join_world, leave_world
from rlhf_tasks.parallel.layout import Layout
from rlhf_tasks.parallel.random import permutation
from rlhf_tasks.parallel.reallocation import reallocate, union_set
from rlhf_tasks.parallel.shape import ModelShape
from rlhf_tasks.parallel.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.transfers import (
    plan_reallocation,
    plan_redistribution,
    reallocation_bound,
    shares,
)
from rlhf_tasks.spec import DataSide

LLAMA_70B = ModelShape("llama", 8192, 80, 64, 8, 128, 28672, 32000, 4096)
SMALL = ModelShape("llama", 512, 7, 8, 4, 64, 1408, 4096, 512, tied=True)
LARGE_PAIRS = [
    ((16, 8, 8), (32, 8, 4)),
    ((16, 8, 8), (256, 4, 1)),
    ((2, 64, 8), (16, 8, 8)),
    ((1024, 1, 1), (1, 64, 16)),
]
SMALL_PAIRS = [((1, 2, 2), (4, 1, 1)), ((4, 1, 1), (1, 4, 1)), ((2, 2, 1), (1, 1, 4)), ((1, 1, 4), (1, 4, 1))]
REPEATS = 5


def layout(shape: ModelShape, degrees: tuple[int, int, int]) -> Layout:
    strategy = ParallelStrategy(*degrees)
    return Layout(shape, "lm", Placement(tuple(range(strategy.size)), strategy))


def plan_large() -> None:
    """CPU-seconds to plan a 70B model's reallocation between 1,024 ranks, 8 to a host."""
    for pair in LARGE_PAIRS:
        source, destination = (layout(LLAMA_70B, degrees) for degrees in pair)
        start_s = time.process_time()
        plan = plan_reallocation(source, destination, 2, 8)
        seconds = time.process_time() - start_s
        moved = sum(transfer.size_bytes for transfer in plan)
        bound = reallocation_bound(source, destination, 2)
        row = {
            "pair": pair,
            "plan_s": round(seconds, 3),
            "messages": len(plan),
            "bytes": moved,
            "bound": bound,
        }
        print(json.dumps(row))


def plan_redistributions() -> None:
    """CPU-seconds to plan the hand-over of 16,384 sequences between calls on 1,024 ranks, lengths included."""
    ids = range(16_384)
    lengths = {i: 128 + permuted % 896 for i, permuted in enumerate(permutation(len(ids), 0, "lengths", 0))}
    for pair in LARGE_PAIRS:
        source, destination = (layout(LLAMA_70B, degrees).placement for degrees in pair)
        for balance in ("count", "tokens"):
            start_s = time.process_time()
            held = shares(DataSide(placement=source), ids, lengths)
            wanted = shares(DataSide(placement=destination, balance=balance, mini_batches=4), ids, lengths)
            plan = plan_redistribution(held, wanted, 8)
            seconds = time.process_time() - start_s
            row = {"pair": pair, "balance": balance, "plan_s": round(seconds, 3), "messages": len(plan)}
            print(json.dumps(row))


def move_small(rank: int, world: int) -> None:
    """Seconds (median; slowest rank) to move a 25M model between the layouts of 4 ranks, checks included."""
    cuda = torch.cuda.device_count() >= world
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    join_world(dist.PrefixStore("bench", store), rank, world, 120.0, device)
    groups = ProcessGroups([range(world)], 120.0, device)
    group = groups[range(world)]
    for pair in SMALL_PAIRS:
        source, destination = (layout(SMALL, degrees) for degrees in pair)
        assert len(union_set(source.placement, destination.placement)) == world, "start 4 ranks"
        slices = {
            name: torch.ones(source.slice_shape(name, rank), device=device) for name in source.held(rank)
        }
        seconds = []
        for _ in range(REPEATS):
            all_reduce(torch.ones(1, device=device), group)
            start_s = time.perf_counter()
            reallocate(source, destination, slices, torch.float32, groups, world)
            took = torch.tensor([time.perf_counter() - start_s], device=device)
            seconds.append(float(all_reduce(took, group, dist.ReduceOp.MAX)))
        if rank == 0:
            moved = reallocation_bound(source, destination, 4)
            print(json.dumps({"pair": pair, "move_s": round(statistics.median(seconds), 4), "bytes": moved}))
    groups.close()
    leave_world()


if __name__ == "__main__":
    if "RANK" in os.environ:
        move_small(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        plan_large()
        plan_redistributions()
