"""The norms of a stage, in place of transformers'."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def norm_offset(theirs: nn.Module) -> float:
    """What a norm of transformers adds to its weight: 1.0 for Gemma's, else 0.0.

    Raises ValueError when it is neither a root mean square norm nor a LayerNorm.
    """
    if type(theirs) is nn.LayerNorm:
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
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        if self.offset == 0.0:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide) + self.offset
        return F.rms_norm(x.to(wide), self.weight.shape, weight, self.eps).to(x.dtype)


def own_norm(theirs: Any, offset: float) -> RMSNorm | nn.LayerNorm:
    """A norm that computes what one of transformers does, on the meta device.

    offset  as from `norm_offset`
    """
    if type(theirs) is nn.LayerNorm:
        bias = theirs.bias is not None  # pyright: ignore[reportUnnecessaryComparison]
        return nn.LayerNorm(list(theirs.normalized_shape), theirs.eps, bias=bias, device="meta")
    return RMSNorm(theirs.weight.shape[0], _eps(theirs), offset, torch.device("meta"))
