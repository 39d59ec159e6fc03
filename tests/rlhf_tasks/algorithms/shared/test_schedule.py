"""Optimizer steps: their rates, their blocks, their order; what becomes of those that are not finite."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext
from prefect_rlhf.rlhf_tasks.algorithms.shared.guards import AnomalyError
from prefect_rlhf.rlhf_tasks.algorithms.shared.schedule import (
    MAX_SKIPPED_CALLS,
    STATE_KEY,
    Step,
    Steps,
    counts_per_block,
    learning_rate,
    optimizer_steps,
)
from prefect_rlhf.rlhf_tasks.config.models import OptimizerConfig
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch


def context(iteration: int, mini_batches: int = 4, n_seqs: int = 12, **optimizer: Any) -> CallContext:
    document = {
        "type": "sft",
        "models": {"actor": "a"},
        "data": {"train": "d"},
        "total_iterations": 5,
        "batch_size": n_seqs,
        "num_mini_batches": mini_batches,
        "seed": 3,
        "optimizer": optimizer,
    }
    nothing: Any = SimpleNamespace()
    return CallContext(
        make_config(document), iteration, iteration * n_seqs, n_seqs, 1, nothing, nothing, Path(), str, tuple
    )


def batch(ids: list[int]) -> SampleBatch:
    return SampleBatch(tuple(ids), {"input_ids": Packed.of([torch.tensor([i]) for i in ids])})


def rates(kind: str, warmup: int, total: int) -> list[float]:
    settings = OptimizerConfig(learning_rate=1.0, lr_scheduler_type=kind, warmup_steps=warmup)
    return [learning_rate(settings, step, total) for step in range(total + 1)]


def test_rates_warm_up_and_then_follow_their_course():
    assert rates("constant", 3, 5) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert rates("linear", 1, 5) == pytest.approx([0.5, 1, 0.75, 0.5, 0.25, 0])
    assert rates("cosine", 0, 4) == pytest.approx([1, 0.8535534, 0.5, 0.1464466, 0])


def test_no_rate_is_ever_negative_beyond_the_end():
    settings = OptimizerConfig(learning_rate=1.0, lr_scheduler_type="linear")
    assert learning_rate(settings, 100, 10) == 0.0


def test_each_epoch_takes_every_sample_once_in_contiguous_blocks():
    here = context(iteration=2)
    steps = list(optimizer_steps(batch(list(range(24, 36))), here, here.config.optimizer, epochs=3))
    assert len(steps) == 12
    for epoch in range(3):
        blocks = {step.block: step.batch.ids for step in steps[epoch * 4 : epoch * 4 + 4]}
        assert blocks == {m: tuple(range(24 + 3 * m, 27 + 3 * m)) for m in range(4)}


def test_the_order_of_blocks_is_drawn_from_iteration_and_epoch_alone():
    def order(iteration: int, ids: list[int]) -> list[int]:
        here = context(iteration)
        return [step.block for step in optimizer_steps(batch(ids), here, here.config.optimizer, epochs=8)]

    whole, part = order(1, list(range(12, 24))), order(1, [13, 22])
    assert whole == part  # a replica with few samples takes the same steps
    assert whole != order(2, list(range(24, 36)))
    assert len({tuple(whole[e * 4 : e * 4 + 4]) for e in range(8)}) > 1


def test_a_replica_without_samples_of_a_block_still_takes_its_step():
    here = context(0)
    sizes = {step.block: len(step.batch) for step in optimizer_steps(batch([4]), here, here.config.optimizer)}
    assert sizes == {0: 0, 1: 1, 2: 0, 3: 0}


def test_the_schedule_goes_on_from_iteration_to_iteration_and_starts_at_the_roles_first():
    def first_rate(iteration: int, first_iteration: int) -> float:
        here = context(iteration, lr_scheduler_type="linear", learning_rate=1.0)
        start = here.first_sample
        steps = optimizer_steps(batch([start]), here, here.config.optimizer, 2, first_iteration)
        return next(steps).learning_rate

    assert first_rate(0, 0) == 1.0
    assert first_rate(4, 0) == pytest.approx(0.2)
    assert first_rate(1, 1) == 1.0
    assert first_rate(4, 1) == pytest.approx(0.25)


def test_counts_per_block_are_of_samples_or_of_tokens_under_a_mask():
    """Blocks of 12 samples in 4 mini-batches are 0-2, 3-5, 6-8 and 9-11."""
    ids = (4, 0, 11, 5, 3)
    masks = [torch.arange(6) < sample % 4 for sample in ids]  # 0, 0, 3, 1, 3 tokens
    some = SampleBatch(ids, {"response_mask": Packed.of(masks)})
    assert counts_per_block(some, context(0)).tolist() == [1, 3, 0, 1]
    assert counts_per_block(some, context(0), "response_mask").tolist() == [0, 4, 0, 3]
    none = some.take([])
    assert counts_per_block(none, context(0)).tolist() == [0] * 4
    assert counts_per_block(none, context(0), "response_mask").tolist() == [0] * 4


# Steps that are not finite: not applied, counted, and the end of a run only after several calls

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


def test_a_run_whose_anomalies_are_skipped_ends_with_what_to_change():
    engine = Reporting()
    engine.state[STATE_KEY] = MAX_SKIPPED_CALLS - 1
    steps = Steps(engine, SimpleNamespace(), [10.0], micro_batches=1)
    steps.left_out = True
    with pytest.raises(AnomalyError, match=r"raise kl_bound, or resume with on_anomaly=warn\.$"):
        steps.end("actor")


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
        AnomalyError, match=f"actor: no optimizer step of {MAX_SKIPPED_CALLS} iterations in a row"
    ):
        train_call(engine, BAD)
