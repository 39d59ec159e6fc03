"""The building blocks of tensor parallelism: two ranks equal one. Experts, against the formula token by token."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, split
from prefect_rlhf.rlhf_tasks.parallel.model.tensor_parallel import (
    Experts,
    MixtureOfExperts,
    Router,
    RowParallelLinear,
    VocabParallelEmbedding,
    _Collect,
    _Spread,
    can_group,
    copy_to_ranks,
    gated,
    sum_over_ranks,
)

CPU = torch.device("cpu")


def _group(world: int):
    return ProcessGroups([range(world)], 240.0, CPU)[range(world)]


def test_without_a_group_nothing_happens():
    x = torch.ones(2)
    assert copy_to_ranks(x, None) is x
    assert sum_over_ranks(x, None) is x


def _f_and_g(rank: int, world: int) -> list[list[float]]:
    """What both give forward, and the gradient."""
    group = _group(world)
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    copied = copy_to_ranks(x, group)
    total = sum_over_ranks(copied * (rank + 1), group)
    total.backward(torch.tensor([1.0, 10.0]))
    return [copied.tolist(), total.tolist(), x.grad.tolist()]


@pytest.mark.dist
def test_f_and_g(ranks):
    """g hands the gradient on as it is; f sums the ranks' contributions 1 and 2."""
    assert ranks.run(2, _f_and_g) == [[[2.0, 3.0], [6.0, 9.0], [3.0, 30.0]]] * 2


