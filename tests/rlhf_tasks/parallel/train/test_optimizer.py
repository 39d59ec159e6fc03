"""The sharded optimizer against torch's AdamW on whole parameters, on made-up gradients (no model)."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.comm.host_memory import Copier
from prefect_rlhf.rlhf_tasks.parallel.layout import state_layout
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.train import optimizer as optimizer_module
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import Optimizer, OptimizerSettings, StateShard
from tests.rlhf_tasks.lazy_copies import LazyCopier
from tests.tiny_models import held_slices

pytestmark = pytest.mark.dist

# Nothing divides: neither heads, columns and vocabulary over tp, nor the flat buffer over dp.
SIZES = {"hidden": 6, "layers": 2, "head_dim": 2, "intermediate": 7, "vocab": 11, "context": 32}
UNEVEN = {"family": "qwen3", "qk_norm": "each head", **SIZES}
GROUPED = ModelShape(query_heads=9, kv_heads=3, tied=True, **UNEVEN)
FEW_KV = ModelShape(query_heads=4, kv_heads=1, tied=False, **UNEVEN)
EXPERTS = replace(FEW_KV, family="qwen3_moe", experts=3, experts_per_token=2)
BUCKET = 100  # elements; the models have up to 2,000, in matrices of up to 126
SETTINGS = OptimizerSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
RATES = (1e-2, 5e-3, 2e-2)
DEGREES = [(dp, tp, pp) for dp, tp, pp in product((1, 2, 4), repeat=3) if dp * tp * pp <= 4 and pp <= 2]


def _whole(shape: ModelShape, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Made-up tensors for all parameters, a function of (parameter, step)."""
    tensors = {}
    for number, spec in enumerate(Layout(shape, "lm", Placement((0,), ParallelStrategy())).parameters):
        generator = torch.Generator().manual_seed(1000 * step + number)
        tensors[spec.name] = torch.randn(spec.shape, generator=generator, dtype=torch.float64).to(dtype)
    return tensors


