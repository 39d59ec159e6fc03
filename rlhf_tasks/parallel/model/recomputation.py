"""Recomputation of a layer's activations in its backward pass: of all, or of those that are cheap to compute.

With `selective`, a first pass keeps the results of what is dear: matrix products (of which a backward pass needs the
inputs and some outputs), attention, and sums over ranks. The pass that is repeated takes these from memory and
computes the rest: norms, rotated queries and keys, activations, residual sums. This is selective recomputation
(arXiv:2205.05198, section 5) for attention that never has its scores in memory.
torch's `create_selective_checkpoint_contexts` is not enough: our sums over ranks are in place, on kept results.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Recompute
from prefect_rlhf.rlhf_tasks.parallel.model.products import products

_PRODUCTS = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::_grouped_mm": 0,
    "mkldnn::_linear_pointwise": 0,
    "prefect_rlhf::product_in_float32": 0,
}
"""Operators of matrix products -> the place of the left matrix [rows, columns] among their arguments."""

_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
)

_SUM = "c10d::allreduce_"


def recomputing(
    recompute: Recompute, layer: Callable[..., Any], *inputs: Tensor, adapter_rank: int = 0
) -> Any:
    """A layer's output, of which its backward pass recomputes what `recompute` says.

    inputs        all tensors that the layer depends on besides its parameters: hidden states first
    adapter_rank  products over at most so many columns (those of adapters) are cheap, and recomputed
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return layer(*inputs)
    # Autograd repeats a pass outside the function modes of its backward pass, so both passes enter this one anew.
    same = partial(products, inputs[0].device, inputs[0].dtype)

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        if recompute == "full":
            return same(), same()
        kept: deque[tuple[Any, Any]] = deque()
        return _both(same(), _Keeping(kept, adapter_rank)), _both(same(), _Taking(kept, adapter_rank))

    return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


@contextmanager
def _both(first: AbstractContextManager, second: AbstractContextManager) -> Iterator[None]:
    with first, second:
        yield


class _Dear(TorchDispatchMode):
    """Sees the operators of a pass, below autograd. kept: (operator, result) of the dear ones, in their order."""

    def __init__(self, kept: deque[tuple[Any, Any]], adapter_rank: int) -> None:
        super().__init__()
        self._kept = kept
        self._adapter_rank = adapter_rank

    def _is_dear(self, operator: Any, args: tuple) -> bool:
        name = operator.name().split(".")[0]
        if name in _PRODUCTS:
            return args[_PRODUCTS[name]].shape[-1] > self._adapter_rank
        return name in _ATTENTION or name == _SUM


class _Keeping(_Dear):
    """The first pass."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_dear(func, args):
            # Autograd will attach the graph to the tensors of the result: what is kept must not hold it.
            self._kept.append((func, tree_map_only(Tensor, Tensor.detach, result)))
        return result


class _Taking(_Dear):
    """The repeated pass. Sums over ranks are taken from memory, too; what cp ranks exchange is exchanged again."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._is_dear(func, args):
            return func(*args, **(kwargs or {}))
        operator, result = self._kept.popleft()
        assert operator is func, f"a repeated pass computes {func} where the first computed {operator}"
        if func.name().startswith(_SUM):
            for mine, summed in zip(args[0], result[0], strict=True):
                # Where they are one, the product that was kept has been summed in place.
                if mine.data_ptr() != summed.data_ptr():
                    mine.copy_(summed)
        return result
