"""A router and its experts, against the formula token by token."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlhf_tasks.parallel.model.experts import Experts, MixtureOfExperts, Router, _collect, _spread, can_group

CPU = torch.device("cpu")
EXPERTS, HIDDEN, COLUMNS, PER_TOKEN = 5, 8, 12, 2


def mixture(
    normalised: bool, rows: int = 1, grouped: bool = False, columns: int = COLUMNS
) -> MixtureOfExperts:
    """In float64, so that no order of a sum shows."""
    torch.manual_seed(2)
    router = Router(EXPERTS, HIDDEN, PER_TOKEN, normalised, CPU)
    block = MixtureOfExperts(
        router, Experts(EXPERTS, HIDDEN, columns, F.silu, CPU, grouped, rows), None
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
    rows = _spread(x, tokens, places)
    assert rows.flatten().tolist() == [3.0, 1.0, 2.0, 1.0, 3.0, 2.0]
    factors = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
    total = _collect(rows * factors, tokens, places)
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
