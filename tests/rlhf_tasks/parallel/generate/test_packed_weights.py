"""Packed weights give the products that unpacked ones give."""

import pytest
import torch

from rlhf_tasks.parallel.generate.generation import PackedWeights, can_pack
from rlhf_tasks.parallel.model.products import linear

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 48), (1, 3, 48), (64, 48), (1, 130, 48)])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_products_are_equal(dtype: torch.dtype, shape: tuple[int, ...], bias: bool):
    if not can_pack(CPU, dtype):
        pytest.skip(f"this CPU packs no {dtype}")
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(37, 48).to(dtype)
    of_bias = torch.randn(37).to(dtype) if bias else None
    expected = linear(x, weight, of_bias)
    with PackedWeights():
        ours = linear(x, weight, of_bias)
    assert (ours.dtype, ours.is_contiguous()) == (dtype, True)
    torch.testing.assert_close(ours, expected)


@torch.inference_mode()
def test_each_weight_is_packed_once_and_only_in_the_context():
    if not can_pack(CPU, torch.float32):
        pytest.skip("this build packs no weights")
    x, first, second = torch.eye(4), torch.full((4, 4), 1.0), torch.full((4, 4), 2.0)
    with PackedWeights():
        assert torch.equal(linear(x, first), first)
        assert torch.equal(linear(x, second), second)
        first.fill_(5.0)
        assert torch.equal(linear(x, first), torch.full((4, 4), 1.0)), "the copy made at first use"
        assert torch.equal(linear(x[:2], second), second[:2])
    assert torch.equal(linear(x, first), first)


def test_what_can_be_packed_and_what_cannot():
    # so that the tests above are left out for want of oneDNN or bfloat16 alone, never by a fault of ours
    assert can_pack(CPU, torch.float32) == torch.backends.mkldnn.is_available()
    assert not can_pack(CPU, torch.float64)
    assert not can_pack(torch.device("cuda"), torch.float32)
