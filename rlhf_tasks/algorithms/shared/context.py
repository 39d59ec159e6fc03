"""What a call's function gets after its engine and its samples, what it gives, and which samples it is for.

Later calls do not see the samples that leave. Samples of a call that did not run, and those that have not ended, have
0 rows under every key that it makes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import STAYS
from prefect_rlhf.rlhf_tasks.algorithms.shared.guards import Record
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import BuiltIn, Generator
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.spec import WHOLE, Part

if TYPE_CHECKING:
    from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
    from prefect_rlhf.rlhf_tasks.user_code.environments import EnvironmentProcess
    from prefect_rlhf.rlhf_tasks.user_code.rewards import RewardProcess


@dataclass(frozen=True, slots=True)
class CallContext:
    """One execution of one call.

    iteration      counted from 0
    first_sample   global id of the first sample of the iteration, or of this part of it; the ids are the `n_seqs`
                   integers from there
    n_seqs         sequences of the iteration, or of this part of it
    micro_batches  micro-batches into which this dp rank's share of one (mini-)batch is cut
    rewards        this rank's helper process for Python rewards
    run_folder     on a disk that all hosts share; samples are written there
    where          global id of a sample -> `file:line` of its row
    columns        gives the names of all columns of the data, also of those that this rank's rows lack
    part           which part of the call this is
    tally          what earlier parts of the call have left in this iteration, for `all_parts`
    environment    this rank's helper process for environments; None where there is none
    rows           gives the values of the data set's keys of samples, by their global ids
    generator      draws responses
    record         of a train call: what is kept of it for the case of an anomaly
    scored_here    of a generate call: id of each sample that this rank will score -> its number among these
    """

    config: RunConfig
    iteration: int
    first_sample: int
    n_seqs: int
    micro_batches: int
    tokenizer: "Tokenizer"
    rewards: "RewardProcess"
    run_folder: Path
    where: Callable[[int], str]
    columns: Callable[[], Sequence[str]]
    part: Part = WHOLE
    tally: list[Any] = field(default_factory=list)
    environment: "EnvironmentProcess | None" = None
    rows: Callable[[Sequence[int]], SampleBatch] | None = None
    generator: Generator = field(default_factory=BuiltIn)
    record: Record = field(default_factory=Record)
    scored_here: Mapping[int, int] = field(default_factory=dict)

    def all_parts(self, figures: Any) -> list[Any] | None:
        """In the call's last part, the figures of all its parts, in their order; None in the others.

        A metric is about the whole call: the last part computes it from the figures of all parts. A call that is not
        cut is its own last part.
        """
        self.tally.append(figures)
        if self.part.number < self.part.of - 1:
            return None
        of_all = list(self.tally)
        self.tally.clear()
        return of_all


@dataclass(frozen=True, slots=True)
class CallOutput:
    """The result of a call.

    batch    new keys of this dp rank's samples, on the data-parallel head; None elsewhere, or without new keys. Of a
             generation in segments, samples of the iteration that have ended on this dp rank
    metrics  global values, equal on every rank of the mesh
    left     of a generation in segments: what it has left in its places, for the next iteration
    of_part  metrics of this part of the call alone, which its node reports at once
    """

    batch: SampleBatch | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    left: SampleBatch | None = None
    of_part: Mapping[str, float] = field(default_factory=dict)


CallFunction = Callable[[Engine, SampleBatch, CallContext], CallOutput]


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


def on_none(function: CallFunction) -> CallFunction:
    """A call's function that is given none of its samples: all have 0 rows under the keys that it makes."""

    def call(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
        output = function(engine, batch.take(()), context)
        made = None if output.batch is None else with_others(output.batch, batch.ids)
        return CallOutput(made, output.metrics)

    return call
