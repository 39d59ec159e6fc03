"""The configuration of REINFORCE++."""

from typing import ClassVar, Literal

from pydantic import Field

from rlhf_tasks.algorithms.shared.policy_config import CriticFreeConfig
from rlhf_tasks.config.base import Groups, SamplesGroups
from rlhf_tasks.config.settings import Pair


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
