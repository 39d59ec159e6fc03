"""Compares the demo's PPO with baselines that use the same CPU seconds, and with the other algorithms.

    python -m bench.learning [--seeds 0 1 2] [--algorithms grpo ...] [--iterations N] [--folder runs/learning]
                             [--json FILE]

All rows start from the same SFT model. Their result is the greedy exact-match accuracy on 500 held-out words:

    ppo                  verifier and reward model, six calls (the demo)
    continued sft        SFT continued on the same sloppy demonstrations
    rejection sampling   SFT on the policy's own samples that the verifier accepts
    reward model alone   PPO without the verifier

The two SFT rows get as many CPU seconds of the ranks as PPO, including sampling. The last row runs as many iterations
as PPO.

    grpo, dapo, ...      every other algorithm that learns from its own samples

These sample as many responses as PPO (ReMax's greedy ones count) and get the same scores. All but expert iteration
pass over a batch twice, as PPO does. Their rows also say how many tokens they have generated and how many CPU seconds
they took.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from distributed import Client
from prefect import flow

from bench.harness import options, write
from prefect_rlhf.flows.demo import write_jsonl
from prefect_rlhf.flows.pipeline import Demo, demo_at, make_models, measure
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.user_code.rewards import read_samples

SAMPLES_PER_PROMPT = 2
TWICE = {"num_iterations": 2}
"""Passes over an iteration's batch, as in the demo's PPO."""

GROUPED = {"num_generations": 8, **TWICE}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": GROUPED,
    "dr_grpo": GROUPED,
    "dapo": {**GROUPED, "filter_groups": 1},  # as many samples as the others
    "gspo": {
        **GROUPED,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
    },  # the paper's bounds are for responses of 1,000 tokens
    "cispo": GROUPED,
    "rloo": {**GROUPED, "beta": 0.02},
    "remax": {**TWICE, "beta": 0.02},
    "reinforce_pp": {**TWICE, "beta": 0.02},
    "expert_iteration": {"num_generations": 8, "min_score": 0.6},
}
"""Algorithm -> its fields beside those that it shares with PPO. A right answer scores at least 1 - 0.2 * 2 = 0.6."""

SHARED = (
    *("models", "data", "sampling", "rewards", "reward_model", "missing_eos_penalty", "batch_size"),
    *("num_mini_batches", "total_iterations", "optimizer", "seed", "output_dir", "cluster"),
)
"""The fields that these take from PPO's configuration."""


class CpuClock:
    """Measures the CPU seconds of the ranks."""

    def __init__(self, scheduler: str) -> None:
        with Client(scheduler, set_as_default=False) as client:
            pids: Any = client.run(os.getpid)
            found: Any = client.scheduler_info(n_workers=-1)
        names = {address: str(worker["name"]) for address, worker in found["workers"].items()}
        self._ranks = [
            psutil.Process(pid) for address, pid in pids.items() if names[address].startswith("rank")
        ]

    def now(self) -> float:
        return sum(sum(rank.cpu_times()[:2]) for rank in self._ranks)


async def reached(demo: Demo, clock: CpuClock, config: RunConfig, name: str) -> tuple[float, float]:
    """Accuracy of the model that a run makes, and its CPU seconds. name: of the evaluation"""
    before_s = clock.now()
    trained = await demo.run(config)
    used_s = clock.now() - before_s
    return await measure(demo, trained["model"], name), used_s


async def run_seed(
    demo: Demo, clock: CpuClock, algorithms: Sequence[str], iterations: int | None
) -> dict[str, Any]:
    """All rows of one seed. iterations: of PPO, where not the demo's."""
    policy = await make_models(demo)
    if iterations is not None:
        policy = policy.model_copy(update={"total_iterations": iterations})
    start = policy.roles()["actor"].folder
    row: dict[str, Any] = {"seed": demo.seed, "sft": await measure(demo, start, "before")}
    row["ppo"], budget_s = await reached(demo, clock, policy, "after")
    row |= {"cpu_s": budget_s, "ppo tokens": generated_tokens(demo, "ppo", policy)}
    for name in algorithms:
        config = same_samples(policy, name)
        row[name], row[f"{name} cpu_s"] = await reached(demo, clock, config, name)
        row[f"{name} tokens"] = generated_tokens(demo, name, config)
    row["continued sft"], row["continued sft cpu_s"] = await tune(
        demo, clock, start, "demonstrations", "continued", budget_s
    )
    row["rejection sampling"], row["rejection sampling cpu_s"] = await rejection(demo, clock, start, budget_s)
    alone = policy.model_dump()
    alone |= {"name": "alone", "rewards": (), "reward_model": {**alone["reward_model"], "weight": 1.0}}
    row["reward model alone"], row["reward model alone cpu_s"] = await reached(
        demo, clock, type(policy).model_validate(alone), "alone"
    )
    return row


