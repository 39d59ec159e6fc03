"""The loop of the HybridFlow guide (arXiv:2409.19256, figure 6) in our words, with resource pools.

    python -m prefect_rlhf.deployments.examples.own_loop runs/own-loop [--placement together|apart]

A driver's calls stand one below the other; each runs where its pool says. What a driver computes between them,
advantages, is a call too: it runs no model, and has all values on one rank. To read a tensor here is refused. What
depends on what was measured is decided by metrics that journals have, and so the same when a run is resumed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import cyclopts
from pydantic import Field

from prefect_rlhf import train
from prefect_rlhf.deployments.examples.guessing import games, write_model
from prefect_rlhf.flows.demo import write_jsonl
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import PROMPT_KEYS, SEQUENCES, Handle, Models, traced
from prefect_rlhf.rlhf_tasks.data.rows import PromptExample, prompt_example

NAME = "prefect_rlhf.deployments.examples.own_loop"

POOLS: dict[str, dict[str, Any]] = {
    "together": {"all": {"devices": "any 1", "calls": ["actor", "ref", "critic"]}},
    "apart": {
        "policy": {"devices": "any 1", "calls": ["actor", "ref"]},
        "value": {"devices": "any 1", "calls": ["critic"]},
    },
}
"""Placement -> its pools: named sets of devices, which the planner takes from the cluster."""


class OwnLoopConfig(PPOConfig):
    """PPO by a loop of one's own."""

    type: Literal["prefect_rlhf.deployments.examples.own_loop"] = NAME  # pyright: ignore[reportIncompatibleVariableOverride]
    most_kl: float = Field(default=10.0, gt=0, description="KL per sequence, in nats, that ends the run.")


def drifted(before: float, metrics: Mapping[str, float], most_kl: float) -> float:
    """1 where the policy has left the reference too far: the iteration is the last one."""
    return float(metrics["kl"] > most_kl)


@traced(PROMPT_KEYS)
def loop(models: Models, prompts: Handle, config: OwnLoopConfig) -> None:
    """Generate; log-probabilities, values and scores; advantages; two updates."""
    batch = models.actor.generate(prompts.repeat(config.group_size))
    batch |= models.ref.logprobs(batch)
    batch |= models.critic.inference(batch.select(*SEQUENCES), ("values",))
    batch |= models.reward.score(batch)
    seen = (*SEQUENCES, "old_logprobs", "ref_logprobs", "values", "scores")
    estimated = models.critic.compute(batch.select(*seen), ("advantages", "returns"), name="advantages")
    estimated.decide("stop", drifted, most_kl=config.most_kl)
    batch |= estimated
    models.actor.train(batch.select(*SEQUENCES, "old_logprobs", "advantages"))
    models.critic.train(batch.select(*SEQUENCES, "values", "returns"))


ALGORITHM = Algorithm(
    config=OwnLoopConfig,
    graph=loop,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions=f"{NAME}_functions",
)


def document_of(
    folder: Path, placement: Literal["together", "apart"] = "apart", iterations: int = 20
) -> dict[str, Any]:
    """The configuration of a run on the model and rows that `run` writes: answers are to have many twos."""
    return {
        "type": NAME,
        "models": {"actor": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl")},
        "rewards": [{"function": "prefect_rlhf.deployments.examples.own_loop_functions:twos"}],
        "sampling": {"max_completion_length": 8},
        "optimizer": {"learning_rate": 1e-3},
        "batch_size": 16,
        "num_mini_batches": 2,
        "total_iterations": iterations,
        "plan": "auto",
        "planning": {"pools": POOLS[placement], "time_limit_s": 2},
        "cluster": {"devices_per_host": len(POOLS[placement])},
        "output_dir": str(folder),
    }


def run(
    folder: Path,
    placement: Literal["together", "apart"] = "apart",
    iterations: int = 20,
    seed: int = 0,
) -> None:
    """Write a tiny model and prompts, and train."""
    write_model(folder / "model", seed)
    rows = games(seed)
    write_jsonl(folder / "train.jsonl", [next(rows) for _ in range(64)])
    result = train({**document_of(folder, placement, iterations), "seed": seed})
    print(f"reward {result.metrics[0]['reward']:.3f} -> {result.metrics[-1]['reward']:.3f}: {result.model}")


if __name__ == "__main__":
    cyclopts.run(run)
