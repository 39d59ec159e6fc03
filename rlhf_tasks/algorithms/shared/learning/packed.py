"""Tokens of packed samples: which sample they belong to, sums and means over each response. Pure functions.

The T tokens of n samples are concatenated; `lengths` has the number of tokens of each sample. A per-token tensor is
[T]. `mask` [T] bool is True on response tokens.
"""

from collections.abc import Sequence

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
