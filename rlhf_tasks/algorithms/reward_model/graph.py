"""The dataflow graph of reward modelling: one train_step on preference pairs."""

from typing import Protocol

from rlhf_tasks.spec import ModelFunctionCall

DATASET_KEYS = ("chosen_ids", "rejected_ids", "margin")


class RewardModelSizes(Protocol):
    """The fields of a reward-model configuration that the graph depends on."""

    @property
    def batch_size(self) -> int: ...
    @property
    def num_mini_batches(self) -> int: ...


def graph(config: RewardModelSizes) -> list[ModelFunctionCall]:
    """One train_step with the Bradley-Terry loss; a sample is a pair."""
    return [
        ModelFunctionCall(
            name="reward_train",
            role="reward",
            kind="train_step",
            inputs=DATASET_KEYS,
            n_seqs=config.batch_size,
            mini_batches=config.num_mini_batches,
        )
    ]
