"""Weights that change during a run, with their state sharded over data parallelism (ZeRO, arXiv:1910.02054).

A rank's parameters are stored one after the other in a flat buffer, which is cut into buckets (state_layout.py). Each
dp rank updates its share of a bucket's master weights; an all-gather distributes the new weights. State is addressed
by parameter name and range of elements, so a checkpoint can be restored into any other layout.

`MasterWeights` change by a blend with other weights. An `Optimizer` changes them by AdamW, from its share of the
gradient (gradients.py).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from rlhf_tasks.parallel.comm.groups import ProcessGroups, all_reduce
from rlhf_tasks.parallel.layout.slices import Layout
from rlhf_tasks.parallel.train.gradients import Gradients
from rlhf_tasks.parallel.train.state_layout import Bucket, StateLayout
from rlhf_tasks.system.failpoints import Point, reach

# torch 2.13 renamed it and warns of the old name; 2.11 has only the old one.
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
        self._buckets, self._kept = state.buckets(device), tuple(state.kept(device))
        (dtype,) = {parameter.dtype for parameter in slices.values()}
        (on,) = {parameter.device for parameter in slices.values()}
        self._precise = torch.float64 if dtype == torch.float64 else torch.float32
        self._weights = torch.zeros(self._buckets[-1].stop, dtype=dtype, device=on)
        self._flat = {}
        for piece in (piece for bucket in self._buckets for piece in bucket.pieces):
            parameter = slices[piece.name]
            flat = self._flat[piece.name] = self._weights[piece.start : piece.stop]
            flat.view_as(parameter).copy_(parameter.detach())
            parameter.data = flat.view_as(parameter)
        master = torch.zeros(self._buckets[-1].share.stop, dtype=self._precise, device=on)
        for name, start, stop, at in self._kept:
            master[at : at + stop - start] = self._flat[name][start:stop]
        self._state: dict[StateKind, Tensor] = {"master": master}

    def blend(self, slices: Mapping[str, Tensor], share: float) -> None:
        """Set the master weights to share * slices + (1 - share) * master weights, and the weights to these.

        slices  parameter name -> this rank's slice of other weights
        Collective over the dp group. No bit depends on the layout: each product and each sum is rounded by itself.
        """
        master = self._state["master"]
        master.mul_(1 - share)
        for name, start, stop, at in self._kept:
            other = slices[name].detach().flatten()[start:stop]
            master[at : at + stop - start] += other.to(master.dtype) * share
        self.step += 1
        self._gather(self._buckets)

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
        self._gather(self._buckets)

    def _gather(self, ready: Iterable[Bucket]) -> None:
        """All-gather the weights of buckets from the master weights of all dp ranks, each as soon as it is ready.

        Only one is on its way at a time, to save memory.
        """
        on_its_way: tuple[dist.Work, Tensor] | None = None
        for bucket in ready:
            weights = self._weights[bucket.start : bucket.stop]
            share = self._state["master"][slice(*bucket.share)].to(weights.dtype)
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
        self.gradients = Gradients(slices, layout, groups, self._precise)
        self._state["exp_avg"] = torch.zeros_like(self._state["master"])
        self._state["exp_avg_sq"] = torch.zeros_like(self._state["master"])
        self._counted = self._primary_ranges(layout, groups.rank)

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
            self._gather(self._updated(gradient, learning_rate, self._clip_factor(norm)))
        return StepReport(norm, skipped)

    def _primary_ranges(self, layout: Layout, device: int) -> list[tuple[int, int]]:
        """The ranges of this rank's share that count in the gradient norm; adjacent ranges are joined."""
        ranges: list[tuple[int, int]] = []
        for name, first, last, at in self._kept:
            counted = primary_range(layout, name, device)
            start, stop = max(first, counted.start) - first + at, min(last, counted.stop) - first + at
            if start >= stop:
                continue
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return ranges

    def _clip_factor(self, norm: float) -> float:
        bound = self.settings.max_grad_norm
        return 1.0 if bound is None else min(1.0, bound / (norm + 1e-6))

    def _updated(self, gradient: Tensor, learning_rate: float, factor: float) -> Iterator[Bucket]:
        """Make one AdamW step on this rank's shares, and give each bucket when it has made it.

        A share has a multiple of ALIGNMENT elements, so that no bit depends on how the buffer is shared out.
        """
        if factor < 1:
            gradient.mul_(factor)  # in the kernel the factor would be rounded to float32
        beta1, beta2 = self.settings.betas
        step = torch.tensor(
            self.step - 1.0, device=gradient.device
        )  # the kernel's own count, before this step
        for bucket in self._buckets:
            share = slice(*bucket.share)
            master, mean, square = (self._state[kind][share] for kind in ("master", "exp_avg", "exp_avg_sq"))
            adamw(
                [master],
                [gradient[share]],
                [mean],
                [square],
                [],
                [step.clone()],
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=beta1,
                beta2=beta2,
                lr=learning_rate,
                weight_decay=self.settings.weight_decay if bucket.decayed else 0.0,
                eps=self.settings.eps,
            )
            yield bucket
        reach(Point.OPTIMIZER_STEP)


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
