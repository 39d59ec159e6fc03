"""Weights that change during a run, with their state sharded over data parallelism (ZeRO, arXiv:1910.02054).

A rank's parameters are stored one after the other in a flat buffer, which is cut into buckets (state_layout.py). Each
dp rank updates its share of a bucket's master weights; an all-gather distributes the new weights. Where weights are
sharded, passes gather them (model/shares.py). State is addressed by parameter name and range of elements, so a
checkpoint can be restored into any other layout.

`MasterWeights` change by a blend with other weights. An `Optimizer` changes them by AdamW, from its share of the
gradient (gradients.py).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from prefect_rlhf.rlhf_tasks.parallel.comm.checksums import checksums, require_same
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, all_gather, all_reduce
from prefect_rlhf.rlhf_tasks.parallel.comm.host_memory import Arrival, Copier, host_zeros
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import CHUNK, Bucket, StateLayout
from prefect_rlhf.rlhf_tasks.parallel.model.shares import Shares
from prefect_rlhf.rlhf_tasks.parallel.train.gradients import Gradients
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach

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
    shares  where these parameters are sharded: this rank's shares of them
    step    the number of updates applied; skipped ones do not count
    """

    def __init__(
        self,
        slices: Mapping[str, nn.Parameter],
        layout: Layout,
        groups: ProcessGroups,
        on_host: bool = False,
        shares: Shares | None = None,
    ) -> None:
        self.step = 0
        self._shares = shares
        self._on_host = on_host
        device = groups.rank
        self._group = groups[layout.placement.dp_group(device)]
        state = StateLayout(layout)
        self._buckets = state.buckets(device)
        self._kept = tuple(state.kept(device))
        (dtype,) = {parameter.dtype for parameter in slices.values()}
        (on,) = {parameter.device for parameter in slices.values()}
        self._precise = torch.float64 if dtype == torch.float64 else torch.float32
        # parameter, its range in the flat buffer, its shape
        self._parameters = [
            (slices[piece.name], slice(piece.start, piece.stop), slices[piece.name].shape)
            for bucket in self._buckets
            for piece in bucket.pieces
        ]
        if shares is None:
            flat = torch.zeros(self._buckets[-1].stop, dtype=dtype, device=on)
            for parameter, at, _ in self._parameters:
                flat[at] = parameter.detach().flatten()
            self.use(flat)
        master = self._zeros()
        ranges = shares.ranges() if shares is not None else {}
        for name, start, stop, at in self._kept:
            first = ranges[name] if shares is not None else slices[name].detach().flatten()[start:stop]
            master[at : at + stop - start] = first
        self._state: dict[StateKind, Tensor] = {"master": master}

    @property
    def weights(self) -> Tensor:
        """[elements] this rank's parameters, flat; where they are sharded, its shares of them."""
        return self._flat if self._shares is None else self._shares.flat

    def use(self, weights: Tensor) -> None:
        """Let the parameters lie in another tensor like `weights`. In one without elements they are not there: until
        there is another one, only their state may be used."""
        if self._shares is not None:
            self._shares.flat = weights
            return
        self._flat = weights
        for parameter, at, shape in self._parameters:
            parameter.data = weights[at].view(shape) if weights.numel() else weights

    def _zeros(self) -> Tensor:
        """A new tensor of the state, flat: on the device, or in host memory."""
        size, on = self._buckets[-1].share.stop, self.weights.device
        if self._on_host:
            return host_zeros(size, self._precise, on)
        return torch.zeros(size, dtype=self._precise, device=on)

    def blend(self, slices: Mapping[str, Tensor], share: float) -> None:
        """Set the master weights to share * slices + (1 - share) * master weights, and the weights to these.

        slices  parameter name -> this rank's slice of other weights; what it has of that where they are sharded
        Collective over the dp group. No bit depends on the layout: each product and each sum is rounded by itself.
        """
        master = self._state["master"]
        master.mul_(1 - share)
        for name, start, stop, at in self._kept:
            other = slices[name].detach().flatten()
            other = other[start:stop] if self._shares is None else other
            master[at : at + stop - start] += other.to(master.dtype) * share
        self.step += 1
        self._gather((bucket, self._share(bucket)) for bucket in self._buckets)

    def shard_state(self) -> Iterator[StateShard]:
        """This rank's share of the state, as views. The shares of a dp group cover each element exactly once."""
        for name, start, stop, at in self._kept:
            for kind, state in self._state.items():
                yield StateShard(name, kind, start, stop, state[at : at + stop - start])

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
        self._gather((bucket, self._share(bucket)) for bucket in self._buckets)

    def _share(self, bucket: Bucket) -> Tensor:
        """This rank's share of a bucket's weights, from its master weights: on the device, in the weights' dtype."""
        return self._state["master"][slice(*bucket.share)].to(self.weights.device, self.weights.dtype)

    def _gather(self, ready: Iterable[tuple[Bucket, Tensor]]) -> None:
        """All-gather the weights of buckets, each as soon as it is ready, from this rank's share and all dp ranks'.

        Only one is on its way at a time, to save memory. Sharded weights are not gathered here.
        """
        if self._shares is not None:
            for bucket, share in ready:
                self.weights[slice(*bucket.share)] = share
            return
        on_its_way: tuple[dist.Work, Tensor] | None = None
        for bucket, share in ready:
            weights = self._flat[bucket.start : bucket.stop]
            if self._group is None:
                weights.copy_(share)
            else:
                if on_its_way is not None:
                    on_its_way[0].wait()
                work = all_gather(weights, share, group=self._group, async_op=True)
                assert work is not None
                on_its_way = work, share
        if on_its_way is not None:
            on_its_way[0].wait()


