"""The configuration of DPO."""

from typing import ClassVar, Literal

from pydantic import Field

from rlhf_tasks.algorithms.shared.preference_config import PreferenceConfig
from rlhf_tasks.config.base import Groups
from rlhf_tasks.config.settings import Pair

LossType = Literal["sigmoid", "ipo", "hinge"]


class DPOConfig(PreferenceConfig):
    """Direct preference optimisation (arXiv:2305.18290) on pairs of answers, without a reward model."""

    type: Literal["dpo"] = "dpo"
    groups: ClassVar[Groups] = {"Loss": ("loss_type", "label_smoothing")}
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "label_smoothing",
            "loss_type",
            "{first} has no meaning for {second}. Set it to 0 or choose loss_type: sigmoid.",
            lambda config: config.label_smoothing and config.loss_type != "sigmoid",
        ),
    )

    loss_type: LossType = Field(
        default="sigmoid", description="sigmoid (DPO), ipo (squared error), or hinge (SLiC)."
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Share of pairs whose label is taken to be wrong (sigmoid only).",
    )
