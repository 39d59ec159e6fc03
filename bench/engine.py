"""Compares the engine with plain transformers on a 25M Llama, on the CPU: generation and training.

    python -m bench.engine [--rounds 5] [--only generation|training] [--out FILE.json]

There are two rank processes with one thread each. Every round runs every row once, so that a busy machine affects all
rows equally. A row's figure is its median over the rounds, in useful tokens (no padding) per second of process CPU
time, summed over the ranks that take part. Waiting ranks sleep, so idle time does not count: the figures show the
additional work of a layout, not its speed on two machines.

    generation   fixed   16 prompts of 32 tokens, 48 new tokens each
                 varied  16 prompts of 8 to 56 tokens, responses end with a stop id (1 token in 64) or after 80 tokens
    training     padded  16 sequences of 16 to 128 tokens: transformers pads to 128, the engine packs
                 full    16 sequences of 128 tokens: no gain from packing

Rows: transformers (its `generate`; its model, padded, cross-entropy summed over tokens and divided by their
number, clipping, fused AdamW) and the engine at (dp, tp, pp) = (1,1,1), (2,1,1), (1,2,1) and (1,1,2), all in
float32; (1,1,1)+lora has adapters of rank 16 on all linear layers.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.comm.copier import Copier
from rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets, join_world, leave_world
from rlhf_tasks.parallel.generate.generation import generate
from rlhf_tasks.parallel.generate.sampling import SamplingParams
from rlhf_tasks.parallel.layout.shape import Lora, linear_modules
from rlhf_tasks.parallel.layout.slices import Layout, ModelShape
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.model.stage import Stage
from rlhf_tasks.parallel.model.weights import initialise_adapters
from rlhf_tasks.parallel.train.engine import Engine, LossTerms
from rlhf_tasks.parallel.train.optimizer import OptimizerSettings

VOCAB = 4096
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=512,
    num_hidden_layers=7,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=1408,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
SEQUENCES = 16
STOPS = tuple(range(64, 128))  # 64 of 4096 tokens
LEARNING_RATE, BETAS, MAX_GRAD_NORM = 1e-4, (0.9, 0.95), 1.0
STRATEGIES = [ParallelStrategy(*degrees) for degrees in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]]
RANKS = 2
CPU = torch.device("cpu")

Row = Callable[[], int]
"""Does a row's work once on this rank. Returns the useful tokens that this rank counts."""


@dataclass(frozen=True)
class GenerationWork:
    prompts: list[Tensor]
    params: SamplingParams


def generation_works() -> Mapping[str, GenerationWork]:
    return {
        "fixed": GenerationWork(_tokens([32] * SEQUENCES), SamplingParams(max_new_tokens=48)),
        "varied": GenerationWork(
            _tokens(_spread(8, 56)), SamplingParams(max_new_tokens=80, min_new_tokens=1, stop_ids=STOPS)
        ),
    }


def training_works() -> Mapping[str, list[Tensor]]:
    return {"padded": _tokens(_spread(16, 128)), "full": _tokens([128] * SEQUENCES)}


