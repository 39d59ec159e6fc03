"""REINFORCE leave-one-out."""

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
    traced,
)
from prefect_rlhf.rlhf_tasks.config.base import Groups
from prefect_rlhf.rlhf_tasks.config.sampling import SamplesGroups
from prefect_rlhf.rlhf_tasks.config.settings import MOST_SEQS
from prefect_rlhf.rlhf_tasks.data.rows import PromptExample, prompt_example


class RLOOConfig(CriticFreeConfig, SamplesGroups):
    """REINFORCE leave-one-out (arXiv:2402.14740): a response is compared with the mean of its group's others."""

    type: Literal["rloo"] = "rloo"
    groups: ClassVar[Groups] = {"Loss": ("importance_sampling_level",)}

    num_generations: int = Field(
        default=2, ge=2, le=MOST_SEQS, description="Samples per prompt, which form a group."
    )
    beta: float = Field(
        default=0.05,
        ge=0,
        description="Factor of the KL divergence from the reference (k1, subtracted from the score); "
        "0: no reference model.",
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        default="sequence", description="Policy ratio per token, or of the whole response."
    )


@traced(PROMPT_KEYS)
def graph(models: Models, prompts: Handle, config: PolicySizes) -> None:
    """actor generate; reward inference, and ref inference where beta > 0; actor train_step.

    A sequence's baseline is the mean score of the others of its group, so there is no critic.
    """
    models.actor.train(rollout(models, prompts, config).select(*learned(config)))


ALGORITHM = Algorithm(
    config=RLOOConfig,
    graph=graph,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="prefect_rlhf.rlhf_tasks.algorithms.rloo.functions",
)
