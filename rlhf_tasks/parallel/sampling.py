"""Choosing the next token: one uniform number per (sample id, position), whatever the layout or the batch."""

import torch
from torch import Tensor

from rlhf_tasks.parallel.random import counter_bits


def uniform(seed: int, purpose: str, iteration: int, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """One uniform number in [0, 1) per (sample id, position), a pure function of the arguments.

    sample_ids, positions  int64, broadcast against each other
    Returns float64 of the broadcast shape, on the device of the arguments; bit-equal on every device.
    """
    return counter_bits(seed, purpose, iteration, sample_ids, positions).to(torch.float64) * 2.0**-53
