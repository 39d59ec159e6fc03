"""The dataflow graph of a rollout: generate, then score."""

from rlhf_tasks.algorithms.shared.rollout_calls import PROMPT_KEYS, RolloutSizes, generate_and_score
from rlhf_tasks.spec import ModelFunctionCall

DATASET_KEYS = PROMPT_KEYS


def graph(config: RolloutSizes) -> list[ModelFunctionCall]:
    """`actor_generate` and `reward_inference`. Without a reward model the reward call runs on the actor's mesh."""
    return generate_and_score(config)
