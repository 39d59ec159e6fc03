"""Products by oneDNN against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from rlhf_tasks.parallel.model import products as module
from rlhf_tasks.parallel.model.products import OneDNNProducts, products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (1, 70, 33), (0, 7)], ids=str)
def test_a_product_and_its_gradients_equal_float64s(shape: tuple[int, ...], bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(*s, generator=generator) for s in (shape, (19, shape[-1]), (19,), (*shape[:-1], 19))]
    results = []
    for dtype, context in ((torch.float32, OneDNNProducts()), (torch.float64, module.nullcontext())):
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
    with OneDNNProducts():
        F.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, 3))
    assert weight.grad is None


def test_a_product_may_be_changed_in_place_as_a_sum_over_ranks_does() -> None:
    x, weight = torch.randn(1, 4, 3, requires_grad=True), torch.randn(2, 3)
    with OneDNNProducts():
        y = F.linear(x, weight)
        y.mul_(2)
        y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * weight.sum(0).expand(1, 4, 3))


def test_a_gradient_that_is_expanded_or_transposed_is_computed_too() -> None:
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(3, 2).t().requires_grad_()
    with OneDNNProducts():
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
        assert isinstance(products(torch.device("cpu"), dtype), OneDNNProducts) == taken
    finally:
        module._mkl_is_slow.cache_clear()
