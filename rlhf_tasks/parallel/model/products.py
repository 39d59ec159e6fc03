"""The matrix products of a model, on CPUs by the fastest way that torch has.

Float32 is computed by oneDNN where it is faster than MKL, which torch takes for it.

MKL uses AVX-512 only on Intel's CPUs. Measured on an AMD EPYC with AVX-512, one thread, 1,024 to 6,144 rows, weights
of 0.3 to 2 million elements: MKL 98 to 108 GFLOP/s; oneDNN 222 to 236 forward, 219 to 235 for the gradient of the
input, 155 to 194 for that of the weight.

Bfloat16 is computed in float32 where oneDNN cannot multiply it (no AVX-512, no AVX-VNNI-2). Elsewhere torch takes
oneDNN for it by itself; without it torch multiplies by loops of its own. Measured on an AMD EPYC with AVX2 alone, two
threads, 6,144 rows times a weight of 4,096 x 256, seconds: float32 .26 forward and .42 backward, bfloat16 1.5 and
20.6, bfloat16 in float32 .30 and .60.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU_INFO = Path("/proc/cpuinfo")
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [n, columns], weight [rows, columns], bias [rows] or None) -> x W^T + b [n, rows]."""

_INSTEAD: ContextVar[Multiply | None] = ContextVar("product", default=None)
"""What computes `linear`; None: `F.linear`. A TorchFunctionMode adds 2.5 microseconds to each operator of torch, so a
millisecond to a decoding step."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., columns] times the transpose of weight [rows, columns], plus bias [rows] -> [..., rows]."""
    product = _INSTEAD.get()
    return F.linear(x, weight, bias) if product is None else product(x, weight, bias)


def products(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """A context in which `F.linear` is computed by the faster way. Backward passes belong inside it."""
    if device.type == "cpu" and dtype == torch.float32 and _mkl_is_slow():
        return Products(by_onednn)
    if widens(device, dtype):
        return Products(in_float32)
    return nullcontext()


def widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of a dtype on a device are computed in float32 instead.

    A property of the machine, not a measurement: a resumed run must compute as before.
    """
    return device.type == "cpu" and dtype == torch.bfloat16 and not _multiplies_bfloat16()


@cache
def _multiplies_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def _mkl_is_slow() -> bool:
    """A property of the machine, not a measurement: a resumed run must compute as before."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "GenuineIntel" not in CPU_INFO.read_text(encoding="utf-8")
    )


class Products(TorchFunctionMode):
    """Computes `F.linear` and its gradients by a function of ours, on the CPU."""

    def __init__(self, multiply: Multiply) -> None:
        super().__init__()
        self._multiply = multiply

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs:
            x, weight, *bias = args
            # A matrix, because what the operator returns for more dims is a view, and a sum over ranks is in place.
            rows = x.reshape(-1, x.shape[-1])
            y: Any = _Product.apply(self._multiply, rows, weight, *(bias or [None]))
            return y.view(*x.shape[:-1], y.shape[-1])
        return func(*args, **(kwargs or {}))


class _Product(torch.autograd.Function):
    """y = x W^T + b of a matrix x, with dx = dy W, dW = dy^T x and db = the sum of dy's rows."""

    @staticmethod
    def forward(ctx: Any, multiply: Multiply, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.multiply = multiply
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        rows = gradient.contiguous()
        _, for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            None,
            ctx.multiply(rows, weight.t(), None) if for_x else None,
            ctx.multiply(rows.t(), x.t(), None) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product in float32. Shapes as in `Multiply`."""
    if x.numel() == 0:
        return F.linear(x, weight, bias)
    # The operator is internal to Inductor: torch has no public one that takes oneDNN for float32.
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@torch.library.custom_op("prefect_rlhf::product_in_float32", mutates_args=())
def in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product of bfloat16, rounded once at its end, as libraries round that multiply bfloat16. Shapes as in
    `Multiply`. One operator, so that selective recomputation keeps what is rounded."""
    y = x.float() @ weight.float().t()
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights of a dtype on a device."""
    # These operators are internal to Inductor: torch has no public ones that keep a packed weight.
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
    )


class PackedWeights:
    """A context in which `linear` of a model multiplies with packed copies of the weights, made at first use.
    Inference only.

    A decode step multiplies a few rows with every weight of the model. The libraries first rearrange the weights in
    blocks, which for a few rows costs as much as the product itself; oneDNN can do so once. Speed-ups, on one thread
    with weights of 0.25 to 2 million elements: at 8 rows 1.3 to 2.3 in float32 and 1.3 to 1.6 in bfloat16, at
    32 rows 1.15 to 1.7 and 1.15 to 1.25. Whole generations of 64 rows, 32 + 64 tokens, in CPU seconds on an AMD EPYC:
    float32 .91 instead of 1.27 (5M Llama) and 3.2 instead of 4.8 (25M); bfloat16 2.6 either way (25M).

    Weights must not change inside the context. The copies need as much memory as the weights, and twice as much where
    bfloat16 is multiplied in float32.
    """

    def __init__(self) -> None:
        # (address, size) of the weight, as an expert's is a view made anew in every pass -> (weight, packed copy)
        self._packed: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._entered: list[Token] = []

    def __enter__(self) -> "PackedWeights":
        self._entered.append(_INSTEAD.set(self._linear))
        return self

    def __exit__(self, *_: object) -> None:
        _INSTEAD.reset(self._entered.pop())

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        key = weight.data_ptr(), weight.numel()
        if key not in self._packed:
            packed = torch.ops.mkldnn._reorder_linear_weight(_multiplied(weight.detach()))
            self._packed[key] = weight, packed
        wide_bias = None if bias is None else _multiplied(bias)
        y = torch.ops.mkldnn._linear_pointwise(
            _multiplied(x), self._packed[key][1], wide_bias, "none", [], ""
        )
        return y.to(x.dtype)


def _multiplied(tensor: Tensor) -> Tensor:
    """The tensor in the dtype in which products of its dtype are computed."""
    return tensor.float() if widens(tensor.device, tensor.dtype) else tensor