def _contribution(layout: Layout, rank: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """This rank's part of the gradient: dp ranks add up, and so do the holders of partial gradients."""
    gradients = held_slices(layout, rank, _whole(layout.shape, step, dtype))
    at = layout.placement.coordinate(rank)
    weights = torch.arange(1, layout.placement.strategy.dp + 1, dtype=dtype)
    for name, gradient in gradients.items():
        gradient *= weights[at.dp] / weights.sum()
        if not layout.specs[name].partial_gradient:
            continue
        start = layout.held(rank)[name].start
        for piece in layout.shared(name, at.dp):
            if rank in piece.devices:
                parts = torch.arange(1, len(piece.devices) + 1, dtype=dtype)
                part = parts[piece.devices.index(rank)] / parts.sum()
                gradient.narrow(0, piece.interval.start - start, piece.interval.size).mul_(part)
    return gradients


def _begin(
    shape: ModelShape,
    strategy: ParallelStrategy,
    dtype: torch.dtype,
    rank: int,
    settings: OptimizerSettings = SETTINGS,
    copies: Copier | None = None,
    order: Sequence[int] = (),
) -> tuple[Layout, dict[str, nn.Parameter], Optimizer]:
    """An optimizer of a rank's slices, with small buckets, so that a model has several of them."""
    layout = Layout(shape, "lm", Placement(tuple(order or range(strategy.size)), strategy))
    groups = ProcessGroups(device_sets(layout.placement), 240.0, torch.device("cpu"))
    slices = {n: nn.Parameter(t) for n, t in held_slices(layout, rank, _whole(shape, 0, dtype)).items()}
    with patch.object(state_layout, "BUCKET", BUCKET):
        return layout, slices, Optimizer(slices, layout, groups, settings, copies)


def _backward(
    optimizer: Optimizer,
    slices: dict[str, nn.Parameter],
    gradients: dict[str, Tensor],
    parts: int,
    unused: Sequence[str] = (),
) -> None:
    """Give every parameter its gradient in so many backward passes; the unused ones only in the last pass."""
    optimizer.gradients.begin(parts)
    for part in range(1, parts + 1):
        total = torch.zeros((), dtype=torch.float64)
        for name, gradient in gradients.items():
            if name not in unused:
                total = total + (slices[name] * gradient).sum() * (2 * part / (parts * (parts + 1)))
            elif part == parts:
                total = total + (slices[name] * gradient).sum()
        total.backward()
        optimizer.gradients.end_pass()
    optimizer.gradients.end_passes()


def _train(rank: int, world: int, shape: ModelShape, strategy, dtype: torch.dtype, order, uneven=False):
    """uneven: replicas have different numbers of passes, and in most of them parameters without a gradient."""
    layout, slices, optimizer = _begin(shape, strategy, dtype, rank, order=order)
    norms = []
    parts = 1 + layout.placement.coordinate(rank).dp if uneven else 2
    for step, rate in enumerate(RATES, start=1):
        unused = list(slices)[step :: 2 + step] if uneven else ()
        _backward(optimizer, slices, _contribution(layout, rank, step, dtype), parts, unused)
        norms.append(optimizer.apply(rate).grad_norm)
    assert all(p.grad is None for p in slices.values())
    return norms, {name: p.detach().clone() for name, p in slices.items()}


def _reference(shape: ModelShape, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """torch's AdamW and clipping on whole parameters."""
    parameters = {n: nn.Parameter(t) for n, t in _whole(shape, 0, dtype).items()}
    decayed = [p for p in parameters.values() if p.ndim > 1]
    others = [p for p in parameters.values() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        betas=SETTINGS.betas,
        eps=SETTINGS.eps,
        weight_decay=SETTINGS.weight_decay,
    )
    norms = []
    for step, rate in enumerate(RATES, start=1):
        for name, gradient in _whole(shape, step, dtype).items():
            parameters[name].grad = gradient
        norms.append(float(nn.utils.clip_grad_norm_(parameters.values(), SETTINGS.max_grad_norm)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return norms, {name: p.detach() for name, p in parameters.items()}


def _assert_trained(
    results: list, shape: ModelShape, strategy: ParallelStrategy, dtype, order, tolerance
) -> None:
    layout = Layout(shape, "lm", Placement(order, strategy))
    norms, weights = _reference(shape, dtype)
    for rank, (got_norms, got) in enumerate(results):
        assert got_norms == pytest.approx(norms, rel=tolerance)
        torch.testing.assert_close(got, held_slices(layout, rank, weights), rtol=tolerance, atol=tolerance)


CASES = {
    "grouped-tied": (GROUPED, DEGREES, (1, 2, 2)),
    "one-kv-head": (FEW_KV, [(2, 2, 1)], (1, 4, 1)),
    "experts": (EXPERTS, [(1, 2, 2)], (4, 1, 1)),
}
"""Shape, what continuous integration runs of it, and the default suite: the others where their parameters are shared
or cut in another way."""


@pytest.mark.parametrize(
    ("shape", "degrees"),
    [
        pytest.param(
            shape,
            degrees,
            id=f"{name}-{degrees}",
            marks=() if degrees == default else pytest.mark.whole if degrees in whole else pytest.mark.slow,
        )
        for name, (shape, whole, default) in CASES.items()
        for degrees in DEGREES
    ],
)
def test_three_steps_equal_torchs_adamw(ranks, shape: ModelShape, degrees: tuple[int, int, int]) -> None:
    strategy = ParallelStrategy(*degrees)
    order = tuple(range(strategy.size))
    results = ranks.run(strategy.size, _train, shape, strategy, torch.float64, order)
    _assert_trained(results, shape, strategy, torch.float64, order, 1e-12)


@pytest.mark.parametrize(
    "strategy", [ParallelStrategy(3, 1, 1), ParallelStrategy(2, 2, 1), ParallelStrategy(2, 1, 2)], ids=str
)
def test_replicas_may_have_different_passes_in_which_parameters_are_unused(ranks, strategy) -> None:
    order = tuple(range(strategy.size))
    results = ranks.run(strategy.size, _train, GROUPED, strategy, torch.float64, order, True)
    _assert_trained(results, GROUPED, strategy, torch.float64, order, 1e-12)


def _most_gradients(rank: int, world: int) -> tuple[int, int]:
    """(most elements of gradients that a backward pass adds to those before it, elements of the buffer)."""
    gc.freeze()  # what is older is not looked at each time
    shape, strategy = replace(GROUPED, layers=8), ParallelStrategy(dp=world)
    _, slices, optimizer = _begin(shape, strategy, torch.float64, rank)
    gradients = {name: torch.ones_like(p) for name, p in slices.items()}
    before, most = set(_storages()), 0

    def count(_: Tensor) -> None:
        nonlocal most
        most = max(most, sum(size for at, size in _storages().items() if at not in before))

    for parameter in list(slices.values())[::8]:  # about one a layer: a look at all tensors takes long
        parameter.register_post_accumulate_grad_hook(count)
    _backward(optimizer, slices, gradients, parts=2)
    gc.unfreeze()
    return most, sum(p.numel() for p in slices.values())


def _storages() -> dict[int, int]:
    """Address -> elements of the tensors of more than one element that there are."""
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.dtype == torch.float64]
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // 8 for t in tensors if t.numel() > 1
    }


def test_no_rank_has_all_gradients_at_once(ranks) -> None:
    for most, whole in ranks.run(4, _most_gradients):
        assert 0 < most < whole / 3


def _train_on_the_first(rank: int, world: int, strategy: ParallelStrategy) -> list:
    """Three steps without clipping. Only the first dp rank has gradients, so their sum is exact."""
    unclipped = replace(SETTINGS, max_grad_norm=None)
    layout, slices, optimizer = _begin(GROUPED, strategy, torch.float32, rank, unclipped)
    for step, rate in enumerate(RATES, start=1):
        gradients = held_slices(layout, rank, _whole(GROUPED, step, torch.float32))
        _backward(optimizer, slices, {n: g * (rank == 0) for n, g in gradients.items()}, parts=1)
        optimizer.apply(rate)
    return [(s.name, s.kind, s.start, s.stop, s.tensor.clone()) for s in optimizer.shard_state()]


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_no_bit_depends_on_how_the_buffer_is_shared_out(ranks, dp: int) -> None:
    alone, shared = (
        _assemble(
            Layout(GROUPED, "lm", Placement(tuple(range(size)), ParallelStrategy(dp=size))),
            ranks.run(size, _train_on_the_first, ParallelStrategy(dp=size)),
        )
        for size in (1, dp)
    )
    assert all(torch.equal(shared[key], alone[key]) for key in alone)


def _resident_and_offloaded(rank: int, world: int, strategy: ParallelStrategy, dtype: torch.dtype) -> list:
    """Of an optimizer whose state is on the device, and of one whose state is in host memory and comes in chunks:
    norms, weights and state after four steps, of which one is not finite; and of another one, of the other kind, that
    takes over the state before the last step."""

    def stepped(slices: dict[str, nn.Parameter], optimizer: Optimizer, step: int) -> float:
        _backward(optimizer, slices, _contribution(layout, rank, step, dtype), parts=1)
        return optimizer.apply(RATES[0], finite=step != 2).grad_norm

    results = []
    for copies, others in ((None, LazyCopier()), (LazyCopier(), None)):
        layout, slices, optimizer = _begin(GROUPED, strategy, dtype, rank, copies=copies)
        norms = [stepped(slices, optimizer, step) for step in (1, 2, 3)]
        _, again, following = _begin(GROUPED, strategy, dtype, rank, copies=others)
        following.load_shard_state(optimizer.shard_state(), optimizer.step)
        norms += [stepped(slices, optimizer, 4), stepped(again, following, 4)]
        weights = [tensor.detach().clone() for own in (slices, again) for tensor in own.values()]
        state = [s.tensor.clone() for own in (optimizer, following) for s in own.shard_state()]
        results.append((norms, weights, state))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "degrees",
    [
        (1, 2, 2),
        *(pytest.param(d, marks=pytest.mark.whole) for d in DEGREES if prod(d) != 2 and d != (1, 2, 2)),
    ],
    ids=str,
)
def test_every_bit_of_an_offloaded_optimizer_is_that_of_a_resident_one(ranks, degrees, dtype) -> None:
    """Chunks of two vectors of a kernel: the largest shares have several, the last of which is shorter."""
    strategy = ParallelStrategy(*degrees)
    results = ranks.run(strategy.size, _in_small_chunks, strategy, dtype)
    for (norms, weights, state), (other_norms, other_weights, other_state) in results:
        assert norms == other_norms
        assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(state, other_state, strict=True))
        assert all(torch.isfinite(tensor).all() for tensor in (*weights, *state))


