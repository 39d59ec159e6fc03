"""The dataflow graph of supervised fine-tuning: one train_step."""

from typing import Protocol

from rlhf_tasks.spec import ModelFunctionCall

DATASET_KEYS = ("input_ids", "response_mask")


class SFTSizes(Protocol):
    """The fields of an SFT configuration that the graph depends on."""

    @property
    def batch_size(self) -> int: ...
    @property
    def num_mini_batches(self) -> int: ...


def graph(config: SFTSizes) -> list[ModelFunctionCall]:
    """One train_step with the cross-entropy loss on the tokens that `response_mask` marks."""
    return [
        ModelFunctionCall(
            name="actor_train",
            role="actor",
            kind="train_step",
            inputs=DATASET_KEYS,
            n_seqs=config.batch_size,
            mini_batches=config.num_mini_batches,
        )
    ]
