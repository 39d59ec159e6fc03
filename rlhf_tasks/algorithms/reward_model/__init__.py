"""Trains a reward model on preference pairs."""

from typing import ClassVar, Literal

from pydantic import Field

from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import Handle, Models, traced
from prefect_rlhf.rlhf_tasks.config.base import Groups
from prefect_rlhf.rlhf_tasks.config.models import ActorOnly, Role
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.data.rows import PairExample, pair_example


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


DATASET_KEYS = ("chosen_ids", "rejected_ids", "margin")


@traced(DATASET_KEYS)
def graph(models: Models, pairs: Handle, config: object) -> None:
    """One train_step with the Bradley-Terry loss; a sample is a pair."""
    models.reward.train(pairs)


ALGORITHM = Algorithm(
    config=RewardModelConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=pair_example,
    fetch=PairExample.values,
    functions="prefect_rlhf.rlhf_tasks.algorithms.reward_model.functions",
)
