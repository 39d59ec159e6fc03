"""The configuration of GRPO: enough to draw and to plan it."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_tasks.config.base import Groups, Samples, TrainingConfig, refuse_split_groups
from rlhf_tasks.config.sections import MOST_SEQS, GRPOModels, RewardFunction, Role


class GRPOConfig(Samples, TrainingConfig):
    """Group-relative policy optimisation (arXiv:2402.03300): the settings that its graph and its plan depend on."""

    type: Literal["grpo"] = "grpo"
    groups: ClassVar[Groups] = {"": ("rewards",), "Batch": ("num_generations",)}

    models: GRPOModels
    rewards: tuple[RewardFunction, ...] = Field(
        default=(), description="Python rewards, summed with weights."
    )
    num_generations: int = Field(
        default=8, gt=1, le=MOST_SEQS, description="Samples per prompt, which form a group."
    )

    def roles(self) -> dict[str, Role]:
        """Actor, ref, and reward where there is a reward model."""
        models = self.models
        roles = {
            "actor": Role.of(models.actor, "lm", self.optimizer),
            "ref": Role.of(models.ref or models.actor, "lm"),
        }
        if models.reward is not None:
            roles["reward"] = Role.of(models.reward, "scalar")
        return roles

    @model_validator(mode="after")
    def _batch_holds_whole_groups(self) -> Self:
        refuse_split_groups(self.num_generations, self.batch_size)
        return self
