"""The dataflow graph of reward modelling: one train_step on preference pairs."""

from typing import Protocol

from rlhf_tasks.spec import ModelFunctionCall

DATASET_KEYS = ("chosen_ids", "rejected_ids")


class RewardModelSizes(Protocol):
    """What the graph depends on in a reward-model configuration."""

    @property
    def batch_size(self) -> int: ...
    @property
    def num_mini_batches(self) -> int: ...


def graph(config: RewardModelSizes) -> list[ModelFunctionCall]:
    """Bradley-Terry loss; a sample is a pair."""
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
