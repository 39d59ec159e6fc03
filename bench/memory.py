"""Peak memory of a training step on each rank, beside what the planner has room for, on CPU ranks.

    python -m bench.memory [--strategies 1,1,1 2,1,1 2,1,1,sharded ...] [--layers 7] [--hidden 512]
        [--micro-batches 2] [--recompute selective] [--smollm2]

Each strategy has ranks of its own, with one thread each: they build a Llama that trains (float32, vocabulary of 4096;
with --smollm2 the shape of SmolLM2-135M) and make two steps on 16 sequences of 128 tokens. A rank's figure is the
most anonymous memory that it has held beyond what its process held before, so malloc's own overhead and gloo's
buffers count. The plan's is the formula's for parameters, gradients, optimizer and activations.
"""

from collections.abc import Callable
from typing import get_args

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from bench.harness import Store, on_ranks, options
from bench.models import CPU, OPTIMIZER, random_tokens, sizes, training
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths, RoleModel, Workload
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets, join_world
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape, Recompute
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.model.shares import Shares
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import initialise
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.spec import CallAssignment, ModelFunctionCall
from prefect_rlhf.rlhf_tasks.system.rank_process import give_back, peak_bytes, process_bytes, reset_peak

SEQUENCES, TOKENS, STEPS = 16, 128, 2
SMOLLM2 = sizes(576, 30, 9, 3, 1536, 49152)  # nine heads, so that tp is 1, 3 or 9


def peak_of(work: Callable[[], object]) -> int:
    """Bytes of the second of two times: in the first one, torch's own memory comes on top."""
    peak = 0
    for _ in range(2):
        give_back()
        before = process_bytes(CPU)
        reset_peak(CPU)
        work()
        peak = peak_bytes(CPU) - before
    return peak


def measure(
    rank: int,
    store: Store,
    config: LlamaConfig,
    strategy: ParallelStrategy,
    micro_batches: int,
    recompute: Recompute,
) -> int:
    """Peak bytes of a rank that trains."""
    placement = Placement(tuple(range(strategy.size)), strategy)
    host, port, prefix = store
    tcp = dist.TCPStore(host, port, is_master=False)
    join_world(dist.PrefixStore(prefix, tcp), rank, strategy.size, 600.0, CPU)
    groups = ProcessGroups(device_sets(placement), 600.0, CPU)
    layout = Layout(ModelShape.from_config(config.to_dict()), "lm", placement)
    coordinate, tp_group = placement.coordinate(rank), groups[placement.tp_group(rank)]

    def train() -> None:
        shares = Shares(layout, groups, torch.float32) if strategy.shard == "parameters" else None
        how = {"device": CPU, "dtype": torch.float32, "recompute": recompute, "shares": shares}
        stage = Stage(config, layout, coordinate, tp_group, **how)
        initialise(stage, seed=0)
        sequences = random_tokens([TOKENS] * (SEQUENCES // strategy.dp), 4096)
        step = training(Engine(stage, layout, groups, OPTIMIZER), sequences, micro_batches)
        for _ in range(STEPS):
            step()

    return peak_of(train)


def planned_bytes(
    config: LlamaConfig, strategy: ParallelStrategy, micro_batches: int, recompute: Recompute
) -> list[float]:
    """[stages] bytes that a plan has room for on a device of each stage."""
    model = RoleModel(shape=ModelShape.from_config(config.to_dict()))
    workload = Workload(
        prompt_tokens=TOKENS - 1, new_tokens=Lengths.fixed(1), itemsize=4, recompute=recompute
    )
    cost = CostModel(Cluster(1, strategy.size), preset("cpu-slot"), {"actor": model}, workload)
    placement = Placement(tuple(range(strategy.size)), strategy)
    call = ModelFunctionCall(
        name="train", role="actor", kind="train_step", inputs=("input_ids",), n_seqs=SEQUENCES
    )
    active = cost.call(call, CallAssignment(placement=placement, micro_batches=micro_batches)).active_bytes
    return [a + b for a, b in zip(cost.training_bytes("actor", placement), active, strict=True)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--strategies", nargs="+", default=["1,1,1", "2,1,1", "2,1,1,sharded", "4,1,1", "2,2,1", "2,1,2"]
    )
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument(
        "--smollm2", action="store_true", help="this shape, whatever --layers and --hidden say"
    )
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--recompute", choices=get_args(Recompute), default="none")
    arguments = parser.parse_args()
    hidden = arguments.hidden
    shape = SMOLLM2 if arguments.smollm2 else sizes(hidden, arguments.layers, 8, 8, hidden * 11 // 4, 4096)
    config = LlamaConfig(**shape)
    how = (arguments.micro_batches, arguments.recompute)
    print(f"{'(dp,tp,pp)':<14}{'fullest rank, MB':>18}{'planned, MB':>13}{'ratio':>7}")
    for text in arguments.strategies:
        degrees = map(int, text.removesuffix(",sharded").split(","))
        shard = "parameters" if text.endswith(",sharded") else "gradients"
        strategy = ParallelStrategy(*degrees, shard=shard)
        peaks = on_ranks(strategy.size, measure, config, strategy, *how)
        planned = max(planned_bytes(config, strategy, *how))
        print(
            f"({text:<13}) {max(peaks) / 1e6:18.0f}{planned / 1e6:13.0f}{max(peaks) / planned:7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
