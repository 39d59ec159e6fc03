"""ReMax: REINFORCE with the score of the greedy response as baseline."""

from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.remax.config import ReMaxConfig
from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, learned, rollout, traced
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import (
    PROMPT_KEYS,
    SEQUENCES,
    PolicySizes,
    scored,
    scored_tokens,
)
from rlhf_tasks.data.rows import PromptExample, prompt_example


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


ALGORITHM = Algorithm(
    config=ReMaxConfig,
    graph=graph,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="rlhf_tasks.algorithms.remax.functions",
)
