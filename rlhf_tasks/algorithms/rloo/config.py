"""The configuration of RLOO."""

from typing import ClassVar, Literal

from pydantic import Field

from rlhf_tasks.algorithms.shared.policy_config import CriticFreeConfig
from rlhf_tasks.config.base import Groups, SamplesGroups
from rlhf_tasks.config.settings import MOST_SEQS


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
        description="Factor of the KL divergence from the reference (k1, off the score); 0: no reference model.",
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        default="sequence", description="Policy ratio per token, or of the whole response."
    )
