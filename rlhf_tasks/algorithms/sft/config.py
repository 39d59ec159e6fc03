"""The configuration of supervised fine-tuning."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_tasks.config.base import Groups, TrainingConfig
from rlhf_tasks.config.sections import ActorOnly, Role


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning on completion tokens."""

    type: Literal["sft"] = "sft"
    groups: ClassVar[Groups] = {"Training": ("random_init",)}

    models: ActorOnly
    random_init: bool = Field(
        default=False, description="Start from random weights: models.actor needs only its configuration."
    )

    @model_validator(mode="after")
    def _adapts_a_model(self) -> Self:
        if self.random_init and self.lora is not None:
            raise ValueError(
                "lora trains adapters of a model that is there; random_init has none. Remove one."
            )
        return self

    def roles(self) -> dict[str, Role]:
        """The one role that trains."""
        return {
            "actor": Role.of(self.models.actor, "lm", self.optimizer)._replace(random_init=self.random_init)
        }
