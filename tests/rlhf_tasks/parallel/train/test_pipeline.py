"""The schedules on stages of one linear layer, against the same layers in one process."""

import pytest
import torch
from torch import Tensor, nn

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch, split
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.model.attention import packed_attention
from prefect_rlhf.rlhf_tasks.parallel.train.pipeline import Pipeline, sums_in_order
from tests.tiny_models import packed

HIDDEN = 5
LAYERS = 4


def _layers() -> list[nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Embedding(7, HIDDEN), *[nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS - 1)]]
    return [layer.double() for layer in layers]


def _micros(count: int) -> list[MicroBatch]:
    """Micro-batches of different token counts."""
    lengths = [3, 1, 4, 1, 5, 2][:count]
    tokens = torch.arange(sum(lengths)) % 7
    return split(SampleBatch(tuple(range(count)), {"input_ids": Packed(tokens, tuple(lengths))}), count)


def _score(hidden: Tensor, micro: MicroBatch) -> Tensor:
    return (hidden.sin() * (1 + micro.position_ids[:, None])).sum()


def _on_ranks(rank: int, world: int, count: int, order: tuple[int, ...]):
    placement = Placement(order, ParallelStrategy(pp=world))
    groups = ProcessGroups(device_sets(placement), 240.0, torch.device("cpu"))
    pipeline = Pipeline(
        placement, groups, (HIDDEN, HIDDEN), torch.float64, lambda micro: micro.computed_tokens
    )
    stage = placement.coordinate(rank).pp
    mine = _layers()[stage * LAYERS // world : (stage + 1) * LAYERS // world]
    alive, most_alive = 0, 0

    def run(x: Tensor, micro: MicroBatch) -> Tensor:
        nonlocal alive, most_alive
        for layer in mine:
            x = layer(x)
        x = _score(x, micro) if pipeline.is_last else x
        if x.requires_grad:
            alive += 1
            most_alive = max(most_alive, alive)
            x.register_hook(lambda _: _released())
        return x

    def _released() -> None:
        nonlocal alive
        alive -= 1

    scores = [score.item() for score in pipeline.forward(_micros(count), run)]
    pipeline.forward_backward(_micros(count), run)
    gradients = [p.grad for layer in mine for p in layer.parameters()]
    return stage, scores, gradients, most_alive


@pytest.mark.dist
@pytest.mark.parametrize("count", [0, 1, 2, 6])
@pytest.mark.parametrize("order", [(0,), (1, 0), (2, 0, 3, 1)], ids=["pp1", "pp2", "pp4"])
def test_scores_and_gradients_equal_one_process(ranks, order: tuple[int, ...], count: int) -> None:
    layers = _layers()
    scores = []
    for micro in _micros(count):
        x = micro.input_ids
        for layer in layers:
            x = layer(x)
        scores.append(_score(x, micro))
    want = [None] * 8
    if scores:
        sum(scores).backward()
        want = [p.grad for layer in layers for p in layer.parameters()]
    results = sorted(ranks.run(len(order), _on_ranks, count, order), key=lambda result: result[0])
    assert results[-1][1] == pytest.approx([score.item() for score in scores], rel=1e-12)
    assert all(result[1] == [] for result in results[:-1])
    got = [gradient for result in results for gradient in result[2]]
    for ours, theirs in zip(got, want, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for stage, _, _, most_alive in results:
        assert most_alive == min(count, len(order) - stage)


def test_cuda_kernels_sum_in_order_during_backward_passes_only():
    seen = []
    for kind in ("cuda", "cpu"):
        with sums_in_order(torch.device(kind)):
            seen.append(torch.are_deterministic_algorithms_enabled())
        seen.append(torch.are_deterministic_algorithms_enabled())
    assert seen == [True, False, False, False]
    with pytest.raises(KeyError), sums_in_order(torch.device("cuda")):
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled(), "also after an error"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_on_a_gpu_have_the_same_bits_every_time(dtype):
    """Long sequences: several blocks of keys add to the gradient of one block of queries."""
    cuda = torch.device("cuda")
    groups = type("Groups", (), {"rank": 0, "device": cuda, "__getitem__": lambda *_: None})()
    pipeline = Pipeline(Placement((0,), ParallelStrategy()), groups, (HIDDEN, HIDDEN), dtype)  # type: ignore[arg-type]
    micro = packed([torch.arange(1500) % 7 for _ in range(4)])
    on_gpu = (x.to(cuda) for x in (micro.input_ids, micro.cu_seqlens, micro.position_ids))
    micro = MicroBatch(*on_gpu, micro.ids, micro.lengths, {})
    module, found = nn.Module(), []
    module.kv_index = None
    for _ in range(4):
        torch.manual_seed(0)
        tables = [torch.randn(7, 2 * 64, device=cuda, dtype=dtype, requires_grad=True) for _ in range(3)]

        def run(x: Tensor, micro: MicroBatch, tables=tables) -> Tensor:
            heads = [table[x].unflatten(-1, (2, 64)).transpose(0, 1)[None] for table in tables]
            output, _ = packed_attention(module, *heads, None, scaling=0.3, micro=micro)
            return output.float().square().sum()

        pipeline.forward_backward([micro], run)
        found.append([table.grad for table in tables])
    for again in found[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(again, found[0], strict=True))
