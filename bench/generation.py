"""Generation with long tails beside its work bound, and prompts that a group shares, on the CPU.

    python -m bench.generation [--sequences 256] [--median 24] [--rounds 3]
    python -m bench.generation --beside vllm [--models tiny small smollm2] [--dtypes float32 bfloat16] [--rounds 5]

A Llama of 5M parameters, float32, one thread, one rank. The lengths of the responses are lognormal: their 99th
percentile is ten times the median, the longest are cut at 16 medians. They are forced: a sequence draws the stop id
at its last token, and never before.

    slots    sequences that the cache has room for, if all are as long as they may be
    steps    decode steps that were computed; the bound is the tokens of all responses divided by the slots, or the
             longest response where that is more. Shorter sequences take less room, so there can be fewer steps
    rows     tokens that were computed in all steps, divided by the tokens of the responses
    seconds  of process CPU time, medians over the rounds; the bound is what the same slots take for as many tokens of
             responses that all have the mean length, prompts included

Then as many short responses to prompts of their own, and to a prompt for each eight.

Then the memory of the cache where responses have lengths of 1 : 10, and each eight share a prompt: `slots` times the
longest sequence, as it would be without blocks; the blocks that it has; of these, the most that were in use; and by
how much the process grew.

`--beside vllm` compares with vLLM in a process of its own, in turn, each with `--threads` threads: response tokens
per second, the ratio of each round (above 1 where ours is faster), and the seconds in which vLLM takes the weights.
Ours packs them in each draw, vLLM as it takes them: the last ratio counts both, as an iteration does.
64 responses (smollm2: 16) of exactly 64 tokens to 8 (4) prompts of 32, random weights; as in training, what vLLM
keeps of prompts goes with each version. Seconds are of the wall; of CPU time beside them, all threads together.
"""

import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.harness import Spread, cpu_s, in_turn, options
from bench.memory import peak_of
from bench.models import CPU, batch_of, build_engine, random_tokens, sizes, write_model
from prefect_rlhf.rlhf_tasks.config.generation import default_python
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate import slots
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import generate
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import BuiltIn, Generator, Order, Terms
from prefect_rlhf.rlhf_tasks.parallel.generate.kv_cache import KVCache
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import Draw, SamplingParams, sample, uniform
from prefect_rlhf.rlhf_tasks.parallel.generate.vllm_process import Vllm
from prefect_rlhf.rlhf_tasks.parallel.layout.work import BLOCK, slots_of
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine

CONFIG = LlamaConfig(**sizes(256, 4, 4, 4, 1024, 4096))
PROMPT = 32
TAIL = 0.99  # of the lengths' logarithm: exp(2.326 x .99) is ten
CUT = 16  # medians
STOP = 7


class Alone:
    """The process groups of a world of one rank, which needs none."""

    rank, device = 0, CPU

    def __getitem__(self, devices: Iterable[int]) -> None:
        return None


def lengths_of(sequences: int, median: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(sequences, generator=generator) * TAIL).exp() * median
    return drawn.round().clamp(1, CUT * median).int().tolist()


