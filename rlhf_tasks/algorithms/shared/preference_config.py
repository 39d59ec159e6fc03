"""What the configurations of algorithms have in common that learn from labelled answers against a reference."""

from typing import ClassVar

from pydantic import Field

from rlhf_tasks.config.base import Groups
from rlhf_tasks.config.models import ReferenceModels, Role
from rlhf_tasks.config.reference import MovesReference


class PreferenceConfig(MovesReference):
    """An actor is trained; a reference says how likely each answer was before."""

    groups: ClassVar[Groups] = {"Loss": ("beta",)}

    models: ReferenceModels
    beta: float = Field(
        default=0.1,
        gt=0,
        description="How strongly the actor is held to the reference: larger, closer to it.",
    )

    def roles(self) -> dict[str, Role]:
        """The actor, and the reference."""
        return {
            "actor": Role.of(self.models.actor, "lm", self.optimizer),
            "ref": Role.of(self.models.ref or self.models.actor, "lm"),
        }
