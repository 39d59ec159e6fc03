"""Weights that change during a run, with their state sharded over data parallelism (ZeRO stage 1, arXiv:1910.02054).

A rank's parameters are stored one after the other in a flat buffer, in the same order on all ranks of its dp group.
Each dp rank updates its share of the master weights; an all-gather distributes the new weights. State is addressed by
parameter name and range of elements, so a checkpoint can be restored into any other layout.

`MasterWeights` change by a blend with other weights. An `Optimizer` changes them by AdamW: gradients are accumulated
in a second flat buffer, in the precision of the master weights, and reduce-scattered over dp.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from rlhf_tasks.parallel.comm.groups import ProcessGroups, all_reduce, group_size, stage_set, tied_set
from rlhf_tasks.parallel.layout.slices import Interval, Layout
from rlhf_tasks.parallel.train.state_layout import BufferRange, StateLayout, aligned
from rlhf_tasks.system.failpoints import Point, reach

# torch 2.13 renamed both and warns of the old names; 2.11 has only the old ones.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

StateKind = Literal["master", "exp_avg", "exp_avg_sq"]

NORM_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements whose norm is computed at a time. On the CPU their float64 copy stays in the cache."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW (arXiv:1711.05101). Weight decay is not applied to parameters with one dim (norms, biases).

    max_grad_norm  bound of the gradient's global 2-norm; None: no clipping
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float | None


class StepReport(NamedTuple):
    """The result of one step, equal on all ranks.

    grad_norm  the global 2-norm before clipping
    skipped    True when nothing was updated because the norm or a loss was not finite
    """

    grad_norm: float
    skipped: bool


class StateShard(NamedTuple):
    """A piece of the state: elements start .. stop - 1 of a parameter's local slice, flattened.

    tensor  [stop - start]
    """

    name: str
    kind: StateKind
    start: int
    stop: int
    tensor: Tensor


class MasterWeights:
    """One rank's parameters and its share of their master weights, in float32 or better.

    All ranks of the placement build it and call its methods together.

    slices  parameter name -> this rank's slice, all of one dtype; their storage moves into the flat buffer
    step    the number of updates applied; skipped ones do not count
    """

    def __init__(self, slices: Mapping[str, nn.Parameter], layout: Layout, groups: ProcessGroups) -> None:
        self.step = 0
        device = groups.rank
        self._group = groups[layout.placement.dp_group(device)]
        state = StateLayout(layout)
        self._pieces = state.pieces(device)
        self._start, self._share = state.share(device).start, state.share(device).size
        (dtype,) = {parameter.dtype for parameter in slices.values()}
        (on,) = {parameter.device for parameter in slices.values()}
        self._precise = torch.float64 if dtype == torch.float64 else torch.float32
        self._weights = torch.zeros(self._share * group_size(self._group), dtype=dtype, device=on)
        for piece in self._pieces:
            parameter = slices[piece.name]
            flat = self._weights[piece.start : piece.stop].view_as(parameter)
            flat.copy_(parameter.detach())
            parameter.data = flat
        mine = self._weights[self._start : self._start + self._share]
        self._state: dict[StateKind, Tensor] = {"master": mine.to(self._precise, copy=True)}

    def blend(self, slices: Mapping[str, Tensor], share: float) -> None:
        """Set the master weights to share * slices + (1 - share) * master weights, and the weights to these.

        slices  parameter name -> this rank's slice of other weights
        Collective over the dp group. No bit depends on the layout: each product and each sum is rounded by itself.
        """
        master = self._state["master"]
        master.mul_(1 - share)
        for piece, start, stop in self._shares():
            other = slices[piece.name].detach().flatten()[start - piece.start : stop - piece.start]
            master[start - self._start : stop - self._start] += other.to(master.dtype) * share
        self.step += 1
        self._gather()

    def shard_state(self) -> Iterator[StateShard]:
        """This rank's share of the state, as views. The shares of a dp group cover each element exactly once."""
        for piece, start, stop in self._shares():
            for kind, state in self._state.items():
                view = state[start - self._start : stop - self._start]
                yield StateShard(piece.name, kind, start - piece.start, stop - piece.start, view)

    def load_shard_state(self, shards: Iterable[StateShard], step: int) -> None:
        """Load state by name and range, then compute the weights from the master weights.

        Shards may be cut in any way and may reach beyond this rank's share, but must not overlap.
        Collective over the dp group. Raises ValueError naming a parameter whose share is not covered.
        """
        held = {(s.name, s.kind): s for s in self.shard_state()}
        missing = {key: s.stop - s.start for key, s in held.items()}
        for shard in shards:
            key = (shard.name, shard.kind)
            if key not in held:
                continue
            start, stop = max(shard.start, held[key].start), min(shard.stop, held[key].stop)
            if start < stop:
                into = held[key].tensor[start - held[key].start : stop - held[key].start]
                into.copy_(shard.tensor[start - shard.start : stop - shard.start])
                missing[key] -= stop - start
        for (name, kind), elements in missing.items():
            if elements:
                raise ValueError(f"optimizer state {kind} of {name}: {elements} elements are missing.")
        self.step = step
        self._gather()

    def _shares(self) -> Iterator[tuple[BufferRange, int, int]]:
        """(piece, start, stop): the pieces that overlap this rank's share, with the overlap in the flat buffer."""
        for piece in self._pieces:
            start = max(piece.start, self._start)
            stop = min(piece.stop, self._start + self._share)
            if start < stop:
                yield piece, start, stop

    def _gather(self) -> None:
        """All-gather the weights from the master weights of all dp ranks."""
        share = self._state["master"].to(self._weights.dtype)
        if self._group is None:
            self._weights.copy_(share)
        else:
            all_gather(self._weights, share, group=self._group)


