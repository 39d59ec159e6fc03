"""Faster matrix products for decoding on the CPU: weights packed once for oneDNN instead of in every product.

A decode step multiplies a few rows with every weight of the model. The libraries first rearrange the weights in
blocks, which for a few rows costs as much as the product itself. Speed-ups of packed weights, measured on one thread
with weights of 0.25 to 2 million elements: at 8 rows 1.3 to 2.3 in float32 and 1.3 to 1.6 in bfloat16, at 32 rows
1.15 to 1.7 and 1.15 to 1.25. Whole generations of 64 rows, 32 + 64 tokens, in CPU seconds on an AMD EPYC: float32 .91
instead of 1.27 (5M Llama) and 3.2 instead of 4.8 (25M); bfloat16 2.6 either way (25M).
"""

from contextvars import Token

import torch
from torch import Tensor

from rlhf_tasks.parallel.model.products import INSTEAD, widens

_DTYPES = (torch.float32, torch.bfloat16)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights of a dtype on a device."""
    # These operators are internal to Inductor: torch has no public ones that keep a packed weight.
    return device.type == "cpu" and dtype in _DTYPES and torch.backends.mkldnn.is_available()


class PackedWeights:
    """A context in which `linear` of a model multiplies with packed copies of the weights, made at first use.
    Inference only.

    Weights must not change inside the context. The copies need as much memory as the weights, and twice as much where
    bfloat16 is multiplied in float32.
    """

    def __init__(self) -> None:
        # (address, size) of the weight, as an expert's is a view made anew in every pass -> (weight, packed copy)
        self._packed: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._entered: list[Token] = []

    def __enter__(self) -> "PackedWeights":
        self._entered.append(INSTEAD.set(self._linear))
        return self

    def __exit__(self, *_: object) -> None:
        INSTEAD.reset(self._entered.pop())

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        key = weight.data_ptr(), weight.numel()
        if key not in self._packed:
            self._packed[key] = (
                weight,
                torch.ops.mkldnn._reorder_linear_weight(_multiplied(weight.detach())),
            )
        own = None if bias is None else _multiplied(bias)
        y = torch.ops.mkldnn._linear_pointwise(_multiplied(x), self._packed[key][1], own, "none", [], "")
        return y.to(x.dtype)


def _multiplied(tensor: Tensor) -> Tensor:
    """The tensor in the dtype in which products of its dtype are computed."""
    return tensor.float() if widens(tensor.device, tensor.dtype) else tensor
