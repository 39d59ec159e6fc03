"""The building blocks of tensor parallelism: two ranks equal one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rlhf_tasks.parallel.comm.groups import ProcessGroups
from rlhf_tasks.parallel.layout.slices import Interval, split
from rlhf_tasks.parallel.model.tensor_parallel import (
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_ranks,
    sum_over_ranks,
)

CPU = torch.device("cpu")


def _group(world: int):
    return ProcessGroups([range(world)], 240.0, CPU)[range(world)]


def test_without_a_group_nothing_happens():
    x = torch.ones(2)
    assert copy_to_ranks(x, None) is x
    assert sum_over_ranks(x, None) is x


def _f_and_g(rank: int, world: int) -> None:
    group = _group(world)
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    copied = copy_to_ranks(x, group)
    assert copied.tolist() == [2.0, 3.0]
    total = sum_over_ranks(copied * (rank + 1), group)
    assert total.tolist() == [6.0, 9.0]
    total.backward(torch.tensor([1.0, 10.0]))
    # g hands the gradient on as it is; f sums the ranks' contributions 1 and 2
    assert x.grad.tolist() == [3.0, 30.0]


@pytest.mark.dist
def test_f_and_g(ranks):
    ranks.run(2, _f_and_g)


def _block(rank: int, world: int) -> None:
    """A linear module split by columns, one split by rows, against both whole."""
    torch.manual_seed(0)
    first, last = nn.Linear(6, 7), nn.Linear(7, 5)
    x = torch.randn(4, 6, requires_grad=True)
    expected = last(F.silu(first(x)))
    expected.square().sum().backward()
    columns, group = split(7, world, rank), _group(world)
    mine = RowParallelLinear(columns.size, 5, True, group, CPU)
    rows = slice(*columns)
    mine.weight.data.copy_(last.weight[:, rows])
    mine.bias.data.copy_(last.bias)
    y = x.detach().clone().requires_grad_()
    inner = F.silu(F.linear(copy_to_ranks(y, group), first.weight[rows], first.bias[rows]))
    output = mine(inner)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    torch.testing.assert_close(mine.weight.grad, last.weight.grad[:, rows])
    torch.testing.assert_close(mine.bias.grad, last.bias.grad)


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_a_block_split_over_ranks(ranks, world: int):
    ranks.run(world, _block)


def _embedding(rank: int, world: int) -> None:
    torch.manual_seed(0)
    whole = nn.Embedding(7, 3, padding_idx=2)
    tokens = torch.tensor([6, 0, 2, 3, 3, 2])
    weight = torch.arange(18.0).view(6, 3)
    expected = whole(tokens) * 2.0
    (expected * weight).sum().backward()
    vocab = split(7, world, rank)
    mine = VocabParallelEmbedding(vocab, 3, _group(world), CPU, scale=2.0, padding_idx=2)
    mine.weight.data.copy_(whole.weight[slice(*vocab)])
    output = mine(tokens)
    assert torch.equal(output, expected)
    (output * weight).sum().backward()
    assert torch.equal(mine.weight.grad, whole.weight.grad[slice(*vocab)])


@pytest.mark.dist
def test_an_embedding_split_over_ranks(ranks):
    ranks.run(3, _embedding)


def test_a_whole_embedding():
    embedding = VocabParallelEmbedding(Interval(0, 4), 3, None, CPU, scale=0.5)
    embedding.weight.data.copy_(torch.arange(12.0).view(4, 3))
    assert embedding(torch.tensor([3])).tolist() == [[4.5, 5.0, 5.5]]


def test_the_embeddings_scale_is_rounded_once_and_makes_no_tensor_later(monkeypatch):
    embedding = VocabParallelEmbedding(Interval(0, 4), 3, None, CPU, scale=3072**0.5)
    embedding.weight.data = torch.ones(4, 3, dtype=torch.bfloat16)
    assert embedding(torch.tensor([3])).tolist() == [[55.5] * 3]
    token = torch.tensor([1])
    monkeypatch.delattr(torch, "tensor")  # what a CUDA graph would not record
    assert embedding(token).tolist() == [[55.5] * 3]
