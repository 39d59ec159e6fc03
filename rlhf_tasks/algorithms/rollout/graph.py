"""The dataflow graph of a rollout: generate, then score."""

from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import PROMPT_KEYS, RolloutSizes

DATASET_KEYS = PROMPT_KEYS


@traced(DATASET_KEYS)
def graph(models: Models, prompts: Handle, config: RolloutSizes) -> None:
    """`actor_generate` and `reward_inference`. Without a reward model the reward call runs on the actor's mesh."""
    models.reward.score(models.actor.generate(prompts.repeat(config.group_size)))
