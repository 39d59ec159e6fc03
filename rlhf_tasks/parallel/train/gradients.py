"""A rank's share of the gradient, summed over micro-batches, over dp and over the holders of shared rows.

Gradients are summed in the precision of the master weights. With dp > 1 no rank has all of them at once: as soon as a
backward pass has filled a bucket of the flat buffer (state_layout.py), the bucket is reduce-scattered over dp beside
the rest of the pass, and each rank adds its share to the sum (ZeRO stage 2, arXiv:1910.02054). Where weights are
sharded, the buckets of later layers are sent when the pass comes to a layer: all ranks send and gather in one order.

Rows that several ranks of a replica hold are summed over these ranks first, at the end. Until then each rank keeps
their gradients unsplit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, all_reduce, stage_set, tied_set
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import (
    Bucket,
    BufferRange,
    StateLayout,
    parts_of,
    parts_of_backward,
)
from prefect_rlhf.rlhf_tasks.parallel.model.shares import Shares

# torch 2.13 renamed it and warns of the old name; 2.11 has only the old one.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(eq=False, slots=True)
class _Filling:
    """A bucket that every backward pass fills anew.

    first    the first part of the model (model/shares.py) whose gradients it has
    values   the gradients so far, flat; None before the first one
    lacking  the slices whose gradients are not there yet
    """

    bucket: Bucket
    first: int
    lacking: set[BufferRange]
    values: Tensor | None = None


class _Sending(NamedTuple):
    """A bucket on its way. values must live until it is sent; this rank's part of the sum arrives in share."""

    work: dist.Work
    bucket: Bucket
    values: Tensor
    share: Tensor


class Gradients:
    """Takes the gradients of one rank's parameters from autograd, and gives its share of their sum.

    After `begin` come backward passes, each followed by `end_pass`, then `end_passes` and `total`. All ranks of the
    placement build it and call its methods together; replicas may have different numbers of passes.

    slices  parameter name -> this rank's slice
    dtype   of the sums
    shares  this rank's shares of the model's weights, where these are sharded
    """

    def __init__(
        self,
        slices: Mapping[str, nn.Parameter],
        layout: Layout,
        groups: ProcessGroups,
        dtype: torch.dtype,
        shares: Shares | None = None,
    ) -> None:
        device = groups.rank
        self._shares = shares
        if shares is not None:
            shares.returned = self._send_after
        self._back = parts_of_backward(layout)
        self._group = groups[layout.placement.dp_group(device)]
        buckets = StateLayout(layout).buckets(device)
        (on,) = {parameter.device for parameter in slices.values()}
        self._share = torch.zeros(buckets[-1].share.stop, dtype=dtype, device=on)
        self._whole: list[tuple[Bucket, Tensor]] = []
        self._filled: list[_Filling] = []
        summed_first: dict[str, Tensor] = {}
        for bucket in buckets:
            if self._group is None or bucket.whole:
                whole = self._of(bucket) if self._group is None else self._share.new_zeros(bucket.size)
                self._whole.append((bucket, whole))
                for piece in bucket.pieces:
                    parameter = slices[piece.name]
                    total = summed_first[piece.name] = _part(whole, bucket, piece).view_as(parameter)
                    parameter.register_post_accumulate_grad_hook(_accumulate_into(total))
            else:
                specs = [layout.specs[piece.name] for piece in bucket.pieces]
                first = min(part for spec in specs for part in parts_of(spec, layout.shape.layers))
                filling = _Filling(bucket, first, set(bucket.pieces))
                self._filled.append(filling)
                for piece in bucket.pieces:
                    slices[piece.name].register_post_accumulate_grad_hook(self._move_into(filling, piece))
        # As backward passes fill them: matrices from the last layer to the first, then norms.
        self._filled.sort(key=lambda filling: (not filling.bucket.decayed, -filling.bucket.start))
        self._next = 0  # place of the bucket that is sent next
        self._sending: _Sending | None = None
        self._passes_left = 0
        self._shared_sums = SharedSums(summed_first, self._share, layout, groups)

    def begin(self, passes: int) -> None:
        """Begin the sum of so many backward passes of this replica. Collective over the dp group."""
        most = torch.tensor(passes, device=self._share.device)
        self._passes_left = int(all_reduce(most, self._group, dist.ReduceOp.MAX))
        self._share.zero_()
        for _, whole in self._whole:
            whole.zero_()

    def end_pass(self) -> None:
        """Send the buckets that the backward pass did not fill. They lack the gradient of an unused parameter, which
        counts as 0."""
        assert self._passes_left > 0, "more backward passes than were begun"
        self._send_while(lambda _: True)
        if self._shares is not None:
            self._shares.leave()
        self._next = 0
        self._passes_left -= 1

    def end_passes(self) -> None:
        """Wait for the sum over the passes. A replica that has had fewer than others adds zeros to theirs.

        It comes before other collectives, since one of them may use the dp group. Collective over the dp group.
        """
        while self._passes_left > 0:
            if self._shares is not None:
                self._shares.pass_by(self._back)
            self.end_pass()
        self._arrive()

    def total(self) -> Tensor:
        """This rank's share of the sum, flat as its state; the caller may change it.

        Collective over the placement.
        """
        assert self._passes_left == 0, "the passes have not ended"
        self._shared_sums.run()
        if self._group is not None:
            for bucket, whole in self._whole:
                reduce_scatter(self._of(bucket), whole, group=self._group)
        return self._share

    def _of(self, bucket: Bucket) -> Tensor:
        return self._share[slice(*bucket.share)]

    def _move_into(self, filling: _Filling, piece: BufferRange) -> Callable[[Tensor], None]:
        """A hook that moves a parameter's new gradient into its bucket, and sends the buckets that are full.

        They go in a fixed order, so that all ranks of the group send the same one.
        """

        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            _part(self._opened(filling), filling.bucket, piece).view_as(parameter).copy_(parameter.grad)
            parameter.grad = None
            filling.lacking.discard(piece)
            if self._shares is None:
                self._send_while(lambda following: not following.lacking)

        return hook

    def _send_after(self, part: int) -> None:
        """Send the buckets that have gradients only of parts after this one: a backward pass has filled them."""
        self._send_while(lambda following: following.first > part)

    def _opened(self, filling: _Filling) -> Tensor:
        """The tensor in which a bucket's gradients are collected; the gap after them is 0."""
        if filling.values is None:
            values = filling.values = self._share.new_empty(filling.bucket.size)
            values[filling.bucket.pieces[-1].stop - filling.bucket.start :] = 0
        return filling.values

    def _send_while(self, ready: Callable[[_Filling], bool]) -> None:
        """Start the reduce-scatter of the next buckets. Only one is on its way at a time, to save memory."""
        while self._next < len(self._filled) and ready(self._filled[self._next]):
            filling = self._filled[self._next]
            bucket, values = filling.bucket, self._opened(filling)
            for piece in filling.lacking:
                _part(values, bucket, piece).zero_()
            self._arrive()
            share = values.new_empty(bucket.share.size)
            work = reduce_scatter(share, values, group=self._group, async_op=True)
            assert work is not None
            self._sending = _Sending(work, bucket, values, share)
            filling.lacking, filling.values = set(bucket.pieces), None
            self._next += 1

    def _arrive(self) -> None:
        """Wait for the bucket that is on its way, and add it to the sum."""
        if self._sending is not None:
            self._sending.work.wait()
            self._of(self._sending.bucket).add_(self._sending.share)
            self._sending = None


