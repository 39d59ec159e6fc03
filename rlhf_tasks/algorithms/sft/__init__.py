"""Supervised fine-tuning."""

from typing import ClassVar, Literal

from pydantic import Field

from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import Handle, Models, traced
from prefect_rlhf.rlhf_tasks.config.base import Groups
from prefect_rlhf.rlhf_tasks.config.models import ActorOnly, Role
from prefect_rlhf.rlhf_tasks.config.settings import Pair
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.data.rows import CompletionExample, completion_example


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning on completion tokens, on all tokens, or on what the assistant says."""

    type: Literal["sft"] = "sft"
    groups: ClassVar[Groups] = {
        "Training": ("random_init",),
        "Loss": ("completion_only_loss", "assistant_only_loss"),
    }
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "random_init",
            "lora",
            "{second} trains adapters of a model that is there, but {first} begins with none. Remove one.",
        ),
    )

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

    def roles(self) -> dict[str, Role]:
        """The one role that trains."""
        return {
            "actor": Role.of(self.models.actor, "lm", self.optimizer)._replace(random_init=self.random_init)
        }


DATASET_KEYS = ("input_ids", "response_mask")


@traced(DATASET_KEYS)
def graph(models: Models, rows: Handle, config: object) -> None:
    """One train_step with the cross-entropy loss on the tokens that `response_mask` marks."""
    models.actor.train(rows)


ALGORITHM = Algorithm(
    config=SFTConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=completion_example,
    fetch=CompletionExample.values,
    functions="prefect_rlhf.rlhf_tasks.algorithms.sft.functions",
    row_options=("completion_only_loss", "assistant_only_loss"),
)
