"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): further rounds of samples, until enough groups differ.

A round is a part of the iteration's calls. A sample that was not generated has no tokens: 0 rows under every key that
generation and scoring make. What is generated, and what is learned, are pure functions of the scores of all replicas.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from rlhf_tasks.algorithms.grpo.config import GRPOConfig
from rlhf_tasks.algorithms.shared.context import CallContext, CallFunction, CallOutput
from rlhf_tasks.algorithms.shared.groups import all_equal
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.train.engine import Engine


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


def generate_if_needed(
    function: CallFunction, config_of: Callable[[CallContext], GRPOConfig]
) -> CallFunction:
    """A generate call's function that generates nothing once the rounds before have enough groups that differ."""

    def call(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
        config, differing = config_of(context), torch.zeros(1, dtype=torch.float64)
        if context.earlier is not None:
            scores = generated(context.earlier, "scores")["scores"].values
            differing[0] = (~all_equal(scores, config.num_generations)).sum()
        enough = engine.sum_over_dp(differing).item() >= config.batch_size // config.num_generations
        wanted = batch.take(()) if context.part.number and enough else batch
        output = function(engine, wanted, context)
        made = None if output.batch is None else with_others(output.batch, batch.ids)
        return CallOutput(made, output.metrics)

    return call


class Chosen(NamedTuple):
    """What an iteration learns from.

    ids     of the samples of the first groups that differ, at most as many as a batch has
    groups  number of these groups
    rounds  number of rounds that generated
    """

    ids: list[int]
    groups: int
    rounds: int


def choose(engine: Engine, batch: SampleBatch, context: CallContext, config: GRPOConfig) -> Chosen:
    """The groups whose scores are not all equal, in the order of the samples. Collective over the mesh.

    batch  this replica's generated samples, with `scores`; whole groups
    """
    size, first = config.num_generations, context.first_sample
    places = torch.tensor([(sample - first) // size for sample in batch.ids[::size]], dtype=torch.int64)
    marks = torch.zeros(2, context.n_seqs // size, dtype=torch.float64)
    marks[0, places] = (~all_equal(batch["scores"].values, size)).double().cpu()
    marks[1, places] = 1.0
    differing, made = engine.sum_over_dp(marks.to(engine.device)).bool().tolist()
    taken = [group for group, differs in enumerate(differing) if differs][: config.batch_size // size]
    ids = [first + group * size + number for group in taken for number in range(size)]
    return Chosen(ids, len(taken), -(-sum(made) * size // config.batch_size))
