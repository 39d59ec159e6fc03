"""Scores compared within their groups, the samples of one prompt. Pure functions.

A group is `size` consecutive samples, all on one replica, so its statistics need no communication and do not depend,
to the last bit, on the layout. They are computed in float64. Where samples have left the batch, groups have several
sizes: see `per_group`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def in_groups(scores: Tensor, size: int) -> Tensor:
    """Scores [n] as [n / size, size] float64."""
    return scores.double().view(-1, size)


def per_group(
    function: Callable[[Tensor, int], Tensor], scores: Tensor, ids: Sequence[int], size: int
) -> Tensor:
    """What a function of whole groups gives for samples that may be only a part of their groups.

    function  such as those below: (scores [n] of whole groups, samples of a group) -> [n]
    scores    [n]
    ids       the samples' global ids; those of a group are the `size` from a multiple of `size` on
    A group of which m samples are left counts as a group of m, to the last bit.
    """
    left = Counter(sample // size for sample in ids)
    places: dict[int, list[int]] = defaultdict(list)
    for place, sample in enumerate(ids):
        places[left[sample // size]].append(place)
    if set(places) <= {size}:
        return function(scores, size)
    of_size = {m: function(scores[of_m], m) for m, of_m in places.items()}
    result = scores.new_zeros(len(ids), dtype=next(iter(of_size.values())).dtype)
    for m, of_m in places.items():
        result[of_m] = of_size[m]
    return result


def all_equal(scores: Tensor, size: int) -> Tensor:
    """Whether all scores of a sample's group are equal: [n] bool. Such a group has nothing to compare."""
    groups = in_groups(scores, size)
    return (groups.amax(1) == groups.amin(1)).repeat_interleave(size)


def less_mean(scores: Tensor, size: int) -> Tensor:
    """Scores [n] less the mean of their group: [n] float64; exactly 0 where all are equal."""
    groups = in_groups(scores, size)
    centred = (groups - groups.mean(1, keepdim=True)).flatten()
    return torch.where(all_equal(scores, size), 0.0, centred)


def less_others(scores: Tensor, size: int) -> Tensor:
    """Scores [n] less the mean of the others of their group: [n] float64 (RLOO, arXiv:2402.14740, section 3.2).

    0 where there are no others.
    """
    return less_mean(scores, size) * (size / max(size - 1, 1))


def group_stds(scores: Tensor, size: int) -> Tensor:
    """The unbiased standard deviation of each sample's group: [n] float64; 0 for a group of one."""
    if size == 1 or not len(scores):  # torch warns of both
        return torch.zeros_like(scores, dtype=torch.float64)
    return in_groups(scores, size).std(1, keepdim=True).expand(-1, size).flatten()


def best_of_group(scores: Tensor, size: int) -> Tensor:
    """Whether a sample has the highest score of its group; of equal ones the first: [n] bool."""
    groups = in_groups(scores, size)
    return (torch.arange(size, device=scores.device) == groups.argmax(1, keepdim=True)).flatten()
