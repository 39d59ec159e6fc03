"""Gradients of rows that several ranks of one replica hold: summed over the holders, counted once."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_tasks.parallel.groups import ProcessGroups, all_reduce, tied_set
from rlhf_tasks.parallel.layout import Interval, Layout


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
    """Shared rows on this rank: their gradient (a view) and its place in the exchanged buffer."""

    gradient: Tensor
    start: int
    stop: int


class _Exchange(NamedTuple):
    """One all-reduce: the group, the buffer's size in elements, and what this rank puts in and takes out."""

    group: dist.ProcessGroup | None
    size: int
    slots: list[_Slot]


class PartialSums:
    """Sums the gradients that are contributions of several ranks of a replica.

    KV heads held by several tp ranks and norms inside heads are summed over the tp group, tied embeddings
    over the first and the last stage: one all-reduce each, over a buffer with a place for every shared piece.

    gradients  parameter name -> gradient, shaped as the local slice; always the same tensors
    """

    def __init__(self, gradients: Mapping[str, Tensor], layout: Layout, groups: ProcessGroups) -> None:
        self._gradients = gradients
        self._layout = layout
        self._device = groups.rank
        tp_group = layout.placement.tp_group(self._device)
        ends = tied_set(layout.placement, self._device)
        self._exchanges = [
            self._exchange(devices, groups) for devices in (tp_group, ends) if self._device in devices
        ]

    def run(self) -> None:
        """Sum in place. Collective over each tp group and over the two ends of each pipeline."""
        for group, size, slots in self._exchanges:
            if size == 0:
                continue
            like = next(iter(self._gradients.values()))
            buffer = torch.zeros(size, dtype=like.dtype, device=like.device)
            for gradient, start, stop in slots:
                buffer[start:stop] = gradient.flatten()
            all_reduce(buffer, group)
            for gradient, start, stop in slots:
                gradient.copy_(buffer[start:stop].view_as(gradient))

    def _exchange(self, devices: tuple[int, ...], groups: ProcessGroups) -> _Exchange:
        """The sum over the pieces that only ranks of `devices` share; alike on all of them."""
        dp_rank = self._layout.placement.coordinate(self._device).dp
        size, slots = 0, []
        for spec in self._layout.parameters:
            if not spec.partial_gradient:
                continue
            for piece in self._layout.shared(spec.name, dp_rank):
                if not set(piece.devices) <= set(devices):
                    continue
                start, size = size, size + piece.interval.size * spec.row_size
                if self._device in piece.devices:
                    slots.append(_Slot(self._rows(spec.name, piece.interval), start, size))
        return _Exchange(groups[devices], size, slots)

    def _rows(self, name: str, rows: Interval) -> Tensor:
        """A view of some rows of a gradient."""
        held = self._layout.held(self._device)[name]
        return self._gradients[name].narrow(self._layout.specs[name].dim, rows.start - held.start, rows.size)