def prompts_of(sequences: int, group: int = 1) -> SampleBatch:
    prompts = random_tokens([PROMPT] * (sequences // group), CONFIG.vocab_size)
    return batch_of("prompt_ids", [prompt for prompt in prompts for _ in range(group)])


@contextmanager
def forced(lengths: Sequence[int]) -> Iterator[None]:
    """Sample i draws the stop id at token lengths[i]. The random number of that token is known, and no other's."""
    last = torch.tensor([PROMPT + length - 1 for length in lengths])
    ends = uniform(0, "rollout", 0, torch.arange(len(lengths)), last)

    def drawn(
        logits: Tensor, params: SamplingParams, uniforms: Tensor, new_tokens: Tensor, *more: Any
    ) -> Draw:
        free = sample(logits, params, uniforms, new_tokens, *more)
        others = torch.where(free.tokens == STOP, STOP + 1, free.tokens)
        return free._replace(tokens=torch.where(torch.isin(uniforms, ends), STOP, others))

    with patch.object(slots, "sample", drawn):
        yield


class Work:
    """What a generation of responses of given lengths took: seconds, decode steps, tokens computed in them."""

    def __init__(
        self, engine: Engine, prompts: SampleBatch, lengths: Sequence[int], micro_batches: int
    ) -> None:
        self.steps = self.rows = self.blocks = self.of_all = 0
        advance = KVCache.advance

        def counted(cache: KVCache) -> None:
            self.steps, self.rows = self.steps + 1, self.rows + cache.rows
            self.blocks, self.of_all = cache.blocks.peak, cache.blocks.count
            advance(cache)

        params = SamplingParams(max_new_tokens=max(lengths), stop_ids=(STOP,))
        started = time.process_time()
        with forced(lengths), patch.object(KVCache, "advance", counted):
            samples = generate(engine, prompts, params, seed=0, iteration=0, micro_batches=micro_batches)
        self.seconds = time.process_time() - started
        assert samples is not None
        assert [n - PROMPT for n in samples["input_ids"].lengths] == list(lengths)


def tails(engine: Engine, sequences: int, median: int, rounds: int) -> None:
    lengths = lengths_of(sequences, median)
    mean = round(sum(lengths) / sequences)
    print(
        f"{sequences} responses, {sum(lengths)} tokens: median {median}, mean {mean}, longest {max(lengths)}"
    )
    print(
        f"{'slots':>6} {'steps':>6} {'bound':>6} {'ratio':>6} {'rows':>6} {'seconds':>8} {'bound':>6} {'ratio':>6}"
    )
    for micro_batches in (1, 2, 4, 8, 16):
        at_once = -(-sequences // micro_batches)
        ways = {
            "tails": partial(Work, engine, prompts_of(sequences), lengths, micro_batches),
            "even": partial(Work, engine, prompts_of(at_once), [mean] * at_once, 1),
        }
        took = in_turn(ways, rounds)
        seconds, even_s = (Spread.of([work.seconds for work in took[way]]).median for way in ways)
        bound_s = even_s * sum(lengths) / (mean * at_once)
        bound = max(sum(lengths) / at_once, max(lengths))
        print(
            f"{at_once:6} {took['tails'][0].steps:6} {bound:6.0f} {took['tails'][0].steps / bound:6.2f} "
            f"{took['tails'][0].rows / sum(lengths):6.2f} {seconds:8.2f} {bound_s:6.2f} {seconds / bound_s:6.2f}"
        )


def shared(engine: Engine, sequences: int, rounds: int, group: int = 8) -> None:
    """Groups that share a prompt beside as many prompts, with short responses."""
    lengths = [8] * sequences
    ways = {
        name: partial(Work, engine, prompts_of(sequences, size), lengths, 1)
        for name, size in (("prompts of their own", 1), (f"a prompt for {group}", group))
    }
    for name, took in in_turn(ways, rounds).items():
        print(f"{sequences} responses of 8 tokens, {name}: {Spread.of([one.seconds for one in took])} s")


def memory(engine: Engine, sequences: int, shortest: int, group: int = 8) -> None:
    """The blocks of the cache beside slots, where the longest response has ten times the tokens of the shortest."""
    steps = torch.linspace(0, 1, sequences)[
        torch.randperm(sequences, generator=torch.Generator().manual_seed(0))
    ]
    lengths = (10**steps * shortest).round().int().tolist()
    of_token = 2 * engine.layout.shape.hidden * engine.layout.shape.layers * 4
    columns = PROMPT + max(lengths) - 1
    print(
        f"{sequences} responses of {min(lengths)} to {max(lengths)} tokens, {group} to a prompt; MB of the cache"
    )
    print(
        f"{'slots':>6} {'x longest':>10} {'blocks':>8} {'in use':>8} {'process':>8} {'steps':>6} {'seconds':>8}"
    )
    for micro_batches in (1, 2, 4, 8):
        slots, works = slots_of(sequences, micro_batches), list[Work]()
        once = partial(Work, engine, prompts_of(sequences, group), lengths, micro_batches)
        grown = peak_of(lambda once=once, works=works: works.append(once()))
        counted = (
            slots * columns * of_token,
            works[0].of_all * BLOCK * of_token,
            works[0].blocks * BLOCK * of_token,
        )
        each = [f"{size_bytes / 1e6:8.1f}" for size_bytes in (*counted, grown)]
        print(f"{slots:6}   {' '.join(each)} {works[0].steps:6} {works[0].seconds:8.2f}")


NEW = 64
SHAPES = {
    "tiny": sizes(256, 4, 4, 4, 1024, 4096),
    "small": sizes(512, 7, 8, 8, 1408, 4096),
    "smollm2": sizes(576, 30, 9, 3, 1536, 49152),
}


class Turn(NamedTuple):
    """A generation by one engine, in tokens of responses per second, and the seconds before it in which it took the
    weights. per_cpu_s: the same per second of CPU time, of this process and all below. in_all: per second of both"""

    per_s: float
    per_cpu_s: float
    take_s: float
    in_all: float


def turn(generator: Generator, engine: Engine, prompts: SampleBatch) -> Turn:
    engine.version += 1
    began_s = time.perf_counter()
    generator.take(engine)
    taken_s, used_s = time.perf_counter(), cpu_s(os.getpid())
    samples = generator.draw(prompts, Order(SamplingParams(max_new_tokens=NEW), 0, engine.version))
    drawn_s, used_s = time.perf_counter() - taken_s, cpu_s(os.getpid()) - used_s
    assert samples is not None
    assert int(samples["response_mask"].values.sum()) == NEW * len(prompts)
    tokens, take_s = NEW * len(prompts), taken_s - began_s
    return Turn(tokens / drawn_s, tokens / used_s, take_s, tokens / (take_s + drawn_s))


def beside(python: str, models: Sequence[str], dtypes: Sequence[str], rounds: int) -> None:
    """Our engine and vLLM in turn."""
    columns = "".join(f" {what:>24}" for what in ("ratio", "ratio, CPU time", "taken in s", "ratio, both"))
    print(f"{'':18} {'ours':>26} {'vLLM':>26}{columns}")
    for name in models:
        n, group = (16, 4) if name == "smollm2" else (64, 8)
        for dtype in dtypes:
            torch.manual_seed(0)
            whole = LlamaForCausalLM(LlamaConfig(**SHAPES[name])).to(getattr(torch, dtype))
            groups: Any = Alone()
            with tempfile.TemporaryDirectory(prefix="beside-vllm-") as folder:
                write_model(whole, Path(folder))
                terms = Terms(
                    folder, folder, dtype, None, PROMPT + NEW, 4.0, {"python": python, "kv_bytes": 1 << 30}
                )
                engine, vllm = build_engine(whole, groups), Vllm(terms)
                prompts = prompts_of(n, group)
                try:
                    ways = {
                        way: partial(turn, generator, engine, prompts)
                        for way, generator in (("ours", BuiltIn()), ("vLLM", vllm))
                    }
                    took = in_turn(ways, rounds, warm_up=1)
                finally:
                    vllm.close()
            per_s = [Spread.of([one.per_s for one in took[way]]) for way in ways]
            pairs = list(zip(took["ours"], took["vLLM"], strict=True))
            by_wall = Spread.of([ours.per_s / theirs.per_s for ours, theirs in pairs])
            by_cpu = Spread.of([ours.per_cpu_s / theirs.per_cpu_s for ours, theirs in pairs])
            taken = Spread.of([one.take_s for one in took["vLLM"]])
            in_all = Spread.of([ours.in_all / theirs.in_all for ours, theirs in pairs])
            figures = "".join(f" {figure!s:>26}" for figure in per_s)
            figures += "".join(f" {figure!s:>24}" for figure in (by_wall, by_cpu, taken, in_all))
            print(f"{f'{name} {dtype}':18}{figures}", flush=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--beside", choices=["vllm"])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", default=default_python(), help="of the environment that has vLLM")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--median", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.beside:
        beside(given.python, given.models, given.dtypes, given.rounds)
        return
    torch.manual_seed(0)
    groups: Any = Alone()
    engine = build_engine(LlamaForCausalLM(CONFIG), groups)
    tails(engine, given.sequences, given.median, given.rounds)
    shared(engine, given.sequences, given.rounds)
    memory(engine, given.sequences, given.median)


if __name__ == "__main__":
    main()
