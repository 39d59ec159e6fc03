"""Pure functions of packed samples: per token, per response and per group (the samples of one prompt).

The T tokens of n samples are concatenated; `lengths` has the number of tokens of each sample. A per-token tensor is
[T]. `mask` [T] bool is True on response tokens.

A group is `size` consecutive samples, all on one replica, so its statistics need no communication and do not depend,
to the last bit, on the layout. They are computed in float64. Where samples have left the batch, groups have several
sizes: see `per_group`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def sample_of_token(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The index of the sample that each token belongs to: [T] int64 of 0 .. n - 1."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    return torch.arange(len(lengths), device=device).repeat_interleave(counts)


def last_response_tokens(mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """The index into [T] of each sample's last response token: [n] int64; -1 where it has none."""
    places = torch.where(mask, torch.arange(len(mask), device=mask.device), -1)
    last = torch.full((len(lengths),), -1, device=mask.device)
    return last.scatter_reduce(0, sample_of_token(lengths, mask.device), places, "amax")


def response_sums(values: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """The sum of each sample's values where `mask` is True: [n]. values  [T]

    Each sample is summed by itself, so its sum does not depend, to the last bit, on what it is packed with.
    """
    parts = torch.where(mask, values, 0).split(list(lengths))
    return torch.stack([part.sum() for part in parts]) if parts else values.new_zeros(0)


def response_lengths(mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """The number of response tokens of each sample: [n] int64."""
    return response_sums(torch.ones_like(mask, dtype=torch.int64), mask, lengths)


def on_tokens(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Each sample's value [n] on all its tokens: [T]."""
    parts = [value.expand(length) for value, length in zip(values.unbind(), lengths, strict=True)]
    return torch.cat(parts) if parts else values.new_zeros(0)


def in_groups(scores: Tensor, size: int) -> Tensor:
    """Scores [n] as [n / size, size] float64."""
    return scores.double().view(-1, size)


def per_group(
    function: Callable[[Tensor, int], Tensor], scores: Tensor, ids: Sequence[int], size: int
) -> Tensor:
    """Apply a function of whole groups to samples whose groups may be incomplete: [n].

    function  such as those below: (scores [n] of whole groups, samples of a group) -> [n]
    scores    [n]
    ids       the samples' global ids; a group has `size` consecutive ids, the first a multiple of `size`
    If m samples of a group are left, the result is that of a group of m samples, to the last bit.
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
