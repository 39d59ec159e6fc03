"""The configuration of reward modelling."""

from typing import ClassVar, Literal

from pydantic import Field

from rlhf_tasks.config.base import Groups, TrainingConfig
from rlhf_tasks.config.models import ActorOnly, Role


class RewardModelConfig(TrainingConfig):
    """Trains a reward model on preference pairs (Bradley-Terry)."""

    type: Literal["reward_model"] = "reward_model"
    groups: ClassVar[Groups] = {"Training": ("center_rewards_coefficient",)}

    models: ActorOnly
    center_rewards_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Factor of the squared sum of a pair's scores in the loss, which keeps their mean at 0; 0: none.",
    )

    def roles(self) -> dict[str, Role]:
        """The one role that trains: a decoder with a scalar head."""
        return {"reward": Role.of(self.models.actor, "scalar", self.optimizer)}