def same_samples(policy: RunConfig, name: str) -> RunConfig:
    """The configuration of an algorithm that samples as many responses as PPO."""
    shared = {key: value for key, value in policy.model_dump(mode="json").items() if key in SHARED}
    shared["models"] = {role: shared["models"][role] for role in ("actor", "reward")}
    config = make_config({**shared, "type": name, "name": name, **ALGORITHMS[name]})
    generations = sum(call.kind == "generate" for call in algorithm(name).calls(config))
    fewer = max(1, config.total_iterations // generations)
    return config.model_copy(update={"total_iterations": fewer})


def generated_tokens(demo: Demo, run: str, config: RunConfig) -> int:
    """The tokens of all responses that a run has sampled."""
    lines = (demo.folder / "stages" / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    means = [
        value
        for line in lines
        for key, value in json.loads(line).items()
        if key.endswith("completions/mean_length")
    ]
    return round(sum(means) * config.batch_size)


async def rejection(demo: Demo, clock: CpuClock, start: str, budget_s: float) -> tuple[float, float]:
    """Accuracy and CPU seconds of SFT on verified samples: one round of sampling from the SFT model, then SFT."""
    before_s = clock.now()
    changes = {"data": {"train": "data/prompts.jsonl", "max_prompt_tokens": 16}, "models": {"actor": start}}
    config = demo.config(
        "pairs", "own-samples", num_generations=SAMPLES_PER_PROMPT, batch_size=2000, **changes
    )
    await demo.run(config)
    samples = read_samples(demo.folder / "stages" / "own-samples", 6000 * SAMPLES_PER_PROMPT)
    right = {(s["prompt"], s["completion"]) for s in samples if s["rewards"]["exact"] == 1}
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in sorted(right)]
    write_jsonl(demo.folder / "data" / "verified.jsonl", rows)
    left_s = budget_s - (clock.now() - before_s)
    accuracy, used_s = await tune(demo, clock, start, "verified", "rejection", left_s)
    return accuracy, used_s + budget_s - left_s


async def tune(
    demo: Demo, clock: CpuClock, start: str, data: str, name: str, budget_s: float
) -> tuple[float, float]:
    """SFT from a model on a data set for about `budget_s` CPU seconds. Returns accuracy and CPU seconds.

    One iteration is timed first, from which the number of iterations follows.
    """
    changes = {
        "models": {"actor": start},
        "random_init": False,
        "data": {"train": f"data/{data}.jsonl", "max_prompt_tokens": 32},
        "batch_size": 640,
        "num_mini_batches": 10,
    }
    before_s = clock.now()
    await demo.run(demo.config("sft", f"{name}-probe", total_iterations=1, **changes))
    iterations = max(1, round(budget_s / (clock.now() - before_s)))
    return await reached(demo, clock, demo.config("sft", name, total_iterations=iterations, **changes), name)


async def all_rows(
    folder: Path, seed: int, algorithms: Sequence[str], iterations: int | None
) -> dict[str, Any]:
    """All rows of one seed, with a new Prefect server and cluster."""
    with demo_at(folder, seed) as demo:

        @flow(
            name="bench-learning", persist_result=False
        )  # has no parameters, because Prefect would copy them
        async def one_seed() -> dict[str, Any]:
            return await run_seed(demo, CpuClock(demo.scheduler), algorithms, iterations)

        return await one_seed()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="*", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--iterations", type=int, help="of PPO; default: the demo's")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for seed in arguments.seeds:
        folder = arguments.folder / f"seed-{seed}"
        # An existing stage would cost no CPU seconds, but the budget is what PPO costs.
        folder.mkdir(parents=True)
        rows.append(asyncio.run(all_rows(folder, seed, arguments.algorithms, arguments.iterations)))
        print(yaml.safe_dump(rows[-1], sort_keys=False), flush=True)
    write(rows, arguments.json)


if __name__ == "__main__":
    main()
