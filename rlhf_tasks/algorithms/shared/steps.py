"""The optimizer steps of one train call: taken, summed up, and not taken for ever where they come to nothing."""

import math
from collections.abc import Sequence

from rlhf_tasks.algorithms.shared.schedule import Step
from rlhf_tasks.parallel.train.engine import Engine, Loss

MAX_SKIPPED_CALLS = 3
"""Train calls of a role in a row that may end without one step applied: a bad batch or two is no reason to end a
run, but weights from which nothing finite comes do not heal."""

STATE_KEY = "skipped_calls"
"""In `engine.state` while it is not 0, so that it goes where the role goes and stands in its snapshots."""


class Steps:
    """Takes a train call's steps and keeps their means, over those that were applied.

    A step whose loss or gradient is not finite is not applied, on any rank (see `Engine.train_step`): it counts
    in `skipped` and in nothing else. All ranks of the mesh decide alike, since reports are equal on all.

    denominators   of each mini-batch, over all replicas: tokens, or pairs
    micro_batches  that this replica's share of a mini-batch is cut into
    metrics        names of the sums that the loss gives beside itself
    applied, skipped  steps so far
    """

    def __init__(
        self,
        engine: Engine,
        loss: Loss,
        denominators: list[float],
        micro_batches: int,
        metrics: Sequence[str] = (),
    ) -> None:
        self.applied = 0
        self.skipped = 0
        self._engine, self._loss = engine, loss
        self._denominators, self._micro_batches, self._metrics = denominators, micro_batches, metrics
        self._learning_rate = 0.0
        self._weight = 0.0
        self._norms = 0.0
        self._sums: dict[str, float] = {}

    def take(self, step: Step) -> dict[str, float]:
        """Take a step. Returns its report as means: of the loss, and of the sums that the loss gave beside it."""
        weight = self._denominators[step.block]
        report = self._engine.train_step(
            step.batch, self._loss, weight, self._micro_batches, step.learning_rate, self._metrics
        )
        norm, skipped = report.pop("grad_norm"), report.pop("skipped")
        means = {name: value if name == "loss" else value / weight for name, value in report.items()}
        self._learning_rate = step.learning_rate
        if skipped:
            self.skipped += 1
            return means
        self.applied += 1
        self._weight += weight
        self._norms += norm
        for name, value in means.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * weight
        return means

    def mean(self, name: str) -> float:
        """Of the steps applied, weighted by their denominators; NaN when there is none."""
        return self._sums.get(name, 0.0) / self._weight if self.applied else math.nan

    def end(self, role: str) -> dict[str, float]:
        """After the last step: the metrics grad_norm, learning_rate and skipped_steps of the role.

        Raises ValueError when not one step of the last MAX_SKIPPED_CALLS calls was applied.
        """
        calls = 0 if self.applied else self._engine.state.get(STATE_KEY, 0) + 1
        if calls >= MAX_SKIPPED_CALLS:
            raise ValueError(
                f"{role}: no optimizer step of {calls} iterations in a row was applied, for losses or gradients "
                "were not finite. Look for rewards or data that are NaN or infinite; if there are none, "
                "lower the learning rate and go on from an earlier commit."
            )
        self._engine.state.pop(STATE_KEY, None)
        if calls:
            self._engine.state[STATE_KEY] = calls
        return {
            f"grad_norm/{role}": self._norms / self.applied if self.applied else math.nan,
            f"learning_rate/{role}": self._learning_rate,
            f"skipped_steps/{role}": float(self.skipped),
        }
