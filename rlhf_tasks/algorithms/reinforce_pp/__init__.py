"""REINFORCE++: globally whitened returns, without a critic."""

from typing import ClassVar, Literal

from pydantic import Field

from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import CriticFreeConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import (
    PROMPT_KEYS,
    Handle,
    Models,
    PolicySizes,
    learned,
    rollout,
    scored_tokens,
    traced,
)
from prefect_rlhf.rlhf_tasks.config.base import Groups
from prefect_rlhf.rlhf_tasks.config.sampling import SamplesGroups
from prefect_rlhf.rlhf_tasks.config.settings import Pair
from prefect_rlhf.rlhf_tasks.data.rows import PromptExample, prompt_example


class ReinforcePPConfig(CriticFreeConfig, SamplesGroups):
    """REINFORCE++ (arXiv:2501.03262): returns with a KL penalty, whitened over the whole batch."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    groups: ClassVar[Groups] = {"Advantages": ("gamma", "baseline")}
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "baseline",
            "num_generations",
            "{first} compares the samples of a prompt, but {second}. Choose at least 2.",
            lambda config: config.baseline == "group" and config.num_generations == 1,
        ),
    )

    beta: float = Field(
        default=0.01,
        ge=0,
        description="Factor of the KL divergence from the reference (k1 in the reward; with baseline k2 in the loss)"
        "; 0: no reference model.",
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="Discount per token.")
    baseline: Literal["none", "group"] = Field(
        default="none",
        description="What is subtracted from a score before whitening: the group's mean, or nothing.",
    )


@traced(PROMPT_KEYS)
def graph(models: Models, prompts: Handle, config: PolicySizes) -> None:
    """actor generate; reward inference, and ref inference where beta > 0; actor train_step.

    A token's advantage is its whitened return, so there is no critic.
    """
    models.actor.train(rollout(models, prompts, config).select(*learned(config, scored_tokens(config))))


ALGORITHM = Algorithm(
    config=ReinforcePPConfig,
    graph=graph,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="prefect_rlhf.rlhf_tasks.algorithms.reinforce_pp.functions",
)
