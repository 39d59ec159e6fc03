"""Takes the optimizer steps of one train call, averages their metrics, and ends a run whose steps all fail."""

import math
from collections.abc import Sequence

from rlhf_tasks.algorithms.shared.learning.schedule import Step
from rlhf_tasks.parallel.train.engine import Engine, Loss

MAX_SKIPPED_CALLS = 3
"""After this many train calls of a role in a row without any applied step, the run fails. One or two bad batches must
not end a run, but weights that never give finite losses do not recover."""

STATE_KEY = "skipped_calls"
"""The count's key in `engine.state` while it is not 0: so it is in the role's snapshots and moves with the role."""


class Steps:
    """Takes the steps of a train call, and keeps the means of their metrics over the applied steps.

    A step whose loss or gradient is not finite is not applied on any rank (see `Engine.train_step`). It counts only
    in `skipped`. All ranks of the mesh decide the same, because their reports are equal.

    denominators      of each mini-batch, over all replicas: e.g. tokens, or pairs
    micro_batches     micro-batches into which this replica's share of a mini-batch is cut
    share             the most samples of such a share by the plan: a larger one is cut into more. None: there is none
    metrics           names of the sums that the loss gives besides itself
    counts            of each mini-batch, over all replicas: what metrics are means over; default: the denominators
    counted           key of the mask of the tokens that the loss looks at (see `Engine.train_step`)
    applied, skipped  numbers of steps so far
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

        Raises ValueError when all steps of the last MAX_SKIPPED_CALLS calls were skipped.
        """
        calls = self._engine.state.get(STATE_KEY, 0) + 1 if self.skipped and not self.applied else 0
        if calls >= MAX_SKIPPED_CALLS:
            raise ValueError(
                f"{role}: no optimizer step of {calls} iterations in a row was applied, because losses or gradients "
                "were not finite. Look for rewards or data that are NaN or infinite. If there are none, "
                "lower the learning rate and resume from an earlier commit."
            )
        self._engine.state.pop(STATE_KEY, None)
        if calls:
            self._engine.state[STATE_KEY] = calls
        return {
            f"grad_norm/{role}": self._norms / self.applied if self.applied else math.nan,
            f"learning_rate/{role}": self._learning_rate,
            f"skipped_steps/{role}": float(self.skipped),
        }
