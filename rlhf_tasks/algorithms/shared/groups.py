"""Scores compared within their groups, the samples of one prompt. Pure functions.

A group is `size` consecutive samples, all on one replica, so its statistics need no communication and do not depend,
to the last bit, on the layout. They are computed in float64.
"""

import torch
from torch import Tensor


def in_groups(scores: Tensor, size: int) -> Tensor:
    """Scores [n] as [n / size, size] float64."""
    return scores.double().view(-1, size)


def all_equal(scores: Tensor, size: int) -> Tensor:
    """Whether all scores of a group are equal: [n / size] bool. Such a group has nothing to compare."""
    groups = in_groups(scores, size)
    return groups.amax(1) == groups.amin(1)


def less_mean(scores: Tensor, size: int) -> Tensor:
    """Scores [n] less the mean of their group: [n] float64; exactly 0 where all are equal."""
    groups = in_groups(scores, size)
    centred = groups - groups.mean(1, keepdim=True)
    return torch.where(all_equal(scores, size)[:, None], 0.0, centred).flatten()


def less_others(scores: Tensor, size: int) -> Tensor:
    """Scores [n] less the mean of the others of their group: [n] float64 (RLOO, arXiv:2402.14740, section 3.2)."""
    return less_mean(scores, size) * (size / (size - 1))


def group_stds(scores: Tensor, size: int) -> Tensor:
    """The unbiased standard deviation of each sample's group: [n] float64."""
    return in_groups(scores, size).std(1, keepdim=True).expand(-1, size).flatten()


def best_of_group(scores: Tensor, size: int) -> Tensor:
    """Whether a sample has the highest score of its group; of equal ones the first: [n] bool."""
    groups = in_groups(scores, size)
    return (torch.arange(size, device=scores.device) == groups.argmax(1, keepdim=True)).flatten()
