"""Products by oneDNN, in float32 and with packed weights against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from prefect_rlhf.rlhf_tasks.parallel.model import products as module
from prefect_rlhf.rlhf_tasks.parallel.model.products import (
    PackedWeights,
    Products,
    by_onednn,
    can_pack,
    in_float32,
    linear,
    products,
    widens,
)

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (1, 70, 33), (0, 7)], ids=str)
def test_a_product_and_its_gradients_equal_float64s(shape: tuple[int, ...], bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(*s, generator=generator) for s in (shape, (19, shape[-1]), (19,), (*shape[:-1], 19))]
    results = []
    for dtype, context in ((torch.float32, Products(by_onednn)), (torch.float64, module.nullcontext())):
        x, weight, offset, slope = (t.to(dtype, copy=True).requires_grad_() for t in drawn)
        with context:
            y = F.linear(x, weight, offset) if bias else F.linear(x, weight)
            names = [y.grad_fn.name(), *(f.name() for f, _ in y.grad_fn.next_functions if f is not None)]
            assert any("_Product" in name for name in names) == (dtype == torch.float32)
            (y * slope.detach()).sum().backward()
        results.append([y.detach(), x.grad, weight.grad, *([offset.grad] if bias else [])])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact.float(), rtol=1e-5, atol=1e-5)


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3)
    with Products(by_onednn):
        F.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, 3))
    assert weight.grad is None


def test_a_product_may_be_changed_in_place_as_a_sum_over_ranks_does() -> None:
    x, weight = torch.randn(1, 4, 3, requires_grad=True), torch.randn(2, 3)
    with Products(by_onednn):
        y = F.linear(x, weight)
        y.mul_(2)
        y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * weight.sum(0).expand(1, 4, 3))


def test_a_gradient_that_is_expanded_or_transposed_is_computed_too() -> None:
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(3, 2).t().requires_grad_()
    with Products(by_onednn):
        F.linear(x.t().contiguous().t(), weight).t().sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(4, 3))


@pytest.mark.parametrize(
    ("vendor", "capability", "dtype", "taken"),
    [
        ("AuthenticAMD", "AVX512", torch.float32, True),
        ("AuthenticAMD", "AVX512", torch.float64, False),
        ("AuthenticAMD", "AVX512", torch.bfloat16, False),
        ("AuthenticAMD", "AVX2", torch.float32, False),
        ("GenuineIntel", "AVX512", torch.float32, False),
    ],
)
def test_onednn_is_taken_for_float32_where_mkl_leaves_avx512_unused(
    monkeypatch, tmp_path, vendor, capability, dtype, taken
) -> None:
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(module, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    module._mkl_is_slow.cache_clear()
    try:
        monkeypatch.setattr(module, "_multiplies_bfloat16", lambda: True)
        assert isinstance(products(CPU, dtype), Products) == taken
    finally:
        module._mkl_is_slow.cache_clear()


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_of_bfloat16_in_float32_is_rounded_once(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(*s, generator=generator).bfloat16() for s in ((1, 70, 33), (19, 33), (19,), (1, 70, 19))
    ]
    x, weight, offset, slope = (t.requires_grad_() for t in drawn)
    with Products(in_float32):
        y = F.linear(x, weight, offset) if bias else F.linear(x, weight)
        (y * slope.detach()).sum().backward()
    wide, of_weight, of_bias, of_y = (t.detach().float() for t in drawn)
    assert torch.equal(y, (wide @ of_weight.t() + bias * of_bias).bfloat16())
    torch.testing.assert_close(x.grad, (of_y @ of_weight).bfloat16())
    torch.testing.assert_close(weight.grad, (of_y[0].t() @ wide[0]).bfloat16())
    if bias:
        torch.testing.assert_close(offset.grad, of_y.sum((0, 1)).bfloat16())


@pytest.mark.parametrize("multiplied", [True, False])
def test_bfloat16_is_widened_where_the_cpu_cannot_multiply_it(monkeypatch, multiplied: bool) -> None:
    monkeypatch.setattr(module, "_multiplies_bfloat16", lambda: multiplied)
    assert widens(CPU, torch.bfloat16) != multiplied
    assert isinstance(products(CPU, torch.bfloat16), Products) != multiplied
    assert not widens(CPU, torch.float32)
    assert not widens(CPU, torch.float64)
    assert not widens(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 48), (1, 3, 48), (64, 48), (1, 130, 48)])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_packed_weights_give_the_products_of_others(dtype: torch.dtype, shape: tuple[int, ...], bias: bool):
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
    x, first, second = torch.eye(4), torch.full((4, 4), 1.0), torch.full((4, 4), 2.0)
    with PackedWeights():
        assert torch.equal(linear(x, first), first)
        assert torch.equal(linear(x, second), second)
        first.fill_(5.0)
        assert torch.equal(linear(x, first), torch.full((4, 4), 1.0)), "the copy made at first use"
        assert torch.equal(linear(x[:2], second), second[:2])
    assert torch.equal(linear(x, first), first)


def test_what_can_be_packed_and_what_cannot():
    assert can_pack(CPU, torch.float32)
    assert can_pack(CPU, torch.bfloat16)
    assert not can_pack(CPU, torch.float64)
    assert not can_pack(torch.device("cuda"), torch.float32)
