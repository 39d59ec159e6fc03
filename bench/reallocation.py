"""Measures the cost of reallocation: planning it for many ranks, and moving a model between real ranks.

    python -m bench.reallocation                          # planning, one process
    torchrun --nproc-per-node 4 -m bench.reallocation     # moving; NCCL where each rank has a GPU, else gloo

Prints one JSON line per pair of layouts.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from bench.harness import Spread, options
from rlhf_tasks.parallel.comm.groups import ProcessGroups, all_reduce, device_sets, join_world, leave_world
from rlhf_tasks.parallel.comm.reallocation import reallocate, union_set
from rlhf_tasks.parallel.layout.shape import ModelShape
from rlhf_tasks.parallel.layout.slices import Layout
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.layout.transfers import (
    plan_reallocation,
    plan_redistribution,
    reallocation_bound,
    shares,
)
from rlhf_tasks.parallel.train.optimizer import Optimizer, OptimizerSettings
from rlhf_tasks.parallel.train.state_files import StateTransfer, read_shards, write_shards
from rlhf_tasks.parallel.train.state_layout import StateLayout
from rlhf_tasks.spec import DataSide
from rlhf_tasks.system.counter_random import permutation

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
    """Print CPU seconds for planning the reallocation of a 70B model between 1,024 ranks, 8 per host."""
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
    """Print CPU seconds for planning the redistribution of 16,384 sequences between calls on 1,024 ranks.

    They include the computation of both calls' shares of the samples.
    """
    ids = range(16_384)
    lengths = {i: 128 + permuted % 896 for i, permuted in enumerate(permutation(len(ids), 0, "lengths", 0))}
    for pair in LARGE_PAIRS:
        source, destination = (layout(LLAMA_70B, degrees).placement for degrees in pair)
        for balance in ("count", "tokens"):
            start_s = time.process_time()
            held = shares(DataSide(placement=source), ids, lengths)
            wanted = shares(DataSide(placement=destination, balance=balance, mini_batches=4), ids, lengths)
            plan = plan_redistribution(held, wanted, 8, "a key")
            seconds = time.process_time() - start_s
            row = {"pair": pair, "balance": balance, "plan_s": round(seconds, 3), "messages": len(plan)}
            print(json.dumps(row))


def plan_state() -> None:
    """Print CPU seconds in which rank 0 of 1,024 lists the parts of a 70B model's state that it reads."""
    for pair in LARGE_PAIRS:
        source, destination = (layout(LLAMA_70B, degrees) for degrees in pair)
        start_s = time.process_time()
        transfer = StateTransfer(StateLayout(source), StateLayout(destination))
        parts = sum(len(list(transfer.taken(name, 0))) for name in source.specs)
        seconds = time.process_time() - start_s
        print(json.dumps({"pair": pair, "state_plan_s": round(seconds, 3), "parts": parts}))


def move(rank: int, world: int) -> None:
    """Move a 25M model between layouts of 4 ranks: its weights, then its training state."""
    cuda = torch.cuda.device_count() >= world
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    join_world(dist.PrefixStore("bench", store), rank, world, 120.0, device)
    placements = [layout(SMALL, degrees).placement for pair in SMALL_PAIRS for degrees in pair]
    sets = [devices for placement in placements for devices in device_sets(placement)]
    groups = ProcessGroups([range(world), *sets], 120.0, device)
    move_weights(rank, world, groups)
    move_state(rank, world, groups)
    groups.close()
    leave_world()


def move_weights(rank: int, world: int, groups: ProcessGroups) -> None:
    """Print seconds (median; slowest rank) of a reallocation, including its checks."""
    for pair in SMALL_PAIRS:
        source, destination = (layout(SMALL, degrees) for degrees in pair)
        assert len(union_set(source.placement, destination.placement)) == world, "start 4 ranks"
        slices = {
            name: torch.ones(source.slice_shape(name, rank), device=groups.device)
            for name in source.held(rank)
        }
        work = partial(reallocate, source, destination, slices, torch.float32, groups, world)
        seconds = [slowest(work, groups, world) for _ in range(REPEATS)]
        if rank == 0:
            moved = reallocation_bound(source, destination, 4)
            print(json.dumps({"pair": pair, "move_s": Spread.of(seconds), "bytes": moved}))


def move_state(rank: int, world: int, groups: ProcessGroups) -> None:
    """Print seconds (slowest rank) for reading master weights and moments in another layout, from files just
    written on one host."""
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    for number, pair in enumerate(SMALL_PAIRS):
        source, destination = (layout(SMALL, degrees) for degrees in pair)
        files = [Path(folder[0]) / f"{number}-{other}" for other in range(world)]
        seconds = state_seconds(source, destination, files, groups)
        if rank == 0:
            print(json.dumps({"pair": pair, "state_s": Spread.of(seconds)}))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def state_seconds(
    source: Layout, destination: Layout, files: Sequence[Path], groups: ProcessGroups
) -> list[float]:
    """Seconds of each repeat. Each rank writes one of `files` first."""
    rank = groups.rank
    into = optimizer(destination, groups)
    kept = [shard._replace(tensor=shard.tensor.cpu()) for shard in optimizer(source, groups).shard_state()]
    write_shards(files[rank], rank, kept)

    def read() -> None:
        into.load_shard_state(read_shards(files, source, destination, rank, into.shard_state()), 1)

    return [slowest(read, groups, len(files)) for _ in range(REPEATS)]


def optimizer(laid_out: Layout, groups: ProcessGroups) -> Optimizer:
    """The optimizer of this rank's part of a model; the values of the weights do not matter."""
    slices = {
        name: torch.nn.Parameter(torch.ones(laid_out.slice_shape(name, groups.rank), device=groups.device))
        for name in laid_out.held(groups.rank)
    }
    return Optimizer(
        slices,
        laid_out,
        groups,
        OptimizerSettings((0.9, 0.95), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0),
    )


def slowest(work: Callable[[], object], groups: ProcessGroups, world: int) -> float:
    """Seconds that the slowest rank takes, from a common start."""
    group = groups[range(world)]
    all_reduce(torch.ones(1, device=groups.device), group)
    start_s = time.perf_counter()
    work()
    if groups.device.type == "cuda":
        torch.cuda.synchronize()
    took = torch.tensor([time.perf_counter() - start_s], device=groups.device)
    return float(all_reduce(took, group, dist.ReduceOp.MAX))


def main(arguments: list[str] | None = None) -> None:
    options(__doc__).parse_args(arguments)
    if "RANK" in os.environ:
        move(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        plan_large()
        plan_state()
        plan_redistributions()


if __name__ == "__main__":
    main()
