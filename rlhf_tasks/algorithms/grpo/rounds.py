"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): further rounds of samples, until enough groups differ.

A round is a part of the iteration's calls. A sample that was not generated has no tokens: 0 rows under every key that
generation and scoring make. What is generated, and what is learned, are pure functions of the scores of all replicas.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from rlhf_tasks.algorithms.grpo.config import GRPOConfig
from rlhf_tasks.algorithms.shared.context import CallContext, CallFunction, CallOutput
from rlhf_tasks.algorithms.shared.learning.groups import all_equal, per_group
from rlhf_tasks.algorithms.shared.sampling.generated import generated, with_others
from rlhf_tasks.algorithms.shared.sampling.staying import without_skipped
from rlhf_tasks.parallel.batch.samples import SampleBatch
from rlhf_tasks.parallel.train.engine import Engine


def generate_if_needed(
    function: CallFunction, config_of: Callable[[CallContext], GRPOConfig]
) -> CallFunction:
    """A generate call's function that generates nothing once the rounds before have enough groups that differ."""

    def call(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
        config, differing = config_of(context), torch.zeros(1, dtype=torch.float64)
        if context.earlier is not None:
            before = without_skipped(generated(context.earlier, "scores"))
            differing[0] = len(groups_that_differ(before, config.num_generations))
        enough = engine.sum_over_dp(differing).item() >= config.batch_size // config.num_generations
        wanted = batch.take(()) if context.part.number and enough else batch
        output = function(engine, wanted, context)
        made = None if output.batch is None else with_others(output.batch, batch.ids)
        return CallOutput(made, output.metrics)

    return call


def groups_that_differ(batch: SampleBatch, size: int) -> set[int]:
    """The numbers of the groups (sample id // size) whose scores are not all equal."""
    unlike = ~per_group(all_equal, batch["scores"].values, batch.ids, size)
    return {sample // size for sample, differs in zip(batch.ids, unlike.tolist(), strict=True) if differs}


class Chosen(NamedTuple):
    """What an iteration learns from.

    ids     of the samples of the first groups that differ, at most as many as a batch has
    groups  number of these groups
    rounds  number of rounds that generated
    """

    ids: list[int]
    groups: int
    rounds: int


def choose(
    engine: Engine, batch: SampleBatch, made: Sequence[int], context: CallContext, config: GRPOConfig
) -> Chosen:
    """The groups whose scores are not all equal, in the order of the samples. Collective over the mesh.

    batch  this replica's generated samples, with `scores`, without those that have left the batch
    made   ids of all its generated samples
    """
    size, first = config.num_generations, context.first_sample
    marks = torch.zeros(2, context.n_seqs // size, dtype=torch.float64)
    for row, groups in enumerate((groups_that_differ(batch, size), {sample // size for sample in made})):
        marks[row, [group - first // size for group in groups]] = 1.0
    differing, generated_groups = engine.sum_over_dp(marks.to(engine.device)).bool().tolist()
    taken = [group for group, differs in enumerate(differing) if differs][: config.batch_size // size]
    ids = [first + group * size + number for group in taken for number in range(size)]
    a_round = config.batch_size // size
    return Chosen(
        ids,
        len(taken),
        max((group // a_round + 1 for group, was in enumerate(generated_groups) if was), default=1),
    )
