"""The RMS norm of every model family."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467), computed in float32 or, for float64 inputs, in float64.

    Hugging Face's norms round to float32 in any case: in float64 runs, layouts would then differ by 1e-7.

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
