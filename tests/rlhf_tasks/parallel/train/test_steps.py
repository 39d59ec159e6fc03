"""What a step of an engine counts, sums, refuses and holds, on 1, 2 and 4 ranks."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.layout import state_layout
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Head
from prefect_rlhf.rlhf_tasks.parallel.layout.shares import gathering
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy
from prefect_rlhf.rlhf_tasks.parallel.layout.work import head_flops, pass_flops
from prefect_rlhf.rlhf_tasks.parallel.train.engine import LossTerms
from tests.rlhf_tasks.parallel.train.trials import (
    DENOMINATOR,
    EVERY,
    FEW,
    LENGTHS,
    LORA,
    RATES,
    SIZES,
    SUMS,
    Trial,
    begun,
    engine_of,
    expected_of,
    loss_of,
    on_one_rank,
    rows_of,
    some,
    step,
    train,
    trial_of,
    way,
    whole_batch,
)
from tests.tiny_models import held_slices

pytestmark = pytest.mark.dist


def _work(rank: int, world: int, trial: Trial):
    """FLOPs of a forward pass, then of a step too, then of a forward pass in which all tokens count."""
    engine, batch = begun(trial, rank)
    everywhere = Packed(torch.ones(len(batch["weight"].values), dtype=torch.bool), batch["weight"].lengths)
    batch = SampleBatch(batch.ids, {**batch.data, "counted": everywhere})
    engine.inference(batch, rows_of(engine), trial.micro_batches)
    step(engine, batch, loss_of(engine), trial.micro_batches, 1e-2)
    flops = engine.flops
    engine.inference(batch, rows_of(engine), trial.micro_batches, counted="counted")
    return flops, engine.flops - flops


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
@pytest.mark.parametrize("strategy", some((1, 1, 1), (2, 1, 2), (4, 1, 1)), ids=str)
def test_the_work_of_all_ranks_is_the_models_however_it_is_split(ranks, strategy, lora) -> None:
    """With adapters, without the gradients of frozen weights. A sample's first token, which nothing predicts, is no
    work of the head where it is told which tokens count."""
    trial = trial_of("llama", "lm", strategy, lora=lora)
    shape = trial.layout.shape
    work, counted = zip(*ranks.run(strategy.size, _work, trial), strict=True)
    expected = sum(pass_flops(shape, "lm", LENGTHS, None, lora, (), training) for training in (False, True))
    assert sum(work) == pytest.approx(expected, rel=1e-12)
    predicted = sum(LENGTHS) - len(LENGTHS)
    assert sum(counted) == pytest.approx(pass_flops(shape, "lm", LENGTHS, predicted, lora), rel=1e-12)


def _counted(rank: int, world: int, trial: Trial, counted: str | None):
    """Three steps on the tokens of a mask, and log-probabilities after them. Some samples have no such token."""
    engine, batch = begun(trial, rank)
    lengths, weight = batch["weight"].lengths, batch["weight"].values
    mask = weight > 0.6
    masked = {"counted": Packed(mask, lengths), "weight": Packed(weight * mask, lengths)}
    batch = SampleBatch(batch.ids, {**batch.data, **masked})
    steps = [
        engine.train_step(batch, loss_of(engine), DENOMINATOR, len(LENGTHS), rate, SUMS, counted)
        for rate in RATES
    ]
    rows = engine.inference(batch, rows_of(engine), trial.micro_batches, counted=counted)
    seen = None if rows is None else dict(zip(batch.ids, rows.split(), strict=True))
    return steps, seen, engine.flops


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize(
    "strategy", some((1, 1, 1), (4, 1, 1), (1, 2, 2), (1, 1, 2, 2), slow=[(1, 4, 1)]), ids=str
)
def test_a_head_without_the_tokens_that_do_not_count_gives_the_same(ranks, head: Head, strategy) -> None:
    plain = trial_of("qwen3-tied", head, ParallelStrategy())
    steps, whole, flops = on_one_rank(ranks, _counted, plain, None)
    masks = [weight > 0.6 for weight in whole_batch()["weight"].split()]
    assert not all(mask.any() for mask in masks)
    results = ranks.run(strategy.size, _counted, replace(plain, strategy=strategy), "counted")
    for of_rank, rows, _ in results:
        assert of_rank == [pytest.approx(step, rel=1e-9) for step in steps]
        for sample, mask in zip(whole_batch().ids, masks, strict=True):
            if rows is not None and sample in rows:
                want = torch.where(mask, whole[sample], 0.0) if head == "lm" else whole[sample]
                assert_close(rows[sample], want, rtol=1e-9, atol=1e-12)
    uncounted = sum(LENGTHS) - sum(int(mask.sum()) for mask in masks)
    # three steps of three passes, and one pass
    saved = 10 * head_flops(uncounted, SIZES["hidden_size"], SIZES["vocab_size"]) if head == "lm" else 0
    assert sum(flops for *_, flops in results) == pytest.approx(flops - saved, rel=1e-12)


def _poisoned(rank: int, world: int, trial: Trial):
    """One step whose loss is not a number on one replica, then three as they should be."""
    engine, batch = begun(trial, rank)
    before = [p.detach().clone() for p in engine.stage.parameters()]
    bad = loss_of(engine, poison=engine.coordinate.dp == 0)
    skipped = step(engine, batch, bad, 2, 1e-2)["skipped"]
    unchanged = all(torch.equal(p, q) for p, q in zip(engine.stage.parameters(), before, strict=True))
    losses = [step(engine, batch, loss_of(engine), 2, rate)["loss"] for rate in RATES]
    return skipped, unchanged, losses


@pytest.mark.parametrize("strategy", some((2, 1, 2), (2, 2, 1)), ids=str)
def test_a_loss_that_is_not_finite_skips_the_step_on_all_ranks(ranks, strategy) -> None:
    trial = trial_of("qwen3-tied", "lm", strategy)
    expected = expected_of("qwen3-tied", "lm", torch.float64, None)
    for skipped, unchanged, losses in ranks.run(strategy.size, _poisoned, trial):
        assert (skipped, unchanged) == (1.0, True)
        assert losses == pytest.approx(expected.losses, rel=1e-9)


def _unpickled(rank: int, world: int, trial: Trial):
    """A step on ranks that send no Python objects; each replica gives one of LARGE_AND_SMALL."""

    def refuse(*_: object) -> None:
        raise AssertionError("a Python object was sent")

    engine, batch = begun(trial, rank)
    sums = torch.tensor(LARGE_AND_SMALL[engine.coordinate.dp] / max(len(batch), 1), dtype=torch.float64)

    def loss(y: Tensor, micro: MicroBatch) -> LossTerms:
        terms = loss_of(engine)(y, micro)
        return LossTerms(terms.total, {"sums": sums * len(micro.ids)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.distributed_c10d, "_object_to_tensor", refuse)
        return engine.train_step(batch, loss, DENOMINATOR, 2, 1e-2, ["sums"])


LARGE_AND_SMALL = (1.0, 6.0, 2.0**60, -(2.0**60))  # the second of four replicas has no samples


@pytest.mark.parametrize(("strategy", "total"), [((4, 1, 1), 0.0), ((2, 1, 2), 7.0)], ids=str)
def test_metrics_are_summed_in_the_order_of_the_ranks_and_nothing_is_pickled(ranks, strategy, total) -> None:
    """Ranks without samples and stages without a loss know the names too. In another order the total would be 1."""
    trial = trial_of("llama", "lm", ParallelStrategy(*strategy))
    metrics = ranks.run(trial.strategy.size, _unpickled, trial)
    assert [m["sums"] for m in metrics] == [total] * trial.strategy.size
    assert metrics == [metrics[0]] * trial.strategy.size


def _untold(rank: int, world: int, trial: Trial, told: list[str]) -> str:
    engine, batch = begun(trial, rank)
    with pytest.raises(ValueError, match="the loss gives the metrics") as refused:
        engine.train_step(batch, loss_of(engine), DENOMINATOR, 2, 1e-2, told)
    return str(refused.value)


@pytest.mark.parametrize("told", [[], ["tokens"], ["rows", "tokens", "others"]], ids=len)
def test_a_loss_that_gives_other_metrics_than_the_step_was_told_is_refused(ranks, told: list[str]) -> None:
    (said,) = ranks.run(1, _untold, trial_of("llama", "lm", ParallelStrategy()), told)
    assert f"['rows', 'tokens'], but the train step was told {sorted(told)}" in said


def _sums(rank: int, world: int, trial: Trial):
    engine = engine_of(trial, rank)
    at = engine.coordinate
    values = torch.tensor([[1.0, 10.0 * at.dp]]) if engine.is_head else torch.full((1, 2), float("inf"))
    return engine.is_head, engine.sum_over_dp(values)


@pytest.mark.parametrize("strategy", some((1, 1, 1), (2, 2, 1)), ids=str)
def test_sums_over_dp_count_each_replica_once(ranks, strategy: ParallelStrategy) -> None:
    results = ranks.run(strategy.size, _sums, trial_of("llama", "lm", strategy))
    assert sum(is_head for is_head, _ in results) == strategy.dp
    want = torch.tensor([[strategy.dp, 10 * sum(range(strategy.dp))]], dtype=torch.float64)
    for _, got in results:
        assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model", "head", "strategy", "how"),
    [
        *way("answers", "qwen3-tied", some((2, 2, 1), whole=[(1, 1, 1), (4, 1, 1), (1, 2, 2)], slow=EVERY)),
        *way("values", "qwen3-tied", some((2, 1, 2), slow=EVERY), "scalar"),
        *way("adapters", "qwen3-tied", some((1, 2, 2)), lora=LORA, recompute="selective"),
        *way("full recomputation", "qwen3-tied", some((1, 2, 2)), recompute="full"),
        *way("micro-batches: 4", "qwen3-tied", some((1, 2, 2)), micro_batches=4),
        *way("context", "qwen3-tied", some((1, 1, 2, 2), whole=[(2, 1, 1, 2), (1, 1, 1, 4)])),
        *way("context of values", "qwen3-tied", some((1, 2, 1, 2)), "scalar", recompute="selective"),
        *way("few tokens", "qwen3-tied", some((1, 2, 2)), micro_batches=1, micro_batch_tokens=30),
    ],
)
def test_shared_prompts_train_as_repeated_ones_under_any_layout(
    ranks, model: str, head: Head, strategy, how: dict
) -> None:
    """As on one rank that computes every prompt for each sample."""
    plain = trial_of(model, head, ParallelStrategy(), lora=how.get("lora"), prompts=True)
    rows, flops, metrics, _, weights, _ = on_one_rank(ranks, train, plain, False)
    trial = replace(plain, strategy=strategy, **how)
    results = ranks.run(strategy.size, train, trial)
    for rank, (of_rank, _, steps, _, after, _) in enumerate(results):
        assert steps == [pytest.approx(step, rel=1e-9) for step in metrics]
        for sample, values in (of_rank or {}).items():
            assert_close(values, rows[sample], rtol=1e-9, atol=1e-11)
        for name, weight in held_slices(trial.layout, rank, weights).items():
            assert_close(after[name], weight, rtol=1e-9, atol=1e-11)
    assert sum(result[1] for result in results) < 0.85 * flops


def _weights_there(rank: int, world: int, trial: Trial) -> tuple[int, int]:
    """Elements of weights that a rank has between passes, and the most that it has gathered in a step."""
    engine, batch = begun(trial, rank)
    shares, most = engine.stage.shares, 0
    if shares is not None:
        enter = shares._enter

        def counted(part: int, then: int | None) -> None:
            nonlocal most
            enter(part, then)
            most = max(most, sum(g.values.untyped_storage().nbytes() // 8 for g in shares._whole))

        shares._enter = counted
    step(engine, batch, loss_of(engine), trial.micro_batches, 1e-2)
    return engine.master.weights.numel(), most


def test_a_rank_holds_its_share_of_the_weights_and_gathers_what_the_planner_has_room_for(ranks) -> None:
    """Half of what it holds of whole weights, and no more at a time than two parts of the model."""
    trial = trial_of("llama", "lm", ParallelStrategy(2, shard="parameters"))
    whole = ranks.run(2, _weights_there, replace(trial, strategy=ParallelStrategy(2)))
    with patch.object(state_layout, "BUCKET", FEW):
        room = gathering(trial.layout)
    for (all_of_them, _), (share, most) in zip(whole, ranks.run(2, _weights_there, trial), strict=True):
        assert share == pytest.approx(all_of_them / 2, rel=0.03)
        assert most == pytest.approx(room.most, rel=0.15)
        assert most < 0.7 * all_of_them