class Optimizer(MasterWeights):
    """The optimizer of one rank's parameters: AdamW, with gradients and two moments.

    copies  where the state is kept in host memory, what copies it to the device and back during a step; None: it is
            on the device. Either way every bit is the same
    shares  where the model's weights are sharded: this rank's shares of them. Those below adapters stay as they are
    """

    def __init__(
        self,
        slices: Mapping[str, nn.Parameter],
        layout: Layout,
        groups: ProcessGroups,
        settings: OptimizerSettings,
        copies: Copier | None = None,
        shares: Shares | None = None,
    ) -> None:
        super().__init__(slices, layout, groups, copies is not None, None if layout.lora else shares)
        self.settings = settings
        self._copies = copies
        self._mesh = groups[layout.placement.devices]
        self.gradients = Gradients(slices, layout, groups, self._precise, shares)
        self._state |= {"exp_avg": self._zeros(), "exp_avg_sq": self._zeros()}
        self._counted = self._primary_ranges(layout, groups.rank)
        self._rank = groups.rank
        self._left: Tensor | None = None  # checksums of each chunk of each kind when it last left the device

    def load_shard_state(self, shards: Iterable[StateShard], step: int) -> None:
        self._left = None
        super().load_shard_state(shards, step)

    def apply(self, learning_rate: float, finite: bool = True) -> StepReport:
        """Take the sum of the gradients and, if all are finite, clip them and update.

        learning_rate  of this step; the caller applies the schedule
        finite         False on a rank whose loss is not finite; then no rank updates
        Collective over the whole placement.
        """
        gradient = self.gradients.total()
        squares = sum(_square_norm(gradient[start:stop]) for start, stop in self._counted)
        totals = torch.tensor([squares, not finite], dtype=torch.float64, device=gradient.device)
        square, failures = all_reduce(totals, self._mesh).tolist()
        norm = math.sqrt(square) if square >= 0 else math.nan
        skipped = failures > 0 or not math.isfinite(norm)
        if not skipped:
            self.step += 1
            bound = self.settings.max_grad_norm
            factor = 1.0 if bound is None else min(1.0, bound / (norm + 1e-6))
            self._gather(self._updated(gradient, learning_rate, factor))
        return StepReport(norm, skipped)

    def _primary_ranges(self, layout: Layout, device: int) -> list[tuple[int, int]]:
        """The ranges of this rank's share that count in the gradient norm; adjacent ranges are joined."""
        ranges: list[tuple[int, int]] = []
        for name, first, last, at in self._kept:
            counted = _primary_range(layout, name, device)
            start, stop = max(first, counted.start) - first + at, min(last, counted.stop) - first + at
            if start >= stop:
                continue
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return ranges

    def _updated(
        self, gradient: Tensor, learning_rate: float, factor: float
    ) -> Iterator[tuple[Bucket, Tensor]]:
        """Make one AdamW step on this rank's shares, and give each bucket when it has made it, with its new share."""
        if factor < 1:
            gradient.mul_(factor)  # in the kernel the factor would be rounded to float32
        if self._copies is None:
            for bucket in self._buckets:
                share = slice(*bucket.share)
                self._update(bucket, gradient[share], [held[share] for held in self._held], learning_rate)
                yield bucket, self._share(bucket)
        else:
            yield from self._updated_in_chunks(gradient, learning_rate, self._copies)
        reach(Point.OPTIMIZER_STEP)

    def _updated_in_chunks(
        self, gradient: Tensor, learning_rate: float, copies: Copier
    ) -> Iterator[tuple[Bucket, Tensor]]:
        """As `_updated`, with the state in host memory."""
        chunks = [list(_chunks(*bucket.share)) for bucket in self._buckets]
        ranges = [chunk for own in chunks for chunk in own]
        pieces = _streamed(self._held, ranges, gradient.device, copies)
        left, arrived, leaving = self._left, list[Tensor](), list[Tensor]()
        for bucket, own in zip(self._buckets, chunks, strict=True):
            share = self.weights.new_empty(bucket.share.size)
            for start, stop in own:
                state = next(pieces)
                if left is not None:
                    arrived.append(checksums(state, gradient.device))
                self._update(bucket, gradient[start:stop], state, learning_rate)
                leaving.append(checksums(state, gradient.device))
                share[start - bucket.share.start : stop - bucket.share.start] = state[0]
            yield bucket, share
        for _ in pieces:
            raise AssertionError("every chunk belongs to a bucket")
        self._left = torch.stack(leaving)
        if left is not None:
            where = f"optimizer state of rank {self._rank} from host memory"
            require_same(where, self._names_of(ranges), left.view(-1), torch.stack(arrived).view(-1))

    def _names_of(self, ranges: Sequence[tuple[int, int]]) -> Iterator[str]:
        """What the pieces in some ranges of the state belong to, kind after kind: parameters, by their names."""
        for start, stop in ranges:
            names = [n for n, first, last, at in self._kept if at < stop and at + last - first > start]
            for kind in self._state:
                yield f"{kind} of {', '.join(names)}"

    @property
    def _held(self) -> list[Tensor]:
        """The state, flat: master weights and both moments."""
        return [self._state["master"], self._state["exp_avg"], self._state["exp_avg_sq"]]

    def _update(
        self, bucket: Bucket, gradient: Tensor, state: Sequence[Tensor], learning_rate: float
    ) -> None:
        """Make one AdamW step on a part of this rank's share of a bucket: the same elements of gradient and state.

        A part has a multiple of ALIGNMENT elements, so that no bit depends on how the buffer is shared out.
        """
        master, mean, square = state
        beta1, beta2 = self.settings.betas
        steps_before = torch.full((), self.step - 1.0, device=gradient.device)  # the kernel counts by itself
        adamw(
            [master],
            [gradient],
            [mean],
            [square],
            [],
            [steps_before],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=learning_rate,
            weight_decay=self.settings.weight_decay if bucket.decayed else 0.0,
            eps=self.settings.eps,
        )