def _spread(low: int, high: int) -> list[int]:
    """SEQUENCES lengths, evenly spaced over low .. high, shuffled."""
    order = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(0)).tolist()
    return [low + (high - low) * i // (SEQUENCES - 1) for i in order]


def _tokens(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(128, VOCAB, (length,), generator=generator) for length in lengths]


# Plain transformers


def plain_generation(model: PreTrainedModel, work: GenerationWork) -> Row:
    longest = max(map(len, work.prompts))
    prompts = torch.stack([F.pad(p, (longest - len(p), 0)) for p in work.prompts])
    mask = torch.stack([F.pad(torch.ones_like(p), (longest - len(p), 0)) for p in work.prompts])

    @torch.inference_mode()
    def run() -> int:
        tokens = model.generate(
            prompts,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=work.params.min_new_tokens or None,
            max_new_tokens=work.params.max_new_tokens,
            eos_token_id=list(work.params.stop_ids) or None,
            pad_token_id=0,
        )[:, longest:]
        stopped = torch.isin(tokens, torch.tensor(work.params.stop_ids))
        ended = stopped.any(1)
        return int(torch.where(ended, stopped.int().argmax(1) + 1, tokens.shape[1]).sum())

    return run


def plain_training(model: PreTrainedModel, sequences: list[Tensor]) -> Row:
    longest = max(map(len, sequences))
    tokens = torch.stack([F.pad(s, (0, longest - len(s))) for s in sequences])
    mask = torch.stack([F.pad(torch.ones_like(s), (0, longest - len(s))) for s in sequences])
    targets = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    denominator = sum(len(s) - 1 for s in sequences)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True
    )

    def run() -> int:
        logits = model(tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / denominator
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return sum(map(len, sequences))

    return run


# The engine


def build_engine(
    whole: PreTrainedModel,
    strategy: ParallelStrategy,
    groups: ProcessGroups,
    dtype: torch.dtype,
    rank: int | None = None,
    copies: Copier | None = None,
) -> Engine:
    """A trainable engine with its slices of the whole model's weights.

    rank    of adapters; None: all weights train
    copies  copies the optimizer's state from and to host memory, where it is kept; None: it is on the device
    """
    config = whole.config
    placement = Placement(tuple(range(strategy.size)), strategy)
    shape = ModelShape.from_config(config.to_dict())
    lora = None if rank is None else Lora(rank, 2.0 * rank, tuple(linear_modules(shape)))
    layout = Layout(shape, "lm", placement, lora)
    coordinate, tp_group = placement.coordinate(groups.rank), groups[placement.tp_group(groups.rank)]
    stage = Stage(config, layout, coordinate, tp_group, device=groups.device, dtype=dtype)
    parameters = dict(whole.named_parameters())
    for name, mine in stage.named_slices().items():
        rows = layout.whole.held(groups.rank)[name]
        dim = layout.whole.specs[name].dim
        mine.data.copy_(parameters[name].detach().narrow(dim, rows.start, rows.size))
    initialise_adapters(stage, seed=0)
    settings = OptimizerSettings(BETAS, eps=1e-8, weight_decay=0.0, max_grad_norm=MAX_GRAD_NORM)
    return Engine(stage, layout, groups, settings, copies=copies)


def _share(engine: Engine, key: str, sequences: list[Tensor]) -> SampleBatch:
    ids = range(engine.coordinate.dp, len(sequences), engine.placement.strategy.dp)
    return SampleBatch(tuple(ids), {key: Packed.of([sequences[i] for i in ids])})


def engine_generation(engine: Engine, work: GenerationWork) -> Row:
    batch = _share(engine, "prompt_ids", work.prompts)

    def run() -> int:
        samples = generate(engine, batch, work.params, seed=0, iteration=0)
        return 0 if samples is None else int(samples["response_mask"].values.sum())

    return run


def engine_training(engine: Engine, sequences: list[Tensor]) -> Row:
    batch = _share(engine, "input_ids", sequences)
    denominator = float(sum(len(s) - 1 for s in sequences))

    def loss(logits: Tensor, micro: MicroBatch) -> LossTerms:
        return LossTerms(-engine.logprobs(logits, micro).sum(), {})

    def run() -> int:
        engine.train_step(batch, loss, denominator, micro_batches, LEARNING_RATE)
        return batch["input_ids"].values.numel() if engine.is_head else 0

    micro_batches = engine.placement.strategy.pp
    return run


# Measuring


def measure(rank: int, rounds: int, only: str, store: str, results: str) -> None:
    """One rank process: run every row `rounds` times after one warm-up; rank 0 prints and writes the figures."""
    torch.set_num_threads(1)
    join_world(dist.FileStore(store, RANKS), rank, RANKS, timeout_s=600.0, device=CPU)
    placements = [Placement(tuple(range(s.size)), s) for s in STRATEGIES]
    sets = [devices for placement in placements for devices in device_sets(placement)]
    groups = ProcessGroups([*sets, range(RANKS)], 600.0, CPU)
    rows = {name: row for name, row in _rows(rank, groups).items() if name.startswith(only)}
    figures: dict[str, list[float]] = {name: [] for name in rows}
    for round_number in range(rounds + 1):
        for name, row in rows.items():
            dist.monitored_barrier(timeout=timedelta(seconds=600))
            start = time.process_time()
            tokens = row() if row is not None else 0
            total = torch.tensor([float(tokens), time.process_time() - start], dtype=torch.float64)
            if row is None:
                total[1] = 0.0
            dist.all_reduce(total)
            if round_number > 0:
                figures[name].append(float(total[0] / total[1]))
        if rank == 0 and round_number > 0:
            Path(results).write_text(json.dumps(figures))
            print(f"round {round_number} of {rounds}\n{report(figures)}\n", flush=True)
    leave_world()


def _rows(rank: int, groups: ProcessGroups) -> dict[str, Row | None]:
    """Row name -> its work on this rank; None where this rank does not take part."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="sdpa").eval()
    engines = {
        _label(s): build_engine(model, s, groups, torch.float32) if rank < s.size else None
        for s in STRATEGIES
    }
    adapted = build_engine(model, STRATEGIES[0], groups, torch.float32, rank=16) if rank == 0 else None
    engines["(1,1,1)+lora"] = adapted
    rows: dict[str, Row | None] = {}
    for name, work in generation_works().items():
        rows[f"generation {name} transformers"] = plain_generation(model, work) if rank == 0 else None
        for label, engine in engines.items():
            rows[f"generation {name} {label}"] = engine_generation(engine, work) if engine else None
    for name, sequences in training_works().items():
        rows[f"training {name} transformers"] = plain_training(model, sequences) if rank == 0 else None
        for label, engine in engines.items():
            rows[f"training {name} {label}"] = engine_training(engine, sequences) if engine else None
    return rows


def _label(strategy: ParallelStrategy) -> str:
    return f"({strategy.dp},{strategy.tp},{strategy.pp})"


def report(figures: Mapping[str, list[float]]) -> str:
    """One line per row: median, range, and the ratio to transformers and to (1,1,1) of the same work."""
    medians = {name: statistics.median(values) for name, values in figures.items()}
    lines = [f"{'tokens per CPU-second':<34}{'median':>8}{'min':>8}{'max':>8}{'/ plain':>9}{'/ (1,1,1)':>11}"]
    for name, values in figures.items():
        work = name.rsplit(" ", 1)[0]
        against = [medians[name] / medians[f"{work} {other}"] for other in ("transformers", "(1,1,1)")]
        lines.append(
            f"{name:<34}{medians[name]:8.0f}{min(values):8.0f}{max(values):8.0f}"
            f"{against[0]:9.2f}{against[1]:11.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["generation", "training"], default="", help="half of the rows")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, results = f"{folder}/store", f"{folder}/results.json"
        mp.spawn(measure, (arguments.rounds, arguments.only, store, results), nprocs=RANKS)
        figures = json.loads(Path(results).read_text())
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
