"""Samples that leave the batch of an iteration, and samples that are not there yet.

Later calls do not see the samples that leave. Samples that were not generated, or have not ended, have 0 rows under
every key that generation and scoring make.
"""

from torch import Tensor

from rlhf_tasks.algorithms.shared.context import CallContext, CallFunction, CallOutput
from rlhf_tasks.algorithms.shared.graphs import STAYS
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.train.engine import Engine


def without_skipped(batch: SampleBatch, key: str = STAYS) -> SampleBatch:
    """The samples on which no reward failed; all where the run would have ended otherwise."""
    return staying(batch, batch[key].values) if key in batch.data else batch


def staying(batch: SampleBatch, stays: Tensor) -> SampleBatch:
    """The samples of a batch that stay. stays  [n] bool"""
    return batch if bool(stays.all()) else batch.take(stays.nonzero().squeeze(1).tolist())


def generated(batch: SampleBatch, key: str = "input_ids") -> SampleBatch:
    """The samples that were generated: those with rows under `key`."""
    if all(batch[key].lengths):
        return batch
    return batch.take([place for place, rows in enumerate(batch[key].lengths) if rows])


def with_others(batch: SampleBatch, ids: tuple[int, ...]) -> SampleBatch:
    """A batch with further samples, which have no rows, in the order of `ids`."""
    if batch.ids == ids:
        return batch
    place = {sample: number for number, sample in enumerate(batch.ids)}
    lengths = {
        key: tuple(packed.lengths[place[sample]] if sample in place else 0 for sample in ids)
        for key, packed in batch.data.items()
    }
    return SampleBatch(ids, {key: Packed(batch[key].values, of_all) for key, of_all in lengths.items()})


def on_generated(function: CallFunction) -> CallFunction:
    """A call's function that is given the generated samples alone, and gives no rows to the others."""

    def call(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
        output = function(engine, generated(batch), context)
        made = None if output.batch is None else with_others(output.batch, batch.ids)
        return CallOutput(made, output.metrics)

    return call
