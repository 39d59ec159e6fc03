"""The configuration of DPO."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_tasks.algorithms.shared.preference_config import PreferenceConfig
from rlhf_tasks.config.base import Groups

LossType = Literal["sigmoid", "ipo", "hinge"]


class DPOConfig(PreferenceConfig):
    """Direct preference optimisation (arXiv:2305.18290) on pairs of answers, without a reward model."""

    type: Literal["dpo"] = "dpo"
    groups: ClassVar[Groups] = {"Loss": ("loss_type", "label_smoothing")}

    loss_type: LossType = Field(
        default="sigmoid", description="sigmoid (DPO), ipo (squared error), or hinge (SLiC)."
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Share of pairs whose label is taken to be wrong (sigmoid only).",
    )

    @model_validator(mode="after")
    def _smooths_labels_of_the_sigmoid_loss(self) -> Self:
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ValueError(
                f"label_smoothing={self.label_smoothing:g} has no meaning for loss_type: {self.loss_type}. "
                "Set it to 0 or choose loss_type: sigmoid."
            )
        return self
