"""The optimizer steps of a train call: on which samples, in which order, at which learning rate.

All are pure functions of configuration, iteration and ids, so that every rank takes the same steps.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_tasks.algorithms.shared.context import CallContext
from rlhf_tasks.config.base import TrainingConfig
from rlhf_tasks.config.models import OptimizerConfig
from rlhf_tasks.parallel.batch.samples import SampleBatch
from rlhf_tasks.parallel.layout.transfers import mini_batch_blocks
from rlhf_tasks.system.counter_random import permutation


class Step(NamedTuple):
    """One optimizer step.

    block  number of its mini-batch in the iteration, from 0
    batch  this replica's samples of that mini-batch; there may be none
    """

    block: int
    batch: SampleBatch
    learning_rate: float


def learning_rate(settings: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step number `step`, from 0: linear warm-up, then the schedule.

    The first step after the warm-up has the peak rate. Linear and cosine schedules reach 0 at `total_steps`.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    courses = {
        "constant": lambda: peak,
        "linear": lambda: peak * (1 - progress),
        "cosine": lambda: peak * (1 + math.cos(math.pi * progress)) / 2,
    }
    return courses[settings.lr_scheduler_type]()


def iteration_ids(context: CallContext) -> range:
    """The global ids of the iteration's samples."""
    return range(context.first_sample, context.first_sample + context.n_seqs)


def block_of_samples(
    batch: SampleBatch, context: CallContext, mini_batches: int, ids: Sequence[int] | None = None
) -> list[int]:
    """The number of the mini-batch, from 0, of each sample of a batch.

    ids  of all replicas' samples from which the iteration learns, in whole groups; None: all of the iteration
    """
    learned = iteration_ids(context) if ids is None else ids
    blocks = mini_batch_blocks(learned, mini_batches, context.config.group_size)
    block_of = {sample: number for number, block in enumerate(blocks) for sample in block}
    return [block_of[sample] for sample in batch.ids]


def planned_share(context: CallContext, dp: int) -> int:
    """The most samples of a mini-batch that a replica has by the plan.

    It may have more where mini-batches are cut from the samples that stay in the batch: these lie where they were.
    """
    config = context.config
    assert isinstance(config, TrainingConfig), f"{config.type} runs do not train"
    groups = -(-config.batch_size // config.group_size // config.num_mini_batches)
    return -(-groups // dp) * config.group_size


def counts_per_block(
    batch: SampleBatch, context: CallContext, mask: str | None = None, ids: Sequence[int] | None = None
) -> Tensor:
    """This replica's samples in each of the iteration's mini-batches: [num_mini_batches] float64.

    mask  key of a bool tensor with one value per token; counts the tokens where it is True instead of samples
    ids   as in `block_of_samples`
    """
    config = context.config
    assert isinstance(config, TrainingConfig), f"{config.type} runs do not train"
    counts = [1] * len(batch) if mask is None else [int(part.sum()) for part in batch[mask].split()]
    blocks = torch.tensor(block_of_samples(batch, context, config.num_mini_batches, ids), dtype=torch.int64)
    totals = torch.zeros(config.num_mini_batches, dtype=torch.float64)
    return totals.index_add_(0, blocks, torch.tensor(counts, dtype=torch.float64))


def optimizer_steps(
    batch: SampleBatch,
    context: CallContext,
    settings: OptimizerConfig,
    epochs: int = 1,
    first_iteration: int = 0,
    ids: Sequence[int] | None = None,
) -> Iterator[Step]:
    """The steps of one train call. Every epoch takes the same mini-batches, in a new random order.

    first_iteration  the role's first training iteration, at which its learning-rate schedule begins
    ids              as in `block_of_samples`
    """
    config = context.config
    assert isinstance(config, TrainingConfig), f"{config.type} runs do not train"
    mini_batches = config.num_mini_batches
    blocks = block_of_samples(batch, context, mini_batches, ids)
    places = [[place for place, b in enumerate(blocks) if b == block] for block in range(mini_batches)]
    per_iteration = epochs * mini_batches
    total_steps = (config.total_iterations - first_iteration) * per_iteration
    number = (context.iteration - first_iteration) * per_iteration
    for epoch in range(epochs):
        purpose = f"mini_batch_order/{epoch}"
        for block in permutation(mini_batches, config.seed, purpose, context.iteration).tolist():
            yield Step(block, batch.take(places[block]), learning_rate(settings, number, total_steps))
            number += 1
