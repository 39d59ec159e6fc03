"""The configuration of supervised fine-tuning."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_tasks.config.base import Groups, TrainingConfig
from rlhf_tasks.config.models import ActorOnly, Role


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning on completion tokens, on all tokens, or on what the assistant says."""

    type: Literal["sft"] = "sft"
    groups: ClassVar[Groups] = {
        "Training": ("random_init",),
        "Loss": ("completion_only_loss", "assistant_only_loss"),
    }

    models: ActorOnly
    random_init: bool = Field(
        default=False, description="Start from random weights: models.actor needs only its configuration."
    )
    completion_only_loss: bool = Field(
        default=True, description="Learn the completion (of messages: the last one) only; false: all tokens."
    )
    assistant_only_loss: bool = Field(
        default=False, description="Learn every message of the assistant in a conversation, and nothing else."
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