def _streamed(
    state: Sequence[Tensor], ranges: Sequence[tuple[int, int]], device: torch.device, copies: Copier
) -> Iterator[list[Tensor]]:
    """For each range (start, stop) of elements: its pieces of all tensors on the device, [stop - start] each.

    state  tensors [elements] in host memory. What is in the pieces when the next ones are asked for goes back there

    There are two buffers: while one piece is used, the next one arrives. When the iterator is exhausted, host memory
    is complete.
    """
    most = max(stop - start for start, stop in ranges)
    buffers = [[torch.empty(most, dtype=held.dtype, device=device) for held in state] for _ in range(2)]
    returning: list[Arrival | None] = [None, None]

    def pairs(number: int) -> list[tuple[Tensor, Tensor]]:
        """(in host memory, on the device) of a range."""
        start, stop = ranges[number]
        return [
            (held[start:stop], buffer[: stop - start])
            for held, buffer in zip(state, buffers[number % 2], strict=True)
        ]

    arriving = copies.start(pairs(0))
    for number in range(len(ranges)):
        here = arriving
        if number + 1 < len(ranges):
            leaves = returning[(number + 1) % 2]
            if leaves is not None:
                leaves.wait()
            arriving = copies.start(pairs(number + 1))
        here.wait()
        yield [piece for _, piece in pairs(number)]
        returning[number % 2] = copies.start([(piece, held) for held, piece in pairs(number)])
    for leaves in returning:
        if leaves is not None:
            leaves.finish()


def _chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """A range of elements in parts of at most CHUNK."""
    for first in range(start, stop, CHUNK):
        yield first, min(first + CHUNK, stop)


def _square_norm(tensor: Tensor) -> float:
    """The squared 2-norm in float64, of a flat tensor. It is converted in blocks, not as a whole."""
    parts = tensor.split(NORM_BLOCK[tensor.device.type])
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    return float(torch.stack(norms).square().sum())


def _primary_range(layout: Layout, name: str, device: int) -> Interval:
    """The elements of a device's flattened slice that it counts in sums over the model (see `Layout.primary`).

    Over the devices of one replica every element of the model counts exactly once.
    """
    spec, held, primary = layout.specs[name], layout.held(device)[name], layout.primary(device)[name]
    if primary.size == held.size:
        return Interval(0, held.size * spec.row_size)
    assert primary.size == 0 or spec.dim == 0, f"copies of {name} overlap on dim {spec.dim}, not on the first"
    start = (primary.start - held.start) * spec.row_size
    return Interval(start, start + primary.size * spec.row_size)
