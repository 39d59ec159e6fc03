"""The norms of a layer, as transformers computes them, in float64 too; and over heads that several ranks hold."""

from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from prefect_rlhf.rlhf_tasks.parallel.model.tensor_parallel import copy_to_ranks, sum_over_ranks


def norm_offset(theirs: nn.Module) -> float:
    """What a norm of transformers adds to its weight: 1.0 for Gemma's, else 0.0.

    Raises ValueError when it is neither a root mean square norm nor a LayerNorm.
    """
    if _is_centred(type(theirs)):
        return 0.0
    x = torch.tensor([[3e-3, -1e-3, 2e-3, 5e-3]])  # so small that eps counts
    eps = _eps(theirs)
    with torch.no_grad():
        small: Any = type(theirs)(4, eps=eps)
        for offset in (0.0, 1.0):
            ours = RMSNorm(4, eps, offset, torch.device("cpu"))
            for norm in (small, ours):
                norm.weight.copy_(torch.tensor([0.5, -0.25, 1.0, 2.0]))
            if torch.allclose(small(x), ours(x), rtol=1e-4):
                return offset
    raise ValueError(f"{type(theirs).__name__} is neither a root mean square norm nor a LayerNorm.")


@cache
def _is_centred(kind: type[nn.Module]) -> bool:
    """Whether a class of norms of transformers subtracts the mean, as LayerNorm (arXiv:1607.06450) does."""
    x, norm = torch.tensor([[3.0, -1.0, 2.0, 5.0]]), cast(Any, kind)(4)
    with torch.no_grad():
        norm.weight.fill_(0.5)
        return torch.allclose(norm(x), norm(x + 7.0), rtol=1e-4)


def _eps(theirs: Any) -> float:
    return theirs.variance_epsilon if hasattr(theirs, "variance_epsilon") else theirs.eps


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467), computed in float32, or in float64 for float64 inputs.

    It replaces Hugging Face's norms, which always round to float32: in float64 runs, layouts would differ by 1e-7.

    size    length of the normalised last dim
    eps     added to the mean square
    offset  added to the weight: 1.0 for Gemma, whose weights are stored around zero
    """

    def __init__(self, size: int, eps: float, offset: float, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        if self.offset == 0.0:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide) + self.offset
        return F.rms_norm(x.to(wide), self.weight.shape, weight, self.eps).to(x.dtype)


class UnscaledNorm(nn.Module):
    """Root mean square norm without weights, computed as `RMSNorm` is."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        return F.rms_norm(x, x.shape[-1:], None, self.eps)


def own_norm(theirs: Any, offset: float) -> RMSNorm | UnscaledNorm | nn.LayerNorm:
    """A norm that computes what one of transformers does, on the meta device.

    offset  as from `norm_offset`
    """
    if not any(True for _ in theirs.parameters()):
        return UnscaledNorm(_eps(theirs))
    if _is_centred(type(theirs)):
        bias = getattr(theirs, "bias", None) is not None
        return nn.LayerNorm(theirs.weight.shape[0], _eps(theirs), bias=bias, device="meta")
    return RMSNorm(theirs.weight.shape[0], _eps(theirs), offset, torch.device("meta"))


class NormOverRanks(nn.Module):
    """Root mean square norm over all heads of query, or of key, of which a rank holds some (OLMo 2,
    arXiv:2501.00656, section 2.1). The sum of squares is one over the tp group.

    theirs   transformers' norm of all heads
    size     length of this rank's part of the last dim
    counted  of this part, what no lower rank of the group holds too: heads that several ranks hold count once
    """

    def __init__(self, theirs: Any, size: int, counted: slice, group: ProcessGroup | None) -> None:
        super().__init__()
        self.eps = _eps(theirs)
        self.whole_size = theirs.weight.shape[0]
        self.counted = counted
        self.group = group
        self.weight = nn.Parameter(torch.empty(size, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        if self.group is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = sum_over_ranks(wide[..., self.counted].square().sum(-1, keepdim=True), self.group)
        # Every rank scales its heads by the sum, so its gradient is a part.
        scale = (copy_to_ranks(squares, self.group) / self.whole_size + self.eps).rsqrt()
        return (wide * scale * self.weight.to(wide.dtype)).to(x.dtype)
