"""The base of configurations of training runs against a reference. Torch-free."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from prefect_rlhf.rlhf_tasks.config.base import Groups
from prefect_rlhf.rlhf_tasks.config.settings import MOST_ITERATIONS, Pair
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig


class MovesReference(TrainingConfig):
    """The configuration of training runs against a reference, role `ref`, which may follow the actor: every
    `ref_model_sync_steps` iterations it becomes alpha * actor + (1 - alpha) * reference (TR-DPO, arXiv:2404.09656).
    """

    groups: ClassVar[Groups] = {
        "Reference": ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
    }
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "sync_ref_model",
            "beta",
            "{first}: the run has no reference, since {second}. Raise beta or leave out sync_ref_model.",
            lambda config: config.sync_ref_model and "ref" not in config.roles(),
        ),
        Pair(
            "sync_ref_model",
            "lora",
            "{first}: with {second} the reference is the model without the adapters, which does not change. Leave "
            "out one of them.",
        ),
        Pair(
            "ref_model_sync_steps",
            "total_iterations",
            "{first} is more than {second}: the reference would never change. Lower it.",
            lambda config: config.sync_ref_model and config.ref_model_sync_steps > config.total_iterations,
        ),
    )

    sync_ref_model: bool = Field(
        default=False, description="The reference follows the actor; default: it stays as it began."
    )
    ref_model_mixup_alpha: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="The actor's share of a reference that follows it; 1: the actor itself.",
    )
    ref_model_sync_steps: int = Field(
        default=512,
        gt=0,
        le=MOST_ITERATIONS,
        description="Iterations from one change of the reference to the next.",
    )

    @property
    def follows(self) -> Mapping[str, str]:
        return {"ref": "actor"} if self.sync_ref_model else {}

    def syncs_after(self, iteration: int) -> bool:
        """Whether the reference changes at the end of an iteration, counted from 0."""
        return (iteration + 1) % self.ref_model_sync_steps == 0
