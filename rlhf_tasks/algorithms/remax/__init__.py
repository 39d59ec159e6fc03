"""ReMax: REINFORCE with the score of the greedy response as baseline."""

from typing import Literal

from pydantic import Field

from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import CriticFreeConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import (
    PROMPT_KEYS,
    SEQUENCES,
    Handle,
    Models,
    PolicySizes,
    learned,
    rollout,
    scored,
    scored_tokens,
    traced,
)
from prefect_rlhf.rlhf_tasks.data.rows import PromptExample, prompt_example


class ReMaxConfig(CriticFreeConfig):
    """ReMax (arXiv:2310.10505): a response's baseline is the score of the greedy response to the same prompt."""

    type: Literal["remax"] = "remax"
    beta: float = Field(
        default=0.05,
        ge=0,
        description="Factor of the KL divergence from the reference (k1, in the reward); 0: no reference model.",
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


ALGORITHM = Algorithm(
    config=ReMaxConfig,
    graph=graph,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="prefect_rlhf.rlhf_tasks.algorithms.remax.functions",
)
