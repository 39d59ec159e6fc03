"""Sharded weights: each dp rank keeps an equal share, and gathers a layer's ahead of its use (ZeRO stage 3,
arXiv:1910.02054).

The shares are those of the optimizer's state (layout/state_layout.py), and buckets are gathered whole. The memory of
a bucket comes and goes, but its tensor stays: parameters, and what autograd has kept of them, are views of it.

All ranks of a dp group gather the same buckets in the same order. So a replica with fewer micro-batches than others
gathers for theirs, too (`pass_by`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, all_gather, all_reduce
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import Bucket, StateLayout, parts_of
from prefect_rlhf.rlhf_tasks.system.rank_process import map_large_blocks


class _Gathered:
    """A bucket's weights, which have memory only while they are whole.

    values  [elements of the bucket]; without memory it must not be read
    work    the gathering, until it has been waited for
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype, device: torch.device) -> None:
        self.share = slice(*bucket.share)
        self.values = torch.empty(bucket.size, dtype=dtype, device=device)
        self.work: dist.Work | None = None

    def start(self, flat: Tensor, group: dist.ProcessGroup | None) -> None:
        self.values.untyped_storage().resize_(self.values.nbytes)
        self.work = all_gather(self.values, flat[self.share], group=group, async_op=True)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None

    def free(self) -> None:
        self.wait()
        self.values.untyped_storage().resize_(0)


class Shares:
    """This rank's shares of a model's weights, and the weights while they are whole.

    flat      [elements] the shares, bucket by bucket, as the optimizer's state
    slices    parameter name -> this rank's slice: a view of memory that is there while the weights are whole
    filled    names of the parameters that have their values
    returned  told each part (`parts_of`) that a backward pass comes to: what later parts train has its gradients
    """

    def __init__(self, layout: Layout, groups: ProcessGroups, dtype: torch.dtype) -> None:
        assert layout.placement.strategy.weight_shares > 1, "these weights are not sharded"
        if groups.device.type == "cpu":
            map_large_blocks()  # else the memory of buckets that were freed stays with the process
        rank, state = groups.rank, StateLayout(layout)
        self._group = groups[layout.placement.dp_group(rank)]
        self._layers = layout.shape.layers
        buckets = state.buckets(rank)
        self._ranges = {name: (Interval(start, stop), at) for name, start, stop, at in state.kept(rank)}
        self._size = buckets[-1].share.stop
        self.flat = torch.zeros(self._size, dtype=dtype, device=groups.device)
        self.slices: dict[str, Tensor] = {}
        self.filled: set[str] = set()
        self.returned: Callable[[int], None] = lambda part: None
        self._used_by: list[list[_Gathered]] = [[] for _ in range(self._layers + 2)]
        for bucket in buckets:
            gathered, users = _Gathered(bucket, dtype, groups.device), set[int]()
            for name, start, stop in bucket.pieces:
                spec = layout.specs[name]
                values = gathered.values[start - bucket.start : stop - bucket.start]
                self.slices[name] = values.view(layout.slice_shape(name, rank))
                users |= {*parts_of(spec, self._layers)}
            for part in users:
                self._used_by[part].append(gathered)
            gathered.free()  # of a tensor without memory no view can be made
        self._whole: list[_Gathered] = []
        self._stays_whole = False

    # Shares

    def fill(self, name: str, values: Tensor) -> None:
        """Set a parameter. values: of this rank's slice, or one number for all."""
        if name in self._ranges:
            (start, stop), at = self._ranges[name]
            part = values.expand(self.slices[name].shape).flatten()[start:stop]
            self.flat[at : at + stop - start] = part
        self.filled.add(name)

    def ranges(self) -> dict[str, Tensor]:
        """Parameter name -> what this rank has of its flattened slice, a view of `flat`."""
        return {name: self.flat[at : at + rows.size] for name, (rows, at) in self._ranges.items()}

    def hold(self, parts: Mapping[str, Tensor] | None) -> None:
        """Take other weights, as `ranges` gives them. None: none are here until there are others."""
        self.flat = self.flat.new_zeros(0 if parts is None else self._size)
        if parts is not None:
            for name, mine in self.ranges().items():
                mine.copy_(parts[name])

    # Gathering

    def enter_forward(self, part: int, trains: bool) -> None:
        """Have a part's weights for a forward pass, and begin to gather the next part's.

        trains  a backward pass follows: it begins with the last layer
        """
        last = self._layers + 1
        then = part + 1 if part < last else last - 1
        self._enter(part, then if part < last or trains else None)

    def enter_backward(self, part: int, parts: range) -> None:
        """Have a part's weights for a backward pass, and begin to gather those of the part before.

        parts  that the pass comes to (`parts_of_backward`)

        Part 0 may be entered before the first layer's pass has ended: that layer's weights stay.
        """
        then = part - 1 if part - 1 in parts else None
        self._enter(part, then if part else 1)
        self.returned(part)

    def pass_by(self, back: range | None = None) -> None:
        """As a pass of this replica would: gather what the passes of other replicas gather.

        back  the parts that a backward pass comes to (`parts_of_backward`); None: there is none
        """
        for part in range(self._layers + 2):
            self.enter_forward(part, back is not None)
        for part in reversed(back or ()):
            self.enter_backward(part, back or range(0))

    def most_passes(self, passes: int) -> int:
        """The most passes of any replica. Collective over the dp group."""
        return int(all_reduce(torch.tensor(passes, device=self.flat.device), self._group, dist.ReduceOp.MAX))

    def leave(self) -> None:
        """Free the whole weights; the shares stay."""
        if not self._stays_whole:
            for gathered in self._whole:
                gathered.free()
            self._whole = []

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, all weights are whole all the time. Collective over the dp group."""
        for part in range(self._layers + 2):
            self._gather(part)
        for gathered in self._whole:
            gathered.wait()
        self._stays_whole = True
        try:
            yield
        finally:
            self._stays_whole = False
            self.leave()

    def _enter(self, part: int, then: int | None) -> None:
        if self._stays_whole:
            return
        wanted = self._used_by[part] + ([] if then is None else self._used_by[then])
        for gathered in self._whole:
            if gathered not in wanted:
                gathered.free()
        self._whole = [gathered for gathered in self._whole if gathered in wanted]
        self._gather(part)
        for gathered in self._used_by[part]:
            gathered.wait()
        if then is not None:
            self._gather(then)

    def _gather(self, part: int) -> None:
        for gathered in self._used_by[part]:
            if gathered not in self._whole:
                gathered.start(self.flat, self._group)
                self._whole.append(gathered)