def _in_small_chunks(rank: int, world: int, strategy: ParallelStrategy, dtype: torch.dtype) -> list:
    with patch.object(optimizer_module, "CHUNK", 32):
        return _resident_and_offloaded(rank, world, strategy, dtype)


@pytest.mark.parametrize(
    ("shape", "strategy", "order"),
    [
        (GROUPED, ParallelStrategy(dp=3, tp=2), (0, 1, 2, 3, 4, 5)),
        (FEW_KV, ParallelStrategy(dp=3, tp=2), (0, 1, 2, 3, 4, 5)),
        (GROUPED, ParallelStrategy(dp=3, pp=2), (0, 1, 2, 3, 4, 5)),
        (GROUPED, ParallelStrategy(dp=3, pp=2), (4, 0, 3, 1, 5, 2)),
        (GROUPED, ParallelStrategy(dp=3, tp=2), (4, 0, 3, 1, 5, 2)),
    ],
    ids=["kv-heads", "one-kv-head", "tied-ends", "shuffled", "shuffled-tp"],
)
def test_copies_of_a_row_never_differ_in_a_bit(ranks, shape: ModelShape, strategy, order) -> None:
    """Three summands, the fewest whose order shows, in buffers where copies lie at different places."""
    layout = Layout(shape, "lm", Placement(order, strategy))
    results = ranks.run(6, _train, shape, strategy, torch.float32, order)
    n_pieces = 0
    for name, spec in layout.specs.items():
        copies: dict[tuple[int, int], list[Tensor]] = {}
        for dp_rank in range(strategy.dp):
            for piece in layout.shared(name, dp_rank):
                for device in piece.devices:
                    at = piece.interval.within(layout.held(device)[name])
                    rows = results[device][1][name].narrow(spec.dim, at.start, piece.interval.size)
                    copies.setdefault(tuple(piece.interval), []).append(rows)
        for rows, (first, *others) in copies.items():
            assert all(torch.equal(first, other) for other in others), (name, rows)
            n_pieces += len(others)
    assert n_pieces >= 5, "nothing is shared"
    _assert_trained(results, shape, strategy, torch.float32, order, 1e-5)