def _two_linears() -> tuple[nn.Linear, nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(6, 7), nn.Linear(7, 5), torch.randn(4, 6, requires_grad=True)


def _block(rank: int, world: int) -> list[Tensor]:
    """A linear module split by columns, one split by rows: their output, and gradients."""
    first, last, x = _two_linears()
    columns, group = split(7, world, rank), _group(world)
    mine = RowParallelLinear(columns.size, 5, True, group, CPU)
    rows = slice(*columns)
    mine.weight.data.copy_(last.weight[:, rows])
    mine.bias.data.copy_(last.bias)
    output = mine(F.silu(F.linear(copy_to_ranks(x, group), first.weight[rows], first.bias[rows])))
    output.square().sum().backward()
    return [output.detach(), x.grad, mine.weight.grad, mine.bias.grad]


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_a_block_split_over_ranks(ranks, world: int):
    first, last, x = _two_linears()
    output = last(F.silu(first(x)))
    output.square().sum().backward()
    for rank, of_rank in enumerate(ranks.run(world, _block)):
        of_weight = last.weight.grad[:, slice(*split(7, world, rank))]
        torch.testing.assert_close(of_rank, [output.detach(), x.grad, of_weight, last.bias.grad])


TOKENS = torch.tensor([6, 0, 2, 3, 3, 2])
FACTORS = torch.arange(18.0).view(6, 3)


def _whole_embedding() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(7, 3, padding_idx=2)


def _embedding(rank: int, world: int) -> tuple[Tensor, Tensor]:
    vocab = split(7, world, rank)
    mine = VocabParallelEmbedding(vocab, 3, _group(world), CPU, scale=2.0, padding_idx=2)
    mine.weight.data.copy_(_whole_embedding().weight[slice(*vocab)])
    output = mine(TOKENS)
    (output * FACTORS).sum().backward()
    return output.detach(), mine.weight.grad


@pytest.mark.dist
def test_an_embedding_split_over_ranks(ranks):
    whole = _whole_embedding()
    expected = whole(TOKENS) * 2.0
    (expected * FACTORS).sum().backward()
    for rank, (output, gradient) in enumerate(ranks.run(3, _embedding)):
        assert torch.equal(output, expected)
        assert torch.equal(gradient, whole.weight.grad[slice(*split(7, 3, rank))])


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


EXPERTS, HIDDEN, COLUMNS, PER_TOKEN = 5, 8, 12, 2


def mixture(
    normalised: bool, rows: int = 1, grouped: bool = False, columns: int = COLUMNS
) -> MixtureOfExperts:
    """In float64, so that no order of a sum shows."""
    torch.manual_seed(2)
    router = Router(EXPERTS, HIDDEN, PER_TOKEN, normalised, CPU)
    block = MixtureOfExperts(
        router, Experts(EXPERTS, HIDDEN, columns, gated(F.silu), CPU, grouped, rows), None
    ).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    return block


def plainly(block: MixtureOfExperts, x: Tensor) -> Tensor:
    """The weighted sum over all experts, of which those that were not chosen weigh nothing."""
    probabilities = (x @ block.gate.weight.T).softmax(-1)
    least = probabilities.sort(-1, descending=True).values[:, PER_TOKEN - 1, None]
    weights = probabilities.masked_fill(probabilities < least, 0.0)
    if block.gate.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    experts = block.experts
    inner = F.silu(torch.einsum("th,eih->tei", x, experts.gate_proj))
    inner = inner * torch.einsum("th,eih->tei", x, experts.up_proj)
    return torch.einsum("tei,ehi,te->th", inner, experts.down_proj, weights)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts(normalised: bool, rows: int, tokens: int):
    """So are all its gradients; an expert without a token has none but zeros."""
    block = mixture(normalised, rows)
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(tokens, HIDDEN, dtype=torch.float64)
    inputs = (x, *block.parameters())
    ours, theirs = block(x[None])[0], plainly(block, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    mine = torch.autograd.grad((ours * weights).sum(), inputs)
    torch.testing.assert_close(
        mine, torch.autograd.grad((theirs * weights).sum(), inputs), rtol=1e-10, atol=1e-12
    )
    chosen = set(block.gate(x)[0].flatten().tolist())
    idle = [number for number in range(EXPERTS) if number not in chosen]
    assert bool(idle) == (tokens == 1)
    assert all(not gradient[number].any() for gradient in mine[2:] for number in idle)


def test_tokens_reach_the_pairs_and_come_back_summed():
    x = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    tokens = torch.tensor([2, 0, 1, 0, 2, 1], dtype=torch.int32)
    places = torch.tensor([[1, 3], [5, 2], [4, 0]])
    rows = _Spread.apply(x, tokens, places)
    assert rows.flatten().tolist() == [3.0, 1.0, 2.0, 1.0, 3.0, 2.0]
    factors = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
    total = _Collect.apply(rows * factors, tokens, places)
    assert total.flatten().tolist() == [6.0, 18.0, 18.0]
    total.backward(torch.tensor([[1.0], [10.0], [100.0]]))
    assert x.grad.flatten().tolist() == [6.0, 90.0, 600.0]


def test_probabilities_of_16_bit_models_are_float32():
    """Rounded to 8 bits, the weights of many experts could not be told apart."""
    block = mixture(normalised=True).bfloat16()
    x = torch.randn(9, HIDDEN).bfloat16()
    _, weights = block.gate(x)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))
    assert block(x).dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 1e-5),
        pytest.param("cuda", torch.bfloat16, 5e-2, marks=pytest.mark.gpu),
    ],
)
def test_products_in_one_kernel_give_what_those_in_turn_give(tokens: int, device, dtype, tolerance: float):
    """The kernel is for GPUs; on CPUs torch computes the same, in float32. Idle experts have zeros for gradients."""
    x, weights = torch.randn(2, tokens, HIDDEN).to(device, dtype)
    assert device == "cpu" or can_group(torch.device(device), dtype, HIDDEN, 16)
    found = []
    for grouped in (False, True):
        block, mine = mixture(True, grouped=grouped, columns=16).to(device, dtype), x.clone().requires_grad_()
        output = block(mine)
        gradients = torch.autograd.grad((output * weights).sum(), (mine, *block.parameters()))
        found.append((output, *gradients))
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("device", "dtype", "columns", "can"),
    [
        ("cuda", torch.bfloat16, 96, True),
        ("cuda", torch.bfloat16, 100, False),
        ("cuda", torch.float32, 96, False),
        ("cpu", torch.bfloat16, 96, False),
    ],
)
def test_one_kernel_is_for_16_bits_on_gpus_and_columns_that_it_can_read(device, dtype, columns, can):
    assert can_group(torch.device(device), dtype, 64, columns) == can


class Rows(TorchFunctionMode):
    """The numbers of rows of all products inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            self.seen.add(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def test_products_have_few_numbers_of_rows():
    """On CPUs, each of which a library compiles for anew."""
    block, x = mixture(normalised=True, rows=4), torch.randn(41, HIDDEN, dtype=torch.float64)
    counts = block.gate(x)[0].flatten().bincount(minlength=EXPERTS).tolist()
    assert any(count > 4 and count % 4 for count in counts)
    with Rows() as rows:
        block.experts(x, *block.gate(x))
    assert rows.seen - {41} == {count if count < 4 else -(-count // 4) * 4 for count in counts if count}