class Optimizer(MasterWeights):
    """The optimizer of one rank's parameters: AdamW, with gradients and two moments."""

    def __init__(
        self,
        slices: Mapping[str, nn.Parameter],
        layout: Layout,
        groups: ProcessGroups,
        settings: OptimizerSettings,
    ) -> None:
        super().__init__(slices, layout, groups)
        self.settings = settings
        self._mesh = groups[layout.placement.devices]
        self._decayed = aligned(max((p.stop for p in self._pieces if slices[p.name].ndim > 1), default=0))
        self._gradients = torch.zeros_like(self._weights, dtype=self._precise)
        self._state["exp_avg"] = torch.zeros_like(self._state["master"])
        self._state["exp_avg_sq"] = torch.zeros_like(self._state["master"])
        views = {p.name: self._gradients[p.start : p.stop].view_as(slices[p.name]) for p in self._pieces}
        self._shared_sums = SharedSums(views, layout, groups)
        self._counted = self._primary_ranges(layout, groups.rank)
        for name, parameter in slices.items():
            parameter.register_post_accumulate_grad_hook(_accumulate_into(views[name]))

    def apply(self, learning_rate: float, finite: bool = True) -> StepReport:
        """Reduce the gradients accumulated since the last call and, if all are finite, clip them and update.

        learning_rate  of this step; the caller applies the schedule
        finite         False on a rank whose loss is not finite; then no rank updates
        Collective over the whole placement. Sets the gradients to zero.
        """
        gradient = self._reduce()
        squares = sum(_square_norm(gradient[start:stop]) for start, stop in self._counted)
        totals = torch.tensor([squares, not finite], dtype=torch.float64, device=gradient.device)
        square, failures = all_reduce(totals, self._mesh).tolist()
        norm = math.sqrt(square) if square >= 0 else math.nan
        skipped = failures > 0 or not math.isfinite(norm)
        if not skipped:
            self.step += 1
            self._update(gradient, learning_rate, self._clip_factor(norm))
            reach(Point.OPTIMIZER_STEP)
            self._gather()
        self._gradients.zero_()
        return StepReport(norm, skipped)

    def _primary_ranges(self, layout: Layout, device: int) -> list[tuple[int, int]]:
        """The ranges of this rank's share that count in the gradient norm; adjacent ranges are joined."""
        ranges: list[tuple[int, int]] = []
        for piece, first, last in self._shares():
            counted = primary_range(layout, piece.name, device)
            start = max(first, piece.start + counted.start) - self._start
            stop = min(last, piece.start + counted.stop) - self._start
            if start >= stop:
                continue
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return ranges

    def _reduce(self) -> Tensor:
        """This rank's share of the gradient, summed over the holders of shared rows and over dp."""
        self._shared_sums.run()
        if self._group is None:
            return self._gradients
        share = torch.empty_like(self._state["master"])
        reduce_scatter(share, self._gradients, group=self._group)
        return share

    def _clip_factor(self, norm: float) -> float:
        bound = self.settings.max_grad_norm
        return 1.0 if bound is None else min(1.0, bound / (norm + 1e-6))

    def _update(self, gradient: Tensor, learning_rate: float, factor: float) -> None:
        """One AdamW step on this rank's share. Parameters with weight decay come first in the flat buffer.

        Both parts have a multiple of ALIGNMENT elements, so that no bit depends on how the buffer is shared out.
        """
        if factor < 1:
            gradient.mul_(factor)  # in the kernel the factor would be rounded to float32
        beta1, beta2 = self.settings.betas
        decayed = min(max(self._decayed - self._start, 0), self._share)
        for rows, decay in (
            (slice(0, decayed), self.settings.weight_decay),
            (slice(decayed, self._share), 0.0),
        ):
            if rows.start < rows.stop:
                master, mean, square = (
                    self._state[kind][rows] for kind in ("master", "exp_avg", "exp_avg_sq")
                )
                adamw(
                    [master],
                    [gradient[rows]],
                    [mean],
                    [square],
                    [],
                    [
                        torch.tensor(self.step - 1.0, device=master.device)
                    ],  # the kernel's own count, before this step
                    fused=True,
                    amsgrad=False,
                    maximize=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=learning_rate,
                    weight_decay=decay,
                    eps=self.settings.eps,
                )


