"""Measures how a slow reward service with a long tail holds back an iteration: whole calls, `chunks`, each sample.

    python -m bench.readiness [--samples 64] [--generation-s 4] [--median-s 0.2] [--sigma 1.2] [--rounds 3]

The samples end evenly over the seconds of generation, which sleeps. A judge answers each after a time of its own,
drawn from a log-normal distribution; it takes all requests at once. The reward processes are the real ones, and the
seconds are those of the clock, from the beginning of generation to the last score.

    whole      one call, after generation
    chunks n   n parts; a rank judges one part while the next is generated, and the parts one after another
    sample     one call, but each sample is asked for as soon as it has ended (`RewardProcess.ask_early`)
    bound      what that would give without our processes
    ahead      with `staleness: 1` scoring runs beside the next iteration's generation: the longer of the two
"""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import NormalDist
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness import Spread, in_turn, options
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.system.counter_random import permutation
from prefect_rlhf.rlhf_tasks.user_code.forms import Answers
from prefect_rlhf.rlhf_tasks.user_code.rewards import RewardProcess

JUDGE = """
import asyncio
async def judge(completions, answer, **columns):
    await asyncio.sleep(float(answer[0]))
    return [1.0]
judge.answers_per_call = 1
"""
CHUNKS = (2, 4, 8)


def waits(samples: int, median_s: float, sigma: float, seed: int) -> list[float]:
    """The seconds of each sample: the quantiles of the distribution, in an order drawn from the seed."""
    drawn = NormalDist(math.log(median_s), sigma)
    quantiles = [math.exp(drawn.inv_cdf((place + 0.5) / samples)) for place in range(samples)]
    return [quantiles[place] for place in permutation(samples, seed, "waits", 0)]


def answers(some: list[float]) -> Answers:
    """A response for each wait."""
    n = len(some)
    return Answers(["p"] * n, ["c"] * n, [[0]] * n, {"answer": [str(wait) for wait in some]}, ["p"] * n)


def in_parts(
    judge: Callable[[Answers], "Future[Any]"], some: list[float], n: int, generation_s: float
) -> float:
    """Seconds of an iteration in n parts."""
    began, size = time.monotonic(), len(some) // n
    pending = []
    for part in range(n):
        time.sleep(generation_s / n)
        pending.append(judge(answers(some[part * size : (part + 1) * size])))
    for one in pending:
        one.result()
    return time.monotonic() - began


def by_sample(process: RewardProcess, some: list[float], generation_s: float) -> float:
    """Seconds of an iteration whose samples are asked for as soon as each has ended."""
    began_s = time.monotonic()
    for place, wait in enumerate(some):
        time.sleep(max(began_s + generation_s * (place + 1) / len(some) - time.monotonic(), 0.0))
        process.ask_early(answers([wait]), [place])
    judged = process.submit(answers(some)).result()
    assert judged.early == len(some), "all were asked for before"
    return time.monotonic() - began_s


def bound(some: list[float], generation_s: float) -> float:
    """The same where a sample is judged by waiting for its seconds."""

    async def judged(place: int, wait: float) -> None:
        await asyncio.sleep(generation_s * (place + 1) / len(some))
        await asyncio.sleep(wait)

    async def every() -> None:
        await asyncio.gather(*(judged(place, wait) for place, wait in enumerate(some)))

    began = time.monotonic()
    asyncio.run(every())
    return time.monotonic() - began


def main() -> None:
    """Print a line for each way."""
    parser = options(__doc__)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--generation-s", type=float, default=4.0)
    parser.add_argument("--median-s", type=float, default=0.2)
    parser.add_argument("--sigma", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with TemporaryDirectory() as folder:
        file = Path(folder, "judge.py")
        file.write_text(JUDGE)
        config = make_config(
            {
                "type": "grpo",
                "models": {"actor": "a"},
                "data": {"train": "d"},
                "sampling": {"max_completion_length": 1},
                "rewards": [{"function": f"{file}:judge", "concurrency": chosen.samples}],
                "reward_timeout_s": 600,
                "total_iterations": 1,
            }
        )
        process = RewardProcess(config)
        process.submit(answers([0.0])).result()
        seeds = iter(range(10**6))

        def some() -> list[float]:
            return waits(chosen.samples, chosen.median_s, chosen.sigma, next(seeds) // (len(CHUNKS) + 3))

        ways: dict[str, Callable[[], float]] = {
            f"chunks {n}" if n > 1 else "whole": lambda n=n: in_parts(
                process.submit, some(), n, chosen.generation_s
            )
            for n in (1, *CHUNKS)
        }
        ways["sample"] = lambda: by_sample(process, some(), chosen.generation_s)
        ways["bound"] = lambda: bound(some(), chosen.generation_s)
        results = in_turn(ways, chosen.rounds)
        process.close()
    longest = max(waits(chosen.samples, chosen.median_s, chosen.sigma, 0))
    for way, seconds in results.items():
        print(f"{way:10}{Spread.of(seconds)} s")
    print(f"{'ahead':10}{max(chosen.generation_s, longest):.4g} s (the longest answer takes {longest:.4g} s)")


if __name__ == "__main__":
    main()
