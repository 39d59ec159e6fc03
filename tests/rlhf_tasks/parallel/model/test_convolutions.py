"""Causal convolutions of packed sequences."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.model.convolutions import causal_convolution

CHANNELS, KERNEL = 3, 4


def of_one(x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """torch's convolution of one sequence [L, channels] with zeros before it."""
    padded = F.pad(x.T, (KERNEL - 1, 0))
    return F.conv1d(padded[None], weights[:, None], bias, groups=CHANNELS)[0].T


@pytest.fixture
def weights() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(CHANNELS, KERNEL, dtype=torch.float64)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("lengths", [(6,), (1, 1), (2, 9, 1, 3)])
def test_no_token_reads_another_sequence(weights: Tensor, lengths: tuple[int, ...], biased: bool):
    x = torch.randn(sum(lengths), CHANNELS, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(CHANNELS, dtype=torch.float64) if biased else None
    ours, _ = causal_convolution(x, weights, bias, lengths, None)
    expected = torch.cat([of_one(part, weights, bias) for part in x.split(lengths)])
    torch.testing.assert_close(ours, expected)
    [gradient] = torch.autograd.grad(ours.square().sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), x)[0])


@pytest.mark.parametrize("cuts", [(1, 1, 1, 1, 6), (2, 8), (5, 1, 4)])
def test_a_sequence_goes_on_from_its_last_inputs(weights: Tensor, cuts: tuple[int, ...]):
    """Also where they are fewer than the kernel reaches back. Another sequence goes on beside it."""
    x, other = torch.randn(2, sum(cuts), CHANNELS, dtype=torch.float64)
    before, parts = None, []
    for part, beside in zip(x.split(cuts), other.split(cuts), strict=True):
        y, before = causal_convolution(torch.cat([part, beside]), weights, None, (len(part),) * 2, before)
        parts.append(y[: len(part)])
    torch.testing.assert_close(torch.cat(parts), of_one(x, weights, None))
