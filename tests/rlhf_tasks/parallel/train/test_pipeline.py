"""The schedules on stages of one linear layer, against the same layers in one process."""

import pytest
import torch
from torch import Tensor, nn

from rlhf_tasks.parallel.batch.micro_batch import MicroBatch, split
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.train.pipeline import Pipeline

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
    pipeline = Pipeline(placement, groups, HIDDEN, torch.float64)
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
