"""The matrix products of a model. In float32 they are computed by oneDNN on CPUs where it is faster than MKL, which
torch takes for them.

MKL uses AVX-512 only on Intel's CPUs. Measured on an AMD EPYC with AVX-512, one thread, 1,024 to 6,144 rows, weights
of 0.3 to 2 million elements: MKL 98 to 108 GFLOP/s; oneDNN 222 to 236 forward, 219 to 235 for the gradient of the
input, 155 to 194 for that of the weight. In bfloat16 torch takes oneDNN by itself.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU_INFO = Path("/proc/cpuinfo")
INSTEAD: ContextVar[Callable[[Tensor, Tensor, Tensor | None], Tensor] | None] = ContextVar(
    "product", default=None
)
"""What computes `linear`; None: `F.linear`. A TorchFunctionMode adds 2.5 microseconds to each operator of torch, so a
millisecond to a decoding step."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., columns] times the transpose of weight [rows, columns], plus bias [rows] -> [..., rows]."""
    product = INSTEAD.get()
    return F.linear(x, weight, bias) if product is None else product(x, weight, bias)


def products(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """A context in which `F.linear` is computed by the faster library. Backward passes belong inside it."""
    if device.type == "cpu" and dtype == torch.float32 and _mkl_is_slow():
        return OneDNNProducts()
    return nullcontext()


@cache
def _mkl_is_slow() -> bool:
    """A property of the machine, not a measurement: a resumed run must compute as before."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "GenuineIntel" not in CPU_INFO.read_text(encoding="utf-8")
    )


class OneDNNProducts(TorchFunctionMode):
    """Computes `F.linear` and its gradients by oneDNN. For float32 on the CPU."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs:
            x, weight, *bias = args
            # A matrix, because what the operator returns for more dims is a view, and a sum over ranks is in place.
            rows = x.reshape(-1, x.shape[-1])
            y: Any = _Product.apply(rows, weight, *(bias or [None]))
            return y.view(*x.shape[:-1], y.shape[-1])
        return func(*args, **(kwargs or {}))


class _Product(torch.autograd.Function):
    """y = x W^T + b of a matrix x, with dx = dy W, dW = dy^T x and db = the sum of dy's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        rows = gradient.contiguous()
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            _multiply(rows, weight.t()) if for_x else None,
            _multiply(rows.t(), x.t()) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, columns] times the transpose of weight [rows, columns] -> [n, rows]."""
    if x.numel() == 0:
        return F.linear(x, weight, bias)
    # The operator is internal to Inductor: torch has no public one that takes oneDNN for float32.
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
