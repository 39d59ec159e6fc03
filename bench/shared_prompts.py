"""A forward pass and a training step on groups of 8 samples of a prompt, with the prompt computed once and 8 times.

    python -m bench.shared_prompts [--rounds 5] [--tokens 32 128 512] [--dtype float32] [--out FILE.json]

One process, one thread, the 25M Llama of `bench.engine`. Prompts and answers have equally many tokens; 4,096 answer
tokens a pass, of which alone the head computes the rows. Without sharing, lengths are the same, but no two prompts
begin with the same token. Every round runs every row once; a row's figure is its median in CPU-seconds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.engine import CONFIG, CPU, LEARNING_RATE, VOCAB, build_engine
from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.comm.groups import ProcessGroups, join_world, leave_world
from rlhf_tasks.parallel.layout.topology import ParallelStrategy
from rlhf_tasks.parallel.train.engine import Engine, LossTerms

GROUP, ANSWER_TOKENS = 8, 4096


def batch_of(tokens: int, shared: bool) -> SampleBatch:
    """Groups of samples with `tokens` prompt and `tokens` answer tokens."""
    generator = torch.Generator().manual_seed(1)
    n = max(GROUP, ANSWER_TOKENS // tokens // GROUP * GROUP)
    prompts = torch.randint(0, VOCAB, (n // GROUP, tokens), generator=generator).repeat_interleave(GROUP, 0)
    if not shared:
        prompts[:, 0] = torch.arange(n)
    answers = torch.randint(0, VOCAB, (n, tokens), generator=generator)
    counted = torch.cat([torch.zeros_like(prompts), torch.ones_like(answers)], 1).bool()
    lengths = (2 * tokens,) * n
    rows = {"input_ids": torch.cat([prompts, answers], 1), "counted": counted}
    return SampleBatch(tuple(range(n)), {key: Packed(x.flatten(), lengths) for key, x in rows.items()})


def passes(engine: Engine, batch: SampleBatch) -> dict[str, Callable[[], object]]:
    """A forward pass and a training step in one micro-batch."""

    def logprobs(logits: Tensor, micro: MicroBatch) -> Tensor:
        return engine.logprobs(logits, micro)

    def loss(logits: Tensor, micro: MicroBatch) -> LossTerms:
        return LossTerms(-engine.logprobs(logits, micro).sum(), {})

    return {
        "forward": lambda: engine.inference(batch, logprobs, 1, "counted"),
        "training": lambda: engine.train_step(
            batch, loss, float(ANSWER_TOKENS), 1, LEARNING_RATE, counted="counted"
        ),
    }


def measure(rounds: int, sizes: list[int], dtype: torch.dtype) -> dict[str, list[float]]:
    """Row -> CPU-seconds of each round, after one round that does not count."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    join_world(dist.HashStore(), 0, 1, timeout_s=600.0, device=CPU)
    groups = ProcessGroups([(0,)], 600.0, CPU)
    model = AutoModelForCausalLM.from_config(CONFIG).eval()
    engine = build_engine(model, ParallelStrategy(), groups, dtype)
    rows = {
        f"{name} {tokens} {'shared' if shared else 'repeated'}": work
        for tokens in sizes
        for shared in (True, False)
        for name, work in passes(engine, batch_of(tokens, shared)).items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for round_ in range(rounds + 1):
        for name, work in rows.items():
            start = time.process_time()
            work()
            if round_:
                seconds[name].append(time.process_time() - start)
    leave_world()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128, 512], help="of prompt and answer")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    given = parser.parse_args()
    seconds = measure(given.rounds, given.tokens, getattr(torch, given.dtype))
    print(f"{'CPU-seconds':<16}{'shared':>9}{'repeated':>10}{'ratio':>8}")
    for tokens in given.tokens:
        for name in ("forward", "training"):
            once, each = (
                statistics.median(seconds[f"{name} {tokens} {how}"]) for how in ("shared", "repeated")
            )
            print(f"{name:<9}{tokens:>7}{once:9.3f}{each:10.3f}{each / once:8.2f}")
    if given.out is not None:
        given.out.write_text(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    main()
