"""PPO's critic: its loss, and the running mean and std of returns, so that it learns normalised values.

The running statistics (after arXiv:1602.07714) are three JSON-able numbers in `engine.state["value_norm"]`, so they
move with the critic's parameters and are in its snapshots. The averages are exponential and bias-corrected, like
Adam's moments.
"""

import math
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

DECAY = 0.9  # per iteration: averages over about ten iterations, because the policy's returns drift
VARIANCE_FLOOR = 1e-4  # otherwise the targets would become huge where all returns are equal
STATE_KEY = "value_norm"


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """Clipped value loss per token (Engstrom et al., arXiv:2005.12729, section 3, item 1).

    max((V - R)^2, (clip(V, V_old - cliprange, V_old + cliprange) - R)^2) / 2, with V values and R returns
    values, old_values, returns  [T]
    Returns (loss, clipped), both [T]; clipped is True where the clipped value has the larger error.
    """
    # Not old + clamp(values - old): its rounding would make values inside the bounds count as clipped.
    near = values.clamp(old_values - cliprange, old_values + cliprange)
    free, bounded = (values - returns).abs(), (near - returns).abs()
    error = torch.maximum(free, bounded)
    return error.square() / 2, bounded > free


def shifted(stage_values: Tensor, position_ids: Tensor) -> Tensor:
    """The value of the state *before* each token: [T]; 0 at each sample's first token.

    stage_values  [T], the value of the state after each token
    position_ids  [T]
    """
    return torch.where(position_ids == 0, 0.0, stage_values.roll(1))


@dataclass(frozen=True, slots=True)
class ValueNorm:
    """Running statistics of returns. weight: sum of the averaging weights. Without data it is 0: mean 0, std 1."""

    mean_sum: float = 0.0
    square_sum: float = 0.0
    weight: float = 0.0

    @staticmethod
    def of(state: MutableMapping[str, Any]) -> "ValueNorm":
        """The statistics in a role's state. They have no data at the start, or if values are not normalised."""
        return ValueNorm(**state.get(STATE_KEY, {}))

    def put(self, state: MutableMapping[str, Any]) -> None:
        """Store it in a role's state."""
        state[STATE_KEY] = asdict(self)

    @property
    def mean(self) -> float:
        return self.mean_sum / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        if not self.weight:
            return 1.0
        return max(self.square_sum / self.weight - self.mean**2, VARIANCE_FLOOR) ** 0.5

    def updated(self, mean: float, square: float) -> "ValueNorm":
        """The statistics after an iteration whose returns have this mean and mean of squares, over the global batch.

        Numbers that are not finite are ignored, because the averages would never be finite again.
        """
        if not (math.isfinite(mean) and math.isfinite(square)):
            return self
        return ValueNorm(
            DECAY * self.mean_sum + (1 - DECAY) * mean,
            DECAY * self.square_sum + (1 - DECAY) * square,
            DECAY * self.weight + (1 - DECAY),
        )

    def normalize(self, values: Tensor) -> Tensor:
        """Values in reward units -> normalised values; any shape."""
        return (values - self.mean) / self.std

    def denormalize(self, values: Tensor) -> Tensor:
        """Normalised values -> values in reward units; any shape."""
        return values * self.std + self.mean
