"""Batches in which a sample is several sequences, such as the two answers of a preference pair."""

from collections.abc import Iterable, Mapping, Sequence

from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch

SequenceKeys = Mapping[str, str]
"""Of one sequence: its key in the engine's batch -> its key in the samples."""

CHOSEN: SequenceKeys = {"input_ids": "chosen_ids", "response_mask": "chosen_mask"}
REJECTED: SequenceKeys = {"input_ids": "rejected_ids", "response_mask": "rejected_mask"}


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
