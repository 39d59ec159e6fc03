"""What becomes of steps that are not finite: not applied, counted, and the end of a run only after several calls."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_tasks.algorithms.shared.learning.optimizer_steps import MAX_SKIPPED_CALLS, STATE_KEY, Steps
from rlhf_tasks.algorithms.shared.learning.schedule import Step

GOOD = {"loss": 2.0, "ratio": 30.0, "grad_norm": 0.5, "skipped": 0.0}
BETTER = {"loss": 1.0, "ratio": 10.0, "grad_norm": 1.5, "skipped": 0.0}
BAD = {"loss": math.nan, "ratio": math.inf, "grad_norm": math.nan, "skipped": 1.0}


class Reporting:
    """An engine whose train steps report what they are told to."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.reports: list[dict[str, float]] = []

    def train_step(self, *arguments: Any) -> dict[str, float]:
        return dict(self.reports.pop(0))


def train_call(engine: Any, *reports: dict[str, float]) -> tuple[Steps, dict[str, float]]:
    engine.reports += reports
    nothing: Any = SimpleNamespace()
    steps = Steps(engine, nothing, [10.0, 30.0], micro_batches=1)
    for number in range(len(reports)):
        steps.take(Step(number % 2, nothing, learning_rate=0.1 * (number + 1)))
    return steps, steps.end("actor")


def test_means_are_weighted_by_the_denominators():
    steps, metrics = train_call(Reporting(), GOOD, BETTER)
    assert steps.mean("loss") == (2.0 * 10 + 1.0 * 30) / 40
    assert steps.mean("ratio") == (30 + 10) / 40
    assert steps.total("ratio") == 30 + 10
    assert metrics == {"grad_norm/actor": 1.0, "learning_rate/actor": 0.2, "skipped_steps/actor": 0.0}


@pytest.mark.parametrize(("samples", "micro_batches"), [(3, 2), (4, 2), (5, 3), (8, 4), (12, 6)])
def test_a_share_that_is_larger_than_planned_is_cut_into_more_micro_batches(samples, micro_batches):
    """Planned are two micro-batches of two samples each: no later one may be larger."""
    asked: list[int] = []

    class Asked(Reporting):
        def train_step(self, *arguments: Any) -> dict[str, float]:
            asked.append(arguments[3])
            return GOOD | {}

    nothing: Any = SimpleNamespace()
    steps = Steps(Asked(), nothing, [10.0], micro_batches=2, share=4)
    steps.take(Step(0, range(samples), learning_rate=0.1))  # pyright: ignore[reportArgumentType]  of a length
    assert asked == [micro_batches]


def test_a_skipped_step_counts_in_nothing_but_their_number():
    engine = Reporting()
    steps, metrics = train_call(engine, BAD, BETTER)
    assert (steps.applied, steps.skipped) == (1, 1)
    assert (steps.mean("loss"), steps.mean("ratio")) == (1.0, 10 / 30)
    assert metrics == {"grad_norm/actor": 1.5, "learning_rate/actor": 0.2, "skipped_steps/actor": 1.0}
    assert engine.state == {}


def test_calls_without_an_applied_step_end_the_run_after_several_in_a_row():
    engine = Reporting()
    for calls in range(1, MAX_SKIPPED_CALLS):
        steps, metrics = train_call(engine, BAD, BAD)
        assert math.isnan(steps.mean("loss"))
        assert metrics["skipped_steps/actor"] == 2
        assert engine.state == {STATE_KEY: calls}
    train_call(engine, BAD, GOOD)
    assert engine.state == {}
    for _ in range(MAX_SKIPPED_CALLS - 1):
        train_call(engine, BAD)
    with pytest.raises(
        ValueError, match=f"actor: no optimizer step of {MAX_SKIPPED_CALLS} iterations in a row"
    ):
        train_call(engine, BAD)