def _accumulate_into(total: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's new gradient to `total` and frees it."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return hook


def _square_norm(tensor: Tensor) -> float:
    """The squared 2-norm in float64, of a flat tensor. It is converted in blocks, not as a whole."""
    parts = tensor.split(NORM_BLOCK[tensor.device.type])
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    return float(torch.stack(norms).square().sum())


def primary_range(layout: Layout, name: str, device: int) -> range:
    """The elements of a device's flattened slice that it counts in sums over the model (see `Layout.primary`).

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
    """Shared rows on this rank: their gradient (a view), whether it enters the sum, and its range in the buffer."""

    gradient: Tensor
    counts: bool
    start: int
    stop: int


class _Exchange(NamedTuple):
    """One all-reduce: the group, the buffer's size in elements, and this rank's parts of it."""

    group: dist.ProcessGroup | None
    size: int
    slots: list[_Slot]


class SharedSums:
    """Sums the gradients of rows that several ranks of a replica hold, over these ranks and over dp.

    Where each holder has only a part of the gradient (KV heads on several tp ranks, norms inside heads, tied
    embeddings), all parts are summed. Where all holders have the same gradient, only the first one's enters the sum.
    There is one all-reduce over each stage, and one over the first and last stages; each shared piece has its own
    range in the buffer.

    The sum over dp is computed here too, because floating-point sums depend on their order. The order of the
    optimizer's reduce-scatter depends on where rows are in a rank's buffer, so with it the copies of a row would
    drift apart.

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
        """Sum in place. Collective over each stage, and over the first and last stages.

        Afterwards the holders of the first dp rank have the sum, and all others zeros. So the later sum over dp
        changes no bit.
        """
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
        """The all-reduce of the pieces whose holders are among `holders` (devices of this dp rank).

        The buffer's ranges are the same on all ranks of the group.
        """
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
        """A view of some rows (global numbers) of a gradient."""
        held = self._layout.held(self._device)[name]
        return self._gradients[name].narrow(self._layout.specs[name].dim, rows.start - held.start, rows.size)