def test_bfloat16_weights_follow_float32_master_weights(ranks) -> None:
    """Steps far below bfloat16's resolution add up in the master weights."""
    (moved,) = ranks.run(1, _creep)
    assert moved == pytest.approx(1 - 100 * 1e-3, abs=0.004)


def _creep(rank: int, world: int) -> float:
    plain = replace(SETTINGS, weight_decay=0.0, max_grad_norm=None)
    layout, slices, optimizer = _begin(FEW_KV, ParallelStrategy(), torch.bfloat16, rank, plain)
    ones = {s.name: torch.ones(s.shape) for s in layout.parameters}
    optimizer.load_shard_state(
        [s._replace(tensor=ones[s.name].flatten() * (s.kind == "master")) for s in optimizer.shard_state()], 0
    )
    for _ in range(100):
        _backward(optimizer, slices, {name: torch.ones_like(p) for name, p in slices.items()}, parts=1)
        optimizer.apply(1e-3)
    return float(slices["model.norm.weight"][0])


def _skip(rank: int, world: int, strategy: ParallelStrategy, culprit: str):
    layout, slices, optimizer = _begin(GROUPED, strategy, torch.float64, rank)
    before = {name: p.detach().clone() for name, p in slices.items()}
    gradients = _contribution(layout, rank, 1, torch.float64)
    if culprit == "gradient" and rank == world - 1:
        next(iter(gradients.values()))[0] = float("nan")
    _backward(optimizer, slices, gradients, parts=1)
    skipped = optimizer.apply(1e-2, finite=not (culprit == "loss" and rank == 0)).skipped
    unchanged = all(torch.equal(p, before[name]) for name, p in slices.items())
    steps = optimizer.step
    for step, rate in enumerate(RATES, start=1):
        _backward(optimizer, slices, _contribution(layout, rank, step, torch.float64), parts=1)
        optimizer.apply(rate)
    return skipped, unchanged, steps, {name: p.detach().clone() for name, p in slices.items()}


