"""Peak memory of a training step on each rank, beside what the planner has room for, on CPU ranks.

    python -m bench.memory [--strategies 1,1,1 2,1,1 ...] [--layers 7] [--hidden 512] [--micro-batches 2]
        [--recompute selective] [--smollm2]
    python -m bench.memory --drawing 64,131072

Each strategy has ranks of its own, with one thread each: they build a Llama that trains (float32, vocabulary of 4096;
with --smollm2 the shape of SmolLM2-135M) and make two steps on 16 sequences of 128 tokens. A rank's figure is the
most anonymous memory that it has held beyond what its process held before, so malloc's own overhead and gloo's
buffers count. The plan's is the formula's for parameters, gradients, optimizer and activations.

With --drawing, 1, 2 and 4 tp ranks draw so many tokens (rows, vocabulary), each from float32 logits of its part, by
temperature alone, by top-k and by top-p. The plan's figure is the formula's for all of them.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import LlamaConfig

from bench.harness import options
from planner.plan.mesh import Cluster
from planner.plan.workload import Lengths, RoleModel, Workload
from planner.pricing.call_formulas import DRAWN_BYTES
from planner.pricing.calls import CostModel
from planner.pricing.devices import preset
from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets, join_world, leave_world
from rlhf_tasks.parallel.generate.sampling import SamplingParams, sample
from rlhf_tasks.parallel.layout.shape import ModelShape, Recompute
from rlhf_tasks.parallel.layout.slices import Layout, split
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.layout.work import SAMPLED_AT_ONCE
from rlhf_tasks.parallel.model.logprobs import Vocabulary
from rlhf_tasks.parallel.model.stage import Stage
from rlhf_tasks.parallel.model.weights import initialise
from rlhf_tasks.parallel.train.engine import Engine, LossTerms
from rlhf_tasks.parallel.train.optimizer import OptimizerSettings
from rlhf_tasks.spec import CallAssignment, ModelFunctionCall
from rlhf_tasks.system.rank_process import give_back, peak_bytes, process_bytes, reset_peak

CPU = torch.device("cpu")
DRAWN: tuple[dict[str, Any], ...] = ({"temperature": 0.7}, {"top_k": 50}, {"top_p": 0.9})
SEQUENCES, TOKENS, STEPS = 16, 128, 2
SETTINGS = OptimizerSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)


def llama(layers: int, hidden: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=hidden * 11 // 4,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def smollm2() -> LlamaConfig:
    """The shape of SmolLM2-135M: nine heads, so that tp is 1, 3 or 9."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def measure(
    rank: int,
    config: LlamaConfig,
    strategy: ParallelStrategy,
    micro_batches: int,
    recompute: Recompute,
    folder: str,
) -> None:
    """One rank process: train, and write the peak to a file of the folder."""
    torch.set_num_threads(1)
    join_world(dist.FileStore(f"{folder}/store", strategy.size), rank, strategy.size, 600.0, CPU)
    placement = Placement(tuple(range(strategy.size)), strategy)
    groups = ProcessGroups(device_sets(placement), 600.0, CPU)
    peaks = []
    for _ in range(2):  # the first time, torch's own memory comes on top
        give_back()
        before = process_bytes(CPU)
        reset_peak(CPU)
        _train(config, placement, groups, micro_batches, recompute)
        peaks.append(peak_bytes(CPU) - before)
    Path(folder, str(rank)).write_text(str(peaks[-1]))
    leave_world()


def _train(
    config: LlamaConfig,
    placement: Placement,
    groups: ProcessGroups,
    micro_batches: int,
    recompute: Recompute,
) -> None:
    layout = Layout(ModelShape.from_config(config.to_dict()), "lm", placement)
    tp_group = groups[placement.tp_group(groups.rank)]
    stage = Stage(
        config,
        layout,
        placement.coordinate(groups.rank),
        tp_group,
        device=CPU,
        dtype=torch.float32,
        recompute=recompute,
    )
    initialise(stage, seed=0)
    engine = Engine(stage, layout, groups, SETTINGS)
    ids = range(engine.coordinate.dp, SEQUENCES, placement.strategy.dp)
    tokens = [torch.randint(1, 4096, (TOKENS,), generator=torch.Generator().manual_seed(i)) for i in ids]
    batch = SampleBatch(tuple(ids), {"input_ids": Packed.of(tokens)})

    def loss(logits: Tensor, micro: MicroBatch) -> LossTerms:
        return LossTerms(-engine.logprobs(logits, micro).sum(), {})

    for _ in range(STEPS):
        engine.train_step(batch, loss, float(SEQUENCES * TOKENS), micro_batches, 1e-4)


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


def measure_drawing(rank: int, world: int, rows: int, vocab: int, folder: str) -> None:
    """One rank process: draw, and write the peaks of all ways of it to a file of the folder."""
    torch.set_num_threads(1)
    join_world(dist.FileStore(f"{folder}/store", world), rank, world, 600.0, CPU)
    group = ProcessGroups([tuple(range(world))], 600.0, CPU)[range(world)]
    parts = tuple(split(vocab, world, i).size for i in range(world))
    vocabulary = Vocabulary(parts, rank, group, tuple(range(world)))
    peaks = []
    for settings in DRAWN:
        params = SamplingParams(max_new_tokens=1, **settings)
        for _ in range(2):
            give_back()
            before = process_bytes(CPU)
            reset_peak(CPU)
            logits = torch.randn(rows, parts[rank])
            uniforms = torch.rand(rows, dtype=torch.float64)
            sample(logits, params, uniforms, torch.zeros(rows, dtype=torch.int64), vocabulary)
            peak = peak_bytes(CPU) - before
            del logits
        peaks.append(peak)
    Path(folder, str(rank)).write_text(json.dumps(peaks))
    leave_world()


def drawing(rows: int, vocab: int) -> None:
    print(f"{'tp':<4}" + "".join(f"{way!s:>24}" for way in DRAWN) + f"{'planned, MB':>14}")
    for world in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure_drawing, (world, rows, vocab, folder), nprocs=world)
            peaks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world)]
        logits = rows * -(-vocab // world)
        planned = logits * 4 + min(logits, SAMPLED_AT_ONCE["cpu"]) * DRAWN_BYTES
        fullest = "".join(f"{max(of_way) / 1e6:24.0f}" for of_way in zip(*peaks, strict=True))
        print(f"{world:<4}{fullest}{planned / 1e6:14.0f}", flush=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--strategies", nargs="+", default=["1,1,1", "2,1,1", "4,1,1", "2,2,1", "2,1,2"])
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument(
        "--smollm2", action="store_true", help="this shape, whatever --layers and --hidden say"
    )
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--recompute", choices=get_args(Recompute), default="none")
    parser.add_argument("--drawing", help="rows,vocabulary")
    arguments = parser.parse_args()
    if arguments.drawing:
        drawing(*map(int, arguments.drawing.split(",")))
        return
    config = smollm2() if arguments.smollm2 else llama(arguments.layers, arguments.hidden)
    how = (arguments.micro_batches, arguments.recompute)
    print(f"{'(dp,tp,pp)':<12}{'fullest rank, MB':>18}{'planned, MB':>13}{'ratio':>7}")
    for text in arguments.strategies:
        strategy = ParallelStrategy(*map(int, text.split(",")))
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (config, strategy, *how, folder), nprocs=strategy.size)
            peaks = [int(Path(folder, str(rank)).read_text()) for rank in range(strategy.size)]
        planned = max(planned_bytes(config, strategy, *how))
        print(
            f"({text})     {max(peaks) / 1e6:18.0f}{planned / 1e6:13.0f}{max(peaks) / planned:7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
