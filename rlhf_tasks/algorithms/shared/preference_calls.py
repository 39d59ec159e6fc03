"""The two calls of every algorithm that learns from labelled answers against a reference. Torch-free."""

from collections.abc import Sequence
from typing import Protocol

from rlhf_tasks.spec import ModelFunctionCall


class PreferenceSizes(Protocol):
    """The fields of a configuration that these calls depend on."""

    @property
    def batch_size(self) -> int: ...
    @property
    def num_mini_batches(self) -> int: ...


def infer_and_train(
    config: PreferenceSizes, sequences: Sequence[str], ref_logps: Sequence[str], others: Sequence[str] = ()
) -> list[ModelFunctionCall]:
    """`ref_inference`, then `actor_train`.

    sequences  keys of the data set: the tokens that both calls read
    ref_logps  keys of the answers' log-probabilities under the reference
    others     further keys of the data set that the train_step reads
    """
    return [
        ModelFunctionCall(
            name="ref_inference",
            role="ref",
            kind="inference",
            inputs=tuple(sequences),
            outputs=tuple(ref_logps),
            n_seqs=config.batch_size,
        ),
        ModelFunctionCall(
            name="actor_train",
            role="actor",
            kind="train_step",
            inputs=(*sequences, *ref_logps, *others),
            n_seqs=config.batch_size,
            mini_batches=config.num_mini_batches,
        ),
    ]
