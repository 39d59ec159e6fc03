"""The configuration of GRPO."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_tasks.algorithms.shared.policy_config import CriticFreeConfig
from rlhf_tasks.config.base import Groups, SamplesGroups
from rlhf_tasks.config.settings import MOST_SEQS


class GRPOConfig(CriticFreeConfig, SamplesGroups):
    """Group-relative policy optimisation (arXiv:2402.03300): a response counts by its score relative to its group."""

    type: Literal["grpo"] = "grpo"
    groups: ClassVar[Groups] = {
        "Score": ("overlong_buffer", "overlong_penalty"),
        "Advantages": ("scale_rewards", "filter_groups", "max_rounds"),
        "Loss": ("loss_type", "importance_sampling_level", "delta"),
    }

    num_generations: int = Field(
        default=8, ge=2, le=MOST_SEQS, description="Samples per prompt, which form a group."
    )
    beta: float = Field(
        default=0.0,
        ge=0,
        description="Factor of the KL divergence from the reference (k3, in the loss); 0: no reference model.",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group", description="Whose standard deviation divides a score less its group's mean."
    )
    filter_groups: bool = Field(
        default=False,
        description="Groups of equal scores (before overlong_penalty) leave the batch: loss and denominators.",
    )
    max_rounds: int = Field(
        default=1,
        gt=0,
        le=16,
        description="Most rounds of batch_size samples until enough groups differ to fill the batch (filter_groups).",
    )
    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"] = Field(
        default="grpo",
        description="Mean over each response, then over responses (grpo); over all tokens (dapo); sum over tokens by "
        "the most possible (dr_grpo); over all tokens, with a bounded weight instead of a clipped ratio (cispo).",
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        default="token", description="Policy ratio per token, or the geometric mean over a response (GSPO)."
    )
    delta: float | None = Field(
        default=None,
        gt=1,
        description="Policy ratio above which a token with a negative advantage costs no more; default: none.",
    )
    overlong_buffer: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of max_completion_length, at its end, over which a length penalty grows; default: none.",
    )
    overlong_penalty: float = Field(
        default=1.0, gt=0, description="What the longest response loses of its score (with overlong_buffer)."
    )

    @model_validator(mode="after")
    def _rounds_have_a_reason(self) -> Self:
        if self.max_rounds > 1 and not self.filter_groups:
            raise ValueError(
                f"max_rounds={self.max_rounds} samples further groups for those that filter_groups drops. "
                "Set filter_groups: true, or max_rounds: 1."
            )
        if self.max_rounds > 1 and self.chunks > 1:
            raise ValueError(
                f"max_rounds={self.max_rounds} cuts generation into rounds, and chunks={self.chunks} into parts. "
                "Leave one of them at 1."
            )
        return self

    @model_validator(mode="after")
    def _rounds_are_not_drawn_ahead(self) -> Self:
        if self.max_rounds > 1 and self.staleness:
            raise ValueError(
                f"staleness={self.staleness} samples ahead of scoring, but max_rounds={self.max_rounds} waits for "
                "the scores of each round before the next. Set one of them to its default."
            )
        if self.max_rounds > 1 and self.sampling.segment_tokens is not None:
            raise ValueError(
                f"sampling.segment_tokens={self.sampling.segment_tokens} leaves samples for later iterations, but "
                f"max_rounds={self.max_rounds} fills a batch at once. Leave one of them out."
            )
        return self

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if self.delta is not None and self.loss_type == "cispo":
            raise ValueError(
                "delta bounds a clipped ratio, which loss_type=cispo does not have. Leave it out."
            )
        if self.delta is not None and self.delta <= 1 + self.high:
            raise ValueError(
                f"delta={self.delta:g} must exceed the ratio's upper bound 1 + {self.high:g}. Make it larger."
            )
        return self
