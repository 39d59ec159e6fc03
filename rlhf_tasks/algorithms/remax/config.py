"""The configuration of ReMax."""

from typing import Literal

from pydantic import Field

from rlhf_tasks.algorithms.shared.policy_config import CriticFreeConfig


class ReMaxConfig(CriticFreeConfig):
    """ReMax (arXiv:2310.10505): a response's baseline is the score of the greedy response to the same prompt."""

    type: Literal["remax"] = "remax"
    beta: float = Field(
        default=0.05,
        ge=0,
        description="Factor of the KL divergence from the reference (k1, in the reward); 0: no reference model.",
    )
