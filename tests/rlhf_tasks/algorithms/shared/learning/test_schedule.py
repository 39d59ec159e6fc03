"""Optimizer steps: their rates, their blocks, their order."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_tasks.algorithms.configurations import make_config
from rlhf_tasks.algorithms.shared.context import CallContext
from rlhf_tasks.algorithms.shared.learning.schedule import counts_per_block, learning_rate, optimizer_steps
from rlhf_tasks.config.models import OptimizerConfig
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch


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
