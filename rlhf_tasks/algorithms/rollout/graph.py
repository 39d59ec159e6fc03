"""The dataflow graph of a rollout: generate, then score. Evaluation and sampling use it."""

from rlhf_tasks.algorithms.shared.rollout_calls import PROMPT_KEYS, RolloutSizes, generate_and_score
from rlhf_tasks.spec import ModelFunctionCall

DATASET_KEYS = PROMPT_KEYS


def graph(config: RolloutSizes) -> list[ModelFunctionCall]:
    """The calls `actor_generate` and `reward_inference` of PPO; `scoring_role` is the actor without a reward
    model."""
    return generate_and_score(config)
