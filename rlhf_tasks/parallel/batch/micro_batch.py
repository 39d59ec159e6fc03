"""Micro-batches: the packed tensors of one forward pass of a stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from rlhf_tasks.parallel.batch.samples import SampleBatch


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
    """

    input_ids: Tensor
    cu_seqlens: Tensor
    position_ids: Tensor
    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    data: Mapping[str, Tensor]
    rows: Tensor | None = None

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[0])

    def per_sample(self, values: Tensor) -> tuple[Tensor, ...]:
        """One view [length, ...] per sample, of a tensor [T, ...] with a row per token."""
        return values.split(list(self.lengths))


def predicting(micro: MicroBatch, mask: str) -> MicroBatch:
    """The micro-batch with the rows that predict the tokens where a mask is True: each is one position before.

    mask  key of a bool tensor [T]; a sample's first token, which nothing predicts, is not counted
    """
    counted = micro.data[mask] & (micro.position_ids > 0)
    return replace(micro, rows=counted.nonzero().squeeze(1) - 1)


def micro_batch(batch: SampleBatch) -> MicroBatch:
    """All samples of a batch as one micro-batch."""
    lengths = batch["input_ids"].lengths
    input_ids = batch["input_ids"].values.long()
    device = input_ids.device
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = [torch.arange(length) for length in lengths]
    return MicroBatch(
        input_ids=input_ids,
        cu_seqlens=starts.to(device),
        position_ids=(torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64)).to(device),
        ids=batch.ids,
        lengths=lengths,
        data={key: packed.values for key, packed in batch.data.items() if key != "input_ids"},
    )


def split(batch: SampleBatch, micro_batches: int, most_tokens: int | None = None) -> list[MicroBatch]:
    """Cut a batch into at most `micro_batches` micro-batches of about equal token counts.

    most_tokens  if given, into as many more as it takes until none has more tokens than this, or than the longest
                 sample if that is longer
    Deterministic: the longest samples are placed first, each in the micro-batch with the fewest tokens so far. Inside
    a micro-batch samples keep the batch's order. With few samples there are fewer micro-batches; none is empty.
    Neighbours with the same id (the two answers of a preference pair) stay together.
    """
    lengths = batch["input_ids"].lengths
    together = [list(places) for _, places in groupby(range(len(batch)), key=lambda place: batch.ids[place])]
    loads = [sum(lengths[place] for place in places) for places in together]
    parts = balance(loads, micro_batches)
    if most_tokens is not None and loads:
        most = max(most_tokens, *loads)
        count = max(micro_batches, -(-sum(loads) // most))
        parts = balance(loads, count)
        while max(sum(loads[group] for group in part) for part in parts) > most:
            count += 1
            parts = balance(loads, count)
    return [micro_batch(batch.take([place for group in part for place in together[group]])) for part in parts]


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