def _part(values: Tensor, bucket: Bucket, piece: BufferRange) -> Tensor:
    """A slice's elements in a tensor of its bucket."""
    return values[piece.start - bucket.start : piece.stop - bucket.start]


def _accumulate_into(total: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's new gradient to `total` and frees it."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return hook


class _SharedRows(NamedTuple):
    """Shared rows on this rank: their gradient (a view), whether it enters the sum, and its range in the buffer."""

    gradient: Tensor
    counts: bool
    start: int
    stop: int


class _SharedSum(NamedTuple):
    """One all-reduce: the group, the buffer's size in elements, and this rank's parts of it."""

    group: dist.ProcessGroup | None
    size: int
    slots: list[_SharedRows]


class SharedSums:
    """Sums the gradients of rows that several ranks of a replica hold, over these ranks and over dp.

    Where each holder has only a part of the gradient (KV heads on several tp ranks, norms inside heads, tied
    embeddings), all parts are summed. Where all holders have the same gradient, only the first one's enters the sum.
    There is one all-reduce over each stage, and one over the first and last stages; each shared piece has its own
    range in the buffer.

    The sum over dp is computed here too, because floating-point sums depend on their order. The order of the
    optimizer's reduce-scatter depends on where rows are in a rank's buffer, so with it the copies of a row would
    drift apart.

    gradients  parameter name -> gradient, shaped as the local slice; always the same tensors. Those without shared
               rows may be left out
    like       a tensor of the gradients' dtype and device
    """

    def __init__(
        self, gradients: Mapping[str, Tensor], like: Tensor, layout: Layout, groups: ProcessGroups
    ) -> None:
        self._gradients = gradients
        self._like = like
        self._layout = layout
        self._device = groups.rank
        place = layout.placement
        stages = place.pp_group(self._device)
        self._at = place.coordinate(self._device)
        self._is_first = self._at.dp == self._at.cp == 0
        stage = groups[stage_set(place, self._device)]
        self._exchanges = [self._exchange(place.tp_group(self._device), stage)]
        if self._device in (stages[0], stages[-1]):
            tied = groups[tied_set(place, self._device)]
            self._exchanges.append(self._exchange((stages[0], stages[-1]), tied))

    def run(self) -> None:
        """Sum in place. Collective over each stage, and over the first and last stages.

        Afterwards the holders of the first dp rank have the sum, and all others zeros. So the later sum over dp
        changes no bit.
        """
        for group, size, slots in self._exchanges:
            if size == 0:
                continue
            buffer = self._like.new_zeros(size)
            for gradient, counts, start, stop in slots:
                if counts:
                    buffer[start:stop] = gradient.flatten()
            all_reduce(buffer, group)
            for gradient, _, start, stop in slots:
                if self._is_first:
                    gradient.copy_(buffer[start:stop].view_as(gradient))
                else:
                    gradient.zero_()

    def _exchange(self, holders: tuple[int, ...], group: dist.ProcessGroup | None) -> _SharedSum:
        """The all-reduce of the pieces whose holders are among `holders` (devices of this dp and cp rank).

        The buffer's ranges are the same on all ranks of the group.
        """
        size, slots = 0, []
        for spec in self._layout.parameters:
            for piece in self._layout.shared(spec.name, self._at.dp, self._at.cp):
                if not set(piece.devices) <= set(holders):
                    continue
                start, size = size, size + piece.interval.size * spec.row_size
                if self._device in piece.devices:
                    counts = spec.partial_gradient or self._device == piece.devices[0]
                    slots.append(_SharedRows(self._rows(spec.name, piece.interval), counts, start, size))
        return _SharedSum(group, size, slots)

    def _rows(self, name: str, rows: Interval) -> Tensor:
        """A view of some rows (global numbers) of a gradient."""
        held = self._layout.held(self._device)[name]
        return self._gradients[name].narrow(self._layout.specs[name].dim, rows.start - held.start, rows.size)
