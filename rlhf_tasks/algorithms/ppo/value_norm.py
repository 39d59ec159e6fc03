"""Running mean and std of returns, so that the critic learns normalised values (after arXiv:1602.07714).

The state is three numbers in `engine.state["value_norm"]`, float64 and JSON-able, so that it travels with the
critic's parameters and stands in its snapshots. The average is exponential and debiased, as Adam's moments.
"""

import math
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

DECAY = 0.9  # per iteration: the memory is about ten iterations, as the policy's returns drift
VARIANCE_FLOOR = 1e-4  # returns that are all alike must not blow up the targets
STATE_KEY = "value_norm"


@dataclass(frozen=True, slots=True)
class ValueNorm:
    """weight is the sum of the averaging weights so far; 0 means that nothing was seen: mean 0, std 1."""

    mean_sum: float = 0.0
    square_sum: float = 0.0
    weight: float = 0.0

    @staticmethod
    def of(state: MutableMapping[str, Any]) -> "ValueNorm":
        """The one in a role's state; a fresh one where values are not normalised or nothing was seen yet."""
        return ValueNorm(**state.get(STATE_KEY, {}))

    def put(self, state: MutableMapping[str, Any]) -> None:
        """Keep it in a role's state."""
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
        """After an iteration whose returns have this mean and this mean of squares, over the global batch.

        What is not finite is left out: it would stay in the average for ever.
        """
        if not (math.isfinite(mean) and math.isfinite(square)):
            return self
        return ValueNorm(
            DECAY * self.mean_sum + (1 - DECAY) * mean,
            DECAY * self.square_sum + (1 - DECAY) * square,
            DECAY * self.weight + (1 - DECAY),
        )

    def normalize(self, values: Tensor) -> Tensor:
        return (values - self.mean) / self.std

    def denormalize(self, values: Tensor) -> Tensor:
        return values * self.std + self.mean
