"""Gradients of rows that several ranks of one replica hold: summed to the same bits, counted once."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_tasks.parallel.comm.groups import ProcessGroups, all_reduce, stage_set, tied_set
from rlhf_tasks.parallel.layout.slices import Interval, Layout


def primary_range(layout: Layout, name: str, device: int) -> range:
    """The elements of a device's flattened slice for which it answers (see `Layout.primary`).

    Over the devices of one replica every element of the model counts exactly once.
    """
    spec, held, primary = layout.specs[name], layout.held(device)[name], layout.primary(device)[name]
    if primary.size == held.size:
        return range(_elements(layout, name, device))
    assert primary.size == 0 or spec.dim == 0, f"copies of {name} overlap on dim {spec.dim}, not on the first"
    start = (primary.start - held.start) * spec.row_size
    return range(start, start + primary.size * spec.row_size)


def _elements(layout: Layout, name: str, device: int) -> int:
    return layout.held(device)[name].size * layout.specs[name].row_size


class _Slot(NamedTuple):
    """Shared rows on this rank: their gradient (a view), whether it is a summand, and its place in the buffer."""

    gradient: Tensor
    counts: bool
    start: int
    stop: int


class _Exchange(NamedTuple):
    """One all-reduce: the group, the buffer's size in elements, and what this rank puts in and takes out."""

    group: dist.ProcessGroup | None
    size: int
    slots: list[_Slot]


class SharedSums:
    """Sums the gradients of rows that several ranks of a replica hold, over these and over the dp ranks.

    Of KV heads held by several tp ranks, norms inside heads and tied embeddings every holder's gradient is a
    contribution; of other shared rows all holders have the same, and the first one's counts. One all-reduce over each
    stage, and one over the ends of the pipelines, with a place in the buffer for every shared piece. A sum depends on
    its order, and a later reduce-scatter's order on where rows lie in a rank's buffer: so copies would drift apart.

    gradients  parameter name -> gradient, shaped as the local slice; always the same tensors
    """

    def __init__(self, gradients: Mapping[str, Tensor], layout: Layout, groups: ProcessGroups) -> None:
        self._gradients = gradients
        self._layout = layout
        self._device = groups.rank
        place = layout.placement
        stages = place.pp_group(self._device)
        self._is_first = place.coordinate(self._device).dp == 0
        stage = groups[stage_set(place, self._device)]
        self._exchanges = [self._exchange(place.tp_group(self._device), stage)]
        if self._device in (stages[0], stages[-1]):
            tied = groups[tied_set(place, self._device)]
            self._exchanges.append(self._exchange((stages[0], stages[-1]), tied))

    def run(self) -> None:
        """Sum in place: afterwards the first dp rank's holders have the sum, the others zeros, so that summing over
        dp changes no bit. Collective over each stage and over the ends of the pipelines."""
        for group, size, slots in self._exchanges:
            if size == 0:
                continue
            like = next(iter(self._gradients.values()))
            buffer = torch.zeros(size, dtype=like.dtype, device=like.device)
            for gradient, counts, start, stop in slots:
                if counts:
                    buffer[start:stop] = gradient.flatten()
            all_reduce(buffer, group)
            for gradient, _, start, stop in slots:
                if self._is_first:
                    gradient.copy_(buffer[start:stop].view_as(gradient))
                else:
                    gradient.zero_()

    def _exchange(self, holders: tuple[int, ...], group: dist.ProcessGroup | None) -> _Exchange:
        """The sum over the pieces that only `holders`, devices of this dp rank, share; alike on all of the group."""
        dp_rank = self._layout.placement.coordinate(self._device).dp
        size, slots = 0, []
        for spec in self._layout.parameters:
            for piece in self._layout.shared(spec.name, dp_rank):
                if not set(piece.devices) <= set(holders):
                    continue
                start, size = size, size + piece.interval.size * spec.row_size
                if self._device in piece.devices:
                    counts = spec.partial_gradient or self._device == piece.devices[0]
                    slots.append(_Slot(self._rows(spec.name, piece.interval), counts, start, size))
        return _Exchange(group, size, slots)

    def _rows(self, name: str, rows: Interval) -> Tensor:
        """A view of some rows of a gradient."""
        held = self._layout.held(self._device)[name]
        return self._gradients[name].narrow(self._layout.specs[name].dim, rows.start - held.start, rows.size)
