"""First tokens that neighbouring samples have in common, such as the prompt of a group: a pass computes them once.

A token's hidden states depend on no later token, so samples that begin alike have the same ones there. Only their
keys and values, and what the head reads, are then needed once for each sample. Nothing but the tokens says what is
shared, so this holds for groups, for the answers of a pair and for a system prompt alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rlhf_tasks.parallel.layout.shared_tokens import LEAST_SHARED


def common_prefixes(input_ids: Tensor, lengths: Sequence[int]) -> tuple[int, ...]:
    """How many of each sample's first tokens are shared with a sample before it: [n]; 0: it is computed whole.

    A number above 0 counts tokens that are also the first ones of the last sample before with the number 0. At least
    one token of each sample is not shared. A sample that has fewer tokens in common with those before it than these
    among each other is with them only if no less is saved then.

    input_ids  [T], samples one after the other; lengths: tokens of each
    """
    if not lengths:
        return ()
    families = [(1, 0)]  # (samples, tokens that they have in common)
    for alike in _alike(input_ids, lengths):
        samples, common = families[-1]
        fewer = alike if samples == 1 else min(common, alike)
        if fewer >= LEAST_SHARED and fewer * samples >= common * (samples - 1):
            families[-1] = samples + 1, fewer
        else:
            families.append((1, 0))
    return tuple(begin for samples, common in families for begin in (0, *(common,) * (samples - 1)))


def _alike(input_ids: Tensor, lengths: Sequence[int]) -> list[int]:
    """How many first tokens each sample but the first has in common with the one before; each one's last is not."""
    ids, tokens = input_ids.cpu(), torch.tensor(lengths, dtype=torch.int64)
    starts = tokens.cumsum(0) - tokens
    sample = torch.arange(len(tokens)).repeat_interleave(tokens)
    position = torch.arange(len(ids)) - starts[sample]
    before = (sample - 1).clamp(min=0)
    there = position < tokens[before]
    differs = ~there | (ids != ids[torch.where(there, starts[before] + position, 0)])
    first = torch.full_like(tokens, len(ids))
    first.scatter_reduce_(0, sample, torch.where(differs, position, len(ids)), "amin")
    return torch.minimum(first[1:], torch.minimum(tokens[1:], tokens[:-1]) - 1).clamp(min=0).tolist()


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """What the samples of a micro-batch share. T = tokens of all samples, C = tokens that are computed.

    begins      of each sample, from `common_prefixes`
    computed    [C] int64, ascending: the positions among the T tokens of those that are computed
    cu_seqlens  [n + 1] int32, the start of each sample among these; the last entry is C
    pieces      the C tokens in pieces of so many; order: the T tokens, as numbers of pieces
    """

    begins: tuple[int, ...]
    computed: Tensor
    cu_seqlens: Tensor
    pieces: tuple[int, ...]
    order: tuple[int, ...]

    @staticmethod
    def of(begins: Sequence[int], lengths: Sequence[int], device: torch.device) -> "SharedPrefixes":
        """begins: from `common_prefixes`; lengths: tokens of each sample."""
        pieces, order = list[int](), list[int]()
        prefix = 0  # number of the piece with the first tokens of the last sample that is computed whole
        for place, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            following = begins[place + 1] if place + 1 < len(begins) else 0
            if not begin and following:
                prefix, begin = len(pieces), following
                pieces.append(begin)
            order += [prefix, len(pieces)] if begin else [len(pieces)]
            pieces.append(length - begin)
        starts = accumulate(lengths, initial=0)
        own = [
            torch.arange(start + begin, start + length)
            for start, begin, length in zip(starts, begins, lengths, strict=False)
        ]
        ends = accumulate((len(part) for part in own), initial=0)
        return SharedPrefixes(
            begins=tuple(begins),
            computed=torch.cat(own).to(device),
            cu_seqlens=torch.tensor(list(ends), dtype=torch.int32).to(device),
            pieces=tuple(pieces),
            order=tuple(order),
        )

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Repeat shared rows for each of their samples: C rows along a dim become T. Rows after the C are dropped.

        In the backward pass their gradients are summed, in the same order every time.
        """
        pieces = x.split([*self.pieces, x.shape[dim] - sum(self.pieces)], dim)
        return torch.cat([pieces[number] for number in self.order], dim)