@pytest.mark.parametrize("strategy", [ParallelStrategy(2, 1, 1), ParallelStrategy(1, 2, 2)], ids=str)
@pytest.mark.parametrize("culprit", ["gradient", "loss"])
def test_a_step_that_is_not_finite_leaves_no_trace_on_any_rank(ranks, strategy, culprit: str) -> None:
    layout = Layout(GROUPED, "lm", Placement(tuple(range(strategy.size)), strategy))
    _, weights = _reference(GROUPED, torch.float64)
    for rank, result in enumerate(ranks.run(strategy.size, _skip, strategy, culprit)):
        assert result[:3] == (True, True, 0)
        torch.testing.assert_close(result[3], held_slices(layout, rank, weights), rtol=1e-12, atol=1e-12)


def _save_and_load(rank: int, world: int, strategy: ParallelStrategy, pieces: dict | None):
    """Train two steps and give the state, or load it and train the third."""
    layout, slices, optimizer = _begin(GROUPED, strategy, torch.float64, rank)
    steps = (1, 2) if pieces is None else (3,)
    if pieces is not None:
        optimizer.load_shard_state(_local(layout, rank, pieces), step=2)
    for step in steps:
        _backward(optimizer, slices, _contribution(layout, rank, step, torch.float64), parts=1)
        optimizer.apply(RATES[step - 1])
    state = [(s.name, s.kind, s.start, s.stop, s.tensor.clone()) for s in optimizer.shard_state()]
    return {name: p.detach().clone() for name, p in slices.items()}, state


def _local(layout: Layout, rank: int, whole: dict) -> Iterator[StateShard]:
    """Whole parameters' state, cut for a rank into halves of its slice."""
    for (name, kind), tensor in whole.items():
        if name in layout.held(rank):
            rows = layout.held(rank)[name]
            flat = tensor.narrow(layout.specs[name].dim, rows.start, rows.size).flatten()
            half = flat.numel() // 2
            yield StateShard(name, kind, 0, half, flat[:half])
            yield StateShard(name, kind, half, flat.numel(), flat[half:])


def _assemble(layout: Layout, states: list) -> dict:
    """Whole tensors from all ranks' shards; every element must have been given."""
    whole = {}
    for rank, state in enumerate(states):
        for name, kind, start, stop, tensor in state:
            spec, rows = layout.specs[name], layout.held(rank)[name]
            full = whole.setdefault((name, kind), torch.full(spec.shape, torch.nan, dtype=tensor.dtype))
            view = full.narrow(spec.dim, rows.start, rows.size)
            flat = view.flatten()
            flat[start:stop] = tensor
            view.copy_(flat.view_as(view))
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


@pytest.mark.parametrize("target", [ParallelStrategy(1, 2, 2), ParallelStrategy(4, 1, 1)], ids=str)
def test_state_moves_into_another_layout(ranks, target: ParallelStrategy) -> None:
    source = ParallelStrategy(2, 2, 1)
    layout = Layout(GROUPED, "lm", Placement((0, 1, 2, 3), source))
    results = ranks.run(4, _save_and_load, source, None)
    state = _assemble(layout, [state for _, state in results])
    assert {kind for _, kind in state} == {"master", "exp_avg", "exp_avg_sq"}
    _, weights = _reference(GROUPED, torch.float64)
    layout = Layout(GROUPED, "lm", Placement((0, 1, 2, 3), target))
    for rank, (got, _) in enumerate(ranks.run(4, _save_and_load, target, state)):
        torch.testing.assert_close(got, held_slices(layout, rank, weights), rtol=1e-12, atol=1e-12)


def test_missing_state_is_named(ranks) -> None:
    with pytest.raises(RuntimeError, match=r"optimizer state master of .*elements are missing"):
        ranks.run(1, _save_and_load, ParallelStrategy(), {})
