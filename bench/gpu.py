"""Checks the engine on one CUDA GPU, and compares its speed with plain transformers.

    python -m bench.gpu --out FILE.json [--size 1b] [--rounds 3] [--peak-flops 989e12]
    python -m bench.gpu --device cpu      the checks alone

It needs no server and no cluster. The checks use small models in float32 (without TF32) and bfloat16. The timings use
a Llama of about one billion parameters with random weights, in bfloat16. Exit status 1 when a check fails.

Timings are wall-clock seconds after a warm-up, with the device synchronised before and after; medians over the
rounds. MFU counts 6 FLOPs per parameter and token, plus for causal attention 6 x layers x width FLOPs per token and
earlier token, relative to the given peak (989e12: NVIDIA's data sheet, H100 SXM, dense bfloat16).
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from transformers import LlamaConfig, PreTrainedModel

from bench.gpu_checks import TINY, build_model, checks, drawn, plain_generation, plain_training
from bench.harness import Spread, in_turn, options, seconds_of
from bench.models import CPU, build_engine, random_tokens, sizes, training
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, join_world, leave_world
from prefect_rlhf.rlhf_tasks.parallel.comm.host_memory import copier
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams

CUDA = torch.device("cuda", 0)
SIZES = {"tiny": TINY, "1b": sizes(2048, 16, 32, 8, 8192, 128256, head_dim=64)}


class Timing(NamedTuple):
    """One row of the table: median seconds for `tokens` useful tokens; MFU as a fraction, for training only."""

    name: str
    tokens: int
    seconds: float
    mfu: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """Median wall-clock seconds, after one warm-up."""

    def done() -> None:
        work()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return Spread.of(in_turn({"": partial(seconds_of, done)}, rounds, warm_up=1)[""]).median


def time_generation(groups: ProcessGroups, size: str, rounds: int) -> list[Timing]:
    model = build_model(LlamaConfig(**SIZES[size]), torch.bfloat16, CUDA)
    engine = build_engine(model, groups)
    engine.master = None
    timings = []
    for sequences in (8, 64, 256):
        prompts, new_tokens = random_tokens([128] * sequences, model.config.vocab_size), 256
        for name, work in (
            ("transformers", plain_generation(model, prompts, new_tokens)),
            ("engine", partial(drawn, engine, prompts, SamplingParams(max_new_tokens=new_tokens))),
        ):
            row = f"generation {sequences} x {new_tokens}, {name}"
            timings.append(Timing(row, sequences * new_tokens, seconds(work, rounds)))
    return timings


def time_training(groups: ProcessGroups, size: str, rounds: int, peak_flops: float) -> list[Timing]:
    lengths = [256 + (1792 * i) // 15 for i in range(16)]
    sequences, micro_batches, config = random_tokens(lengths, SIZES[size]["vocab_size"]), 8, SIZES[size]
    rows = []

    def engine_s(copies: Any) -> float:
        engine = build_engine(build_model(LlamaConfig(**config), torch.bfloat16, CUDA), groups, copies)
        return seconds(training(engine, sequences, micro_batches), rounds)

    plain = build_model(LlamaConfig(**config), torch.float32, CUDA).train()
    flops = training_flops(plain, lengths)
    work = plain_training(plain, sequences, micro_batches, autocast=True)
    rows.append(("transformers, autocast", seconds(work, rounds)))
    del plain, work
    torch.cuda.empty_cache()
    rows.append(("engine", engine_s(None)))
    torch.cuda.empty_cache()
    copies = copier(CUDA)
    rows.append(("engine, optimizer in host memory", engine_s(copies)))
    copies.close()
    return [Timing(f"training, {name}", sum(lengths), s, flops / s / peak_flops) for name, s in rows]


def training_flops(model: PreTrainedModel, lengths: list[int]) -> float:
    config = model.config
    dense = 6 * sum(p.numel() for p in model.parameters()) * sum(lengths)
    width = config.num_attention_heads * config.head_dim
    return float(dense + 6 * config.num_hidden_layers * width * sum(n * n for n in lengths))


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak-flops", type=float, default=989e12, help="of the device, dense bfloat16")
    arguments = parser.parse_args()
    device = CUDA if arguments.device == "cuda" else CPU
    join_world(dist.HashStore(), 0, 1, timeout_s=600.0, device=device)
    groups = ProcessGroups([(0,)], 600.0, device)
    checked = checks(groups)
    print("\n".join(map(str, checked)), flush=True)
    if device == CUDA:
        timed = [
            *time_generation(groups, arguments.size, arguments.rounds),
            *time_training(groups, arguments.size, arguments.rounds, arguments.peak_flops),
        ]
        for timing in timed:
            mfu = "" if timing.mfu is None else f"   MFU {timing.mfu:.1%}"
            print(f"{timing.name:<44}{timing.tokens_per_s:12.0f} tokens/s{mfu}")
        free_bytes, all_bytes = torch.cuda.mem_get_info(CUDA)
        result = {
            "device": torch.cuda.get_device_name(CUDA),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peak_memory_bytes": torch.cuda.max_memory_allocated(CUDA),
            "context_bytes": all_bytes - free_bytes - torch.cuda.memory_reserved(CUDA),
            "fragmentation": 1 - torch.cuda.max_memory_allocated(CUDA) / torch.cuda.max_memory_reserved(CUDA),
            "checks": [check._asdict() for check in checked],
            "timings": [{**timing._asdict(), "tokens_per_s": timing.tokens_per_s} for timing in timed],
        }
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1))
    leave_world()
    return int(any(check.value > check.bound for check in checked))


if __name__ == "__main__":
    sys.exit(main())
