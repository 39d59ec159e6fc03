"""Statistics of per-token values over the response tokens of all replicas, in float64."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_tasks.parallel.train.engine import Engine

WHITENING_EPSILON = 1e-8


class Moments(NamedTuple):
    """Number, mean and (biased) variance of values."""

    n: float
    mean: float
    variance: float

    @property
    def std(self) -> float:
        """The unbiased standard deviation."""
        return (self.variance * self.n / max(self.n - 1, 1)) ** 0.5


def moments(engine: Engine, mask: Tensor, count: float, *values: Tensor) -> list[Moments]:
    """The moments of one or more per-token tensors over the tokens that `mask` marks. Collective over the mesh.

    values  [T] each
    mask    [T] bool
    count   marked tokens of all replicas
    """
    count = max(count, 1.0)
    sums = torch.stack([torch.where(mask, x.double(), 0.0).sum() for x in values])
    means = [total / count for total in engine.sum_over_dp(sums).tolist()]
    squares = torch.stack(
        [
            torch.where(mask, x.double() - mean, 0.0).square().sum()
            for x, mean in zip(values, means, strict=True)
        ]
    )
    variances = [total / count for total in engine.sum_over_dp(squares).tolist()]
    return [Moments(count, *pair) for pair in zip(means, variances, strict=True)]


def whitened(values: Tensor, mask: Tensor, of: Moments, shift_mean: bool = True) -> Tensor:
    """Values [T] to mean 0 and std 1: [T], 0 where mask is False.

    of          the values' moments
    shift_mean  False: the mean stays as it is
    """
    scaled = (values.double() - of.mean) / (of.std + WHITENING_EPSILON)
    return torch.where(mask, scaled if shift_mean else scaled + of.mean, 0.0).to(values.dtype)
