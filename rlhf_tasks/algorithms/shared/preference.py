"""What losses on labelled answers share: samples of several sequences, such as the two answers of a pair, and the
log-probabilities of answers."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallOutput
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine

SequenceKeys = Mapping[str, str]
"""The keys of one sequence: key in the engine's batch -> key in the samples."""

CHOSEN: SequenceKeys = {"input_ids": "chosen_ids", "response_mask": "chosen_mask"}
REJECTED: SequenceKeys = {"input_ids": "rejected_ids", "response_mask": "rejected_mask"}

ANSWER = "response_mask"
"""Key of the mask of an answer's tokens, in the engine's batch: only these tokens count."""


def side_by_side(batch: SampleBatch, sequences: Sequence[SequenceKeys]) -> SampleBatch:
    """A batch in which the sequences of each sample follow each other, in this order, under the sample's id.

    sequences  each names the same keys
    """
    ids = tuple(sample for sample in batch.ids for _ in sequences)
    return SampleBatch(ids, {key: _merged([batch[keys[key]] for keys in sequences]) for key in sequences[0]})


def apart(rows: Packed, names: Iterable[str]) -> dict[str, Packed]:
    """The rows of the first sequence of each sample under the first name, and so on. rows: one per sequence."""
    names = list(names)
    return {
        name: Packed(rows.values[place :: len(names)], rows.lengths[place :: len(names)])
        for place, name in enumerate(names)
    }


def _merged(parts: Sequence[Packed]) -> Packed:
    """One sample of each part in turn."""
    if not parts[0].lengths:
        return parts[0]
    return Packed.of(
        [values for each in zip(*(part.split() for part in parts), strict=True) for values in each]
    )


def answer_logps(engine: Engine, logits: Tensor, micro: MicroBatch) -> Tensor:
    """The log-probability of each sequence's answer given the prompt before it: [n].

    logits  [R, vocabulary / tp], of the rows that predict the answers' tokens: the pass has counted=ANSWER
    Collective over the tp ranks of the stage.
    """
    return torch.stack([part.sum() for part in micro.per_sample(engine.logprobs(logits, micro))])


def reference_logps(
    engine: Engine, batch: SampleBatch, sequences: Mapping[str, SequenceKeys], micro_batches: int
) -> CallOutput:
    """`answer_logps` of each of a sample's sequences under a frozen model, one number per sample and sequence.

    sequences  key of the result -> the sequence that it is about
    """
    rows = engine.inference(
        side_by_side(batch, list(sequences.values())),
        lambda logits, micro: answer_logps(engine, logits, micro),
        micro_batches,
        counted=ANSWER,
    )
    if rows is None or not engine.is_head:
        return CallOutput()
    return CallOutput(SampleBatch(batch.ids, apart(rows, sequences)))
