"""Micro-batches: the packed tensors of one forward pass of a stage.

Neighbouring samples may begin with the same tokens, such as the prompt of a group: a pass computes these once. A
token's hidden states depend on no later token, so samples that begin alike have the same ones there. Only their keys
and values, and what the head reads, are then needed once for each sample. Nothing but the tokens says what is shared,
so this holds for groups, for the answers of a pair and for a system prompt alike.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.work import LEAST_SHARED


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

    def once(self, x: Tensor, dim: int) -> Tensor:
        """The reverse: of T rows along a dim those C that are computed, shared ones of the first of their samples."""
        pieces = x.split([self.pieces[number] for number in self.order], dim)
        return torch.cat([pieces[self.order.index(number)] for number in range(len(self.pieces))], dim)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some samples of a batch, concatenated without padding. T = total tokens, n = number of samples.

    input_ids     [T] int64
    cu_seqlens    [n + 1] int32, the start of each sample; the last entry is T
    position_ids  [T] int64, from 0 in each sample
    ids           global sample ids, in packed order
    lengths       tokens of each sample: as cu_seqlens, but without a synchronisation with the device
    data          every other key of the batch, packed in the same order: [T, ...] for a key with a row per token,
                  [n, ...] for a key with a row per sample
    rows          [R] int64, ascending: the positions of the tokens that pass the language model's head; None: all
    shared        first tokens of samples that the layers compute once; None: every token is computed
    """

    input_ids: Tensor
    cu_seqlens: Tensor
    position_ids: Tensor
    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    data: Mapping[str, Tensor]
    rows: Tensor | None = None
    shared: SharedPrefixes | None = None

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def computed_tokens(self) -> int:
        """Tokens that pass the layers: as many hidden states go from stage to stage."""
        return self.tokens if self.shared is None else int(self.shared.computed.shape[0])

    def per_sample(self, values: Tensor) -> tuple[Tensor, ...]:
        """One view [length, ...] per sample, of a tensor [T, ...] with a row per token."""
        return values.split(list(self.lengths))


def predicting(micro: MicroBatch, mask: str | None) -> MicroBatch:
    """The micro-batch with the rows that predict the tokens where a mask is True: each is one position before.

    mask  key of a bool tensor [T]; a sample's first token, which nothing predicts, is not counted; None: all others
    """
    counted = micro.position_ids > 0
    if mask is not None:
        counted = counted & micro.data[mask]
    return replace(micro, rows=counted.nonzero().squeeze(1) - 1)


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


def micro_batch(batch: SampleBatch) -> MicroBatch:
    """All samples of a batch as one micro-batch."""
    lengths = batch["input_ids"].lengths
    input_ids = batch["input_ids"].values.long()
    device = input_ids.device
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = [torch.arange(length) for length in lengths]
    begins = common_prefixes(input_ids, lengths)
    return MicroBatch(
        input_ids=input_ids,
        cu_seqlens=starts.to(device),
        position_ids=(torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64)).to(device),
        ids=batch.ids,
        lengths=lengths,
        data={key: packed.values for key, packed in batch.data.items() if key != "input_ids"},
        shared=SharedPrefixes.of(begins, lengths, device) if any(begins) else None,
    )


def split(batch: SampleBatch, micro_batches: int, most_tokens: int | None = None) -> list[MicroBatch]:
    """Cut a batch into at most `micro_batches` micro-batches of about equal numbers of tokens that are computed.

    most_tokens  if given, into as many more as it takes until none computes more tokens than this, or than the
                 longest sample if that is longer
    Deterministic. Inside a micro-batch samples keep the batch's order. With few samples there are fewer
    micro-batches; none is empty. Neighbours with the same id (the two answers of a preference pair) stay together.
    Where neighbours share first tokens, micro-batches are consecutive samples, unless the fullest is larger then.
    """
    lengths = batch["input_ids"].lengths
    begins = common_prefixes(batch["input_ids"].values, lengths)
    together = [list(places) for _, places in groupby(range(len(batch)), key=lambda place: batch.ids[place])]
    after = [sum(lengths[place] - begins[place] for place in places) for places in together]
    alone = [tokens + begins[places[0]] for tokens, places in zip(after, together, strict=True)]
    parts = _balanced(alone, micro_batches, most_tokens)
    if after != alone:
        most = max(most_tokens or 0, *(sum(alone[group] for group in part) for part in parts))
        consecutive = _consecutive(alone, after, micro_batches, None if most_tokens is None else most)
        if len(consecutive) <= len(parts) and _fullest(consecutive, alone, after) <= most:
            parts = consecutive
    return [micro_batch(batch.take([place for group in part for place in together[group]])) for part in parts]


def _balanced(tokens: Sequence[int], parts: int, most_tokens: int | None) -> list[list[int]]:
    """The indices of `tokens` in parts of about equal sums; the longest are placed first, each in the part with the
    fewest tokens so far."""
    dealt = balance(tokens, parts)
    if most_tokens is not None and tokens:
        most = max(most_tokens, *tokens)
        count = max(parts, -(-sum(tokens) // most))
        dealt = balance(tokens, count)
        while max(sum(tokens[group] for group in part) for part in dealt) > most:
            count += 1
            dealt = balance(tokens, count)
    return dealt


def _consecutive(
    alone: Sequence[int], after: Sequence[int], parts: int, most_tokens: int | None
) -> list[list[int]]:
    """The indices of `alone` in at most so many runs whose fullest has the fewest tokens; in as many more as it takes
    until none has more than `most_tokens`.

    alone, after  tokens that are computed for what is first in its run; and after its predecessor
    """

    def filled(most: int) -> list[list[int]]:
        runs, load = list[list[int]](), 0
        for place, (first, next_) in enumerate(zip(alone, after, strict=True)):
            if runs and load + next_ <= most:
                runs[-1].append(place)
                load += next_
            else:
                runs.append([place])
                load = first
        return runs

    if most_tokens is not None:
        parts = max(parts, len(filled(most_tokens)))
    sums = range(max(alone), sum(alone) + 1)
    return filled(sums[bisect_left(sums, True, key=lambda most: len(filled(most)) <= parts)])


def _fullest(runs: Sequence[Sequence[int]], alone: Sequence[int], after: Sequence[int]) -> int:
    """Tokens that the fullest of the runs of `_consecutive` computes."""
    return max(alone[first] + sum(after[place] for place in others) for first, *others in runs)


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Distribute the indices of `lengths` over min(parts, len(lengths)) non-empty lists of similar total length.

    lengths  e.g. the tokens of each sample
    """
    loads = [(0, 0)] * min(parts, len(lengths))  # (tokens, samples), so that empty lists are filled first
    dealt: list[list[int]] = [[] for _ in loads]
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        lightest = loads.index(min(loads))
        tokens, samples = loads[lightest]
        loads[lightest] = (tokens + lengths[position], samples + 1)
        dealt[lightest].append(position)
    return [sorted(part) for part in dealt]
