"""Rollout: samples from a model and scores the samples."""

from typing import Literal

from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import PROMPT_KEYS, Handle, Models, RolloutSizes, traced
from prefect_rlhf.rlhf_tasks.config.sampling import OnePass
from prefect_rlhf.rlhf_tasks.data.rows import PromptExample, prompt_example


class RolloutConfig(OnePass):
    """Samples from a model, which are scored and written as JSONL: all rows once, in file order."""

    type: Literal["rollout"] = "rollout"


DATASET_KEYS = PROMPT_KEYS


@traced(DATASET_KEYS)
def graph(models: Models, prompts: Handle, config: RolloutSizes) -> None:
    """`actor_generate` and `reward_inference`. Without a reward model the reward call runs on the actor's mesh."""
    models.reward.score(models.actor.generate(prompts.repeat(config.group_size)))


ALGORITHM = Algorithm(
    config=RolloutConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="prefect_rlhf.rlhf_tasks.algorithms.rollout.functions",
)
