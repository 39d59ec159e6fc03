"""The dataflow graph of ReMax: two generations and two reward calls."""

from rlhf_tasks.algorithms.shared.graphs.policy_program import learned, rollout
from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import (
    PROMPT_KEYS,
    SEQUENCES,
    PolicySizes,
    scored,
    scored_tokens,
)


@traced(PROMPT_KEYS)
def graph(models: Models, prompts: Handle, config: PolicySizes) -> None:
    """actor generate, sampled and greedy; reward inference on both, and ref inference where beta > 0; actor
    train_step."""
    samples = rollout(models, prompts, config)
    greedy = models.actor.generate(
        prompts.repeat(config.group_size), (*SEQUENCES, "truncated"), prefix="greedy_", name="greedy_generate"
    )
    greedy_scores = models.reward.score(greedy, scored(config), prefix="greedy_")
    compared = (*scored_tokens(config), *greedy_scores.keys)
    models.actor.train((samples | greedy_scores).select(*learned(config, compared)))
