"""Direct preference optimisation: learns from pairs of answers, without a reward model."""

from typing import ClassVar, Literal

from pydantic import Field

from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import PreferenceConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import Handle, Models, traced
from prefect_rlhf.rlhf_tasks.config.base import Groups
from prefect_rlhf.rlhf_tasks.config.settings import Pair
from prefect_rlhf.rlhf_tasks.data.rows import PairExample, pair_example

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


DATASET_KEYS = ("chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask")
REF_LOGPS = ("ref_chosen_logps", "ref_rejected_logps")


@traced(DATASET_KEYS)
def graph(models: Models, pairs: Handle, config: object) -> None:
    """ref inference; actor train_step. A sample is a pair."""
    models.actor.train(pairs | models.ref.inference(pairs, REF_LOGPS))


ALGORITHM = Algorithm(
    config=DPOConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=pair_example,
    fetch=PairExample.values,
    functions="prefect_rlhf.rlhf_tasks.algorithms.dpo.functions",
)
