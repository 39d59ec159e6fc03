"""The optimizer steps of a train call: on which samples, in which order, at which learning rate, and their metrics.

Which steps there are is a pure function of configuration, iteration and ids, so that every rank takes the same.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext
from prefect_rlhf.rlhf_tasks.algorithms.shared.guards import AnomalyError
from prefect_rlhf.rlhf_tasks.config.models import OptimizerConfig
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import mini_batch_blocks
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, Loss
from prefect_rlhf.rlhf_tasks.system.counter_random import permutation

MAX_SKIPPED_CALLS = 3
"""The run ends after this many consecutive train calls of a role without an applied step, whatever `on_anomaly` says.
One or two bad batches must not end a run, but weights that never give finite losses do not recover."""

STATE_KEY = "skipped_calls"
"""The count's key in `engine.state` while it is not 0: so it is in the role's snapshots and moves with the role."""


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
    """The most samples of a mini-batch that the plan gives a replica.

    It may have more if mini-batches are cut from the samples that stay in the batch: these do not change replicas.
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


class Steps:
    """Takes the steps of a train call, and keeps the means of their metrics over the applied steps.

    A step whose loss or gradient is not finite is not applied on any rank (see `Engine.train_step`). It counts only
    in `skipped`. All ranks of the mesh decide the same, because their reports are equal.

    denominators      of each mini-batch, over all replicas: e.g. tokens, or pairs
    micro_batches     micro-batches into which this replica's share of a mini-batch is cut
    share             the plan's most samples of such a share: a larger share gets more micro-batches. None: no limit
    metrics           names of the sums that the loss gives besides itself
    counts            of each mini-batch, over all replicas: what metrics are means over; default: the denominators
    counted           key of the mask of the tokens that the loss looks at (see `Engine.train_step`)
    applied, skipped  numbers of steps so far
    left_out          True where an anomaly leaves out all steps of the call
    """

    def __init__(
        self,
        engine: Engine,
        loss: Loss,
        denominators: list[float],
        micro_batches: int,
        metrics: Sequence[str] = (),
        counts: list[float] | None = None,
        counted: str | None = None,
        share: int | None = None,
    ) -> None:
        self.applied = 0
        self.skipped = 0
        self.left_out = False
        self._engine, self._loss = engine, loss
        self._denominators, self._micro_batches, self._metrics = denominators, micro_batches, metrics
        self._counts = denominators if counts is None else counts
        self._counted, self._share = counted, share
        self._learning_rate = 0.0
        self._norms = 0.0
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def take(self, step: Step) -> dict[str, float]:
        """Take a step. Returns the means of the loss and of its metrics over the mini-batch."""
        weight, count = self._denominators[step.block], self._counts[step.block]
        micro_batches = self._micro_batches
        if self._share is not None:
            micro_batches = max(micro_batches, -(-len(step.batch) * micro_batches // self._share))
        report = self._engine.train_step(
            step.batch,
            self._loss,
            weight,
            micro_batches,
            step.learning_rate,
            self._metrics,
            self._counted,
        )
        norm, skipped = report.pop("grad_norm"), report.pop("skipped")
        means = {name: value if name == "loss" else value / count for name, value in report.items()}
        self._learning_rate = step.learning_rate
        if skipped:
            self.skipped += 1
            return means
        self.applied += 1
        self._norms += norm
        for name, value in report.items():
            of_step = weight if name == "loss" else count
            total = value * weight if name == "loss" else value
            self._sums[name] = self._sums.get(name, 0.0) + total
            self._weights[name] = self._weights.get(name, 0.0) + of_step
        return means

    def total(self, name: str) -> float:
        """The sum of a metric over the applied steps."""
        return self._sums.get(name, 0.0)

    def mean(self, name: str) -> float:
        """The mean of the loss or of a metric over the applied steps; NaN if none was applied.

        Steps are weighted by their denominators for the loss, by their counts for a metric.
        """
        return self.total(name) / self._weights[name] if self.applied else math.nan

    def end(self, role: str) -> dict[str, float]:
        """Call after the last step. Returns the metrics grad_norm, learning_rate and skipped_steps of the role.

        Raises AnomalyError when all steps of the last MAX_SKIPPED_CALLS calls were skipped or left out.
        """
        nothing = (self.skipped or self.left_out) and not self.applied
        calls = self._engine.state.get(STATE_KEY, 0) + 1 if nothing else 0
        if calls >= MAX_SKIPPED_CALLS:
            reason = (
                "their losses or gradients were not finite. Look for rewards or data that are NaN or infinite. If "
                "there are none, lower the learning rate and resume from an earlier commit."
                if self.skipped
                else "on_anomaly=skip left them out. Look at the rewards and the KL divergence in metrics.jsonl. "
                "Correct data or rewards, raise kl_bound, or resume with on_anomaly=warn."
            )
            raise AnomalyError(
                f"{role}: no optimizer step of {calls} iterations in a row was applied: {reason}"
            )
        self._engine.state.pop(STATE_KEY, None)
        if calls:
            self._engine.state[STATE_KEY] = calls
        return {
            f"grad_norm/{role}": self._norms / self.applied if self.applied else math.nan,
            f"learning_rate/{role}": self._learning_rate,
            f"skipped_steps/{role}": float(self.skipped),
        }
