"""Tensor parallelism inside one stage, after Megatron-LM (arXiv:1909.08053, section 3).

The input of a block (attention or MLP) passes `copy_to_ranks` (the paper's *f*). The block's first linear modules
(`ColumnParallelLinear`) hold a slice of the output columns. Its last linear module (`RowParallelLinear`) holds a
slice of the input columns, and its output passes `sum_over_ranks` (the paper's *g*). That makes two all-reduces
forward and two backward per layer.

A group is None where tp is 1. Every function here then does the same as its plain counterpart.
"""

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from rlhf_tasks.parallel.comm.groups import all_reduce
from rlhf_tasks.parallel.layout.shape import Lora
from rlhf_tasks.parallel.layout.slices import Interval
from rlhf_tasks.parallel.model.products import linear


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        # A gradient tensor may be shared with other branches of the graph: reduce a copy.
        return all_reduce(gradients[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def copy_to_ranks(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Forward the identity, backward an all-reduce of the gradient (*f* in the paper).

    x  any shape, equal on all ranks of the group; each rank's gradient is the contribution of its slice
    """
    return x if group is None else _CopyToRanks.apply(x, group)  # pyright: ignore[reportReturnType]


def sum_over_ranks(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Forward an all-reduce *in place*, backward the identity (*g* in the paper).

    x  any shape, contiguous: this rank's contribution to the sum
    """
    return x if group is None else _SumOverRanks.apply(x, group)  # pyright: ignore[reportReturnType]


class AdaptableLinear(nn.Linear):
    """A linear module that may have an adapter: W x + scaling * B (A x) (LoRA, arXiv:2106.09685)."""

    def __init__(self, in_features: int, out_features: int, bias: bool, device: torch.device) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device)
        self.lora_A: nn.Linear | None = None
        self.lora_B: nn.Linear | None = None
        self.scaling = 0.0

    def adapt(self, lora: Lora) -> None:
        """Add the adapter, of the module's local size, under peft's names: lora_A [rank, in], lora_B [out, rank]."""
        device = self.weight.device
        self.lora_A = nn.Linear(self.in_features, lora.rank, bias=False, device=device)
        self.lora_B = nn.Linear(lora.rank, self.out_features, bias=False, device=device)
        self.scaling = lora.scaling

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in_features] -> [..., out_features], adapter included."""
        output = linear(x, self.weight, bias)
        if self.lora_A is None or self.lora_B is None:
            return output
        low = linear(x, self.lora_A.weight)
        return output.add(linear(low, self.lora_B.weight), alpha=self.scaling)


class ColumnParallelLinear(AdaptableLinear):
    """A linear module that holds a slice of the output columns, or all of them."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., local columns]."""
        return self.product(input, self.bias)


class PackedColumns(nn.Module):
    """Column-parallel linear modules side by side, in place of one that a family packs them in.

    parts  name -> module
    """

    def __init__(self, parts: Mapping[str, ColumnParallelLinear]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., local columns of the first part, of the second, ...]."""
        return torch.cat([part(input) for part in self.children()], -1)


class RowParallelLinear(AdaptableLinear):
    """A linear module that holds a slice of the input columns; its output is summed over the tp group.

    in_features is the local number of columns. Every rank holds the whole bias and adds it after the sum. Of an
    adapter, A x is a part of a sum too. B is linear, so the one sum completes both.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: ProcessGroup | None,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, out_features, bias, device)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        """input [..., local columns] -> [..., out_features], equal on all ranks."""
        if self.group is None:
            return self.product(input, self.bias)
        total = sum_over_ranks(self.product(input, None), self.group)
        return total if self.bias is None else total + self.bias


@cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    """A number rounded to a dtype. Cached, because a forward pass captured in a CUDA graph must not make a tensor."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()


class VocabParallelEmbedding(nn.Module):
    """Token embeddings of which a rank holds the rows `vocab`; an all-reduce brings the other ranks' embeddings.

    scale        factor on the result (Gemma's square root of the hidden size), rounded to its dtype as Gemma does
    padding_idx  the token whose row gets no gradient from here, as in `nn.Embedding`; None: no such token
    """

    def __init__(
        self,
        vocab: Interval,
        hidden: int,
        group: ProcessGroup | None,
        device: torch.device,
        scale: float = 1.0,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.group = group
        self.scale = scale
        inside = padding_idx is not None and vocab.start <= padding_idx < vocab.stop
        self.padding_row = padding_idx - vocab.start if padding_idx is not None and inside else None
        self.weight = nn.Parameter(torch.empty(vocab.size, hidden, device=device))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [T] int64 -> embeddings [T, hidden], equal on all ranks."""
        if self.group is None:
            embedded = F.embedding(tokens, self.weight, self.padding_row)
        else:
            foreign = (tokens < self.vocab.start) | (tokens >= self.vocab.stop)
            rows = (tokens - self.vocab.start).masked_fill(foreign, 0)
            local = F.embedding(rows, self.weight, self.padding_row).masked_fill(foreign[:, None], 0.0)
            embedded = sum_over_ranks(local, self.group)
        if self.scale == 1.0:
            return embedded
        return embedded * _rounded(self.scale, embedded.dtype)
