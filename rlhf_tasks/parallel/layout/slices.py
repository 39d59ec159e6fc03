"""Which device of a placement holds which slice of which parameter. Pure Python.

A slice is an interval on one dim (`ParameterSpec.dim`). Query heads, columns and vocabulary are split over tp at
floor(i n / tp), without padding. A rank holds every KV head that its query heads use, so neighbouring ranks may hold
the same KV heads. Layers are split over stages at floor(i L / pp). Tied embeddings are on the first and last stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora, parameters, trained_parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import (
    KV_HEADS,
    Head,
    Heads,
    ModelShape,
    ParameterSpec,
    Unit,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement


class Interval(NamedTuple):
    """Rows start .. stop - 1 of a parameter's dim; empty when stop <= start."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return max(0, self.stop - self.start)

    def intersect(self, other: "Interval") -> "Interval":
        """The common rows; an empty interval when there are none."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def within(self, outer: "Interval") -> slice:
        """The slice of these rows in a tensor that holds the rows `outer`."""
        assert outer.start <= self.start <= self.stop <= outer.stop, (self, outer)
        return slice(self.start - outer.start, self.stop - outer.start)


class Shared(NamedTuple):
    """Rows of a parameter that several devices of one dp rank hold; devices in the order of pp rank, then tp rank."""

    name: str
    interval: Interval
    devices: tuple[int, ...]


class Message(NamedTuple):
    """What goes from stage to stage for each token: its hidden state, inputs of later layers, keys and values.

    inputs  columns of a layer's input; later: the numbers of the layers that have one
    keys    number of a layer -> those of its KV heads that the device holds: later layers share their keys and values
    """

    hidden: int
    inputs: int
    later: tuple[int, ...]
    keys: Mapping[int, Heads]

    @property
    def columns(self) -> int:
        """Numbers for each token."""
        of_keys = sum(2 * heads.kv * heads.dim for heads in self.keys.values())
        return self.hidden + self.inputs * len(self.later) + of_keys


def split(length: int, parts: int, index: int) -> Interval:
    """Part number `index` of `length` rows that are cut into `parts` at floor(i * length / parts)."""
    return Interval(index * length // parts, (index + 1) * length // parts)


def check_context_parallel(shape: ModelShape, strategy: ParallelStrategy) -> None:
    """Raises ValueError when cp does not suit a model: every cp rank attends with a share of the query heads of its
    tp rank, and only attention can read other ranks' tokens."""
    if strategy.cp == 1:
        return
    heads = shape.query_heads // strategy.tp
    if strategy.cp > heads:
        raise ValueError(
            f"cp={strategy.cp} exceeds the {heads} query heads that a tp rank has of the model's {shape.query_heads} "
            f"(tp={strategy.tp}). Choose a smaller cp or tp."
        )
    kinds = sorted({shape.kind_of(layer) for layer in range(shape.layers)} - set(KV_HEADS))
    if kinds:
        raise ValueError(
            f"cp={strategy.cp} divides the tokens of a sequence, but {shape.family} has layers that pass a state "
            f"from token to token ({', '.join(kinds)}). Leave out cp."
        )


@dataclass(frozen=True)
class Layout:
    """A model on a placement, or with `lora` only the part of it that training changes.

    Raises ValueError when a tp rank or a stage would be empty, or a cp rank would have nothing to attend to.
    """

    shape: ModelShape
    head: Head
    placement: Placement
    lora: Lora | None = None

    def __post_init__(self) -> None:
        strategy, shape = self.placement.strategy, self.shape
        limits = {"query heads": shape.query_heads, "columns": shape.least_columns, "tokens": shape.vocab}
        if shape.delta is not None:
            limits["key heads of linear attention"] = shape.delta.heads
        for what, limit in limits.items():
            if strategy.tp > limit:
                raise ValueError(f"tp={strategy.tp} exceeds the model's {limit} {what}. Choose a smaller tp.")
        if strategy.pp > shape.layers:
            raise ValueError(
                f"pp={strategy.pp} exceeds the model's {shape.layers} layers. Choose a smaller pp."
            )
        check_context_parallel(shape, strategy)

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """All parameters of the model, or of its trained part, on whichever device."""
        if self.lora is None:
            return parameters(self.shape, self.head)
        return trained_parameters(self.shape, self.head, self.lora)

    @property
    def whole(self) -> "Layout":
        """The layout of the model itself."""
        return self if self.lora is None else replace(self, lora=None)

    @property
    def weight_shares(self) -> int:
        """Number of devices over which each slice of these parameters is cut. Adapters are whole, whatever is below
        them."""
        return self.placement.strategy.weight_shares if self.lora is None else 1

    @cached_property
    def specs(self) -> Mapping[str, ParameterSpec]:
        return {spec.name: spec for spec in self.parameters}

    # Splits

    def stage_layers(self, pp_rank: int) -> range:
        return range(*split(self.shape.layers, self.placement.strategy.pp, pp_rank))

    def stages(self, spec: ParameterSpec) -> tuple[int, ...]:
        """The pp ranks that hold a parameter, in order."""
        pp = self.placement.strategy.pp
        if spec.place == "layer":
            assert spec.layer is not None
            # the p with floor(p L / pp) <= layer < floor((p + 1) L / pp)
            return (((spec.layer + 1) * pp - 1) // self.shape.layers,)
        ends = {"first": (0,), "last": (pp - 1,), "ends": (0, pp - 1)[: min(2, pp)]}
        return ends[spec.place]

    def units(self, unit: Unit, tp_rank: int) -> Interval:
        """The query heads, KV heads, columns or tokens of the vocabulary that a tp rank holds."""
        tp, shape = self.placement.strategy.tp, self.shape
        if unit in ("kv_head", "global_kv_head"):
            kv_heads = shape.varied.kv_heads if shape.varied and unit == "global_kv_head" else shape.kv_heads
            heads, group = split(shape.query_heads, tp, tp_rank), shape.query_heads // kv_heads
            return Interval(heads.start // group, -(-heads.stop // group))
        totals = {
            "query_head": shape.query_heads,
            "column": shape.intermediate,
            "vocab": shape.vocab,
            "channel": shape.hidden,
            "delta_head": shape.delta.heads if shape.delta else 0,
        }
        return split(totals[unit], tp, tp_rank)

    def interval(self, spec: ParameterSpec, tp_rank: int) -> Interval:
        """The rows of a parameter that a tp rank holds, on a stage that holds it; all rows if it is not sharded."""
        if spec.unit is None:
            return Interval(0, spec.length)
        if spec.unit in ("column", "vocab"):  # MLPs of different widths, embeddings of different vocabularies
            return split(spec.length, self.placement.strategy.tp, tp_rank)
        units = self.units(spec.unit, tp_rank)
        return Interval(units.start * spec.unit_size, units.stop * spec.unit_size)

    def kv_head_map(self, tp_rank: int, layer: int = 0) -> tuple[int, ...]:
        """The local KV head of each local query head of a tp rank: one entry per query head."""
        group = self.shape.query_heads // self.shape.heads(layer).kv
        first = self.units(KV_HEADS.get(self.shape.kind_of(layer), "kv_head"), tp_rank).start
        return tuple(head // group - first for head in range(*self.units("query_head", tp_rank)))

    def message(self, pp_rank: int, tp_rank: int) -> Message:
        """What a device gives the one of the next stage for each token."""
        shape, last = self.shape, self.stage_layers(pp_rank).stop - 1
        later = range(last + 1, shape.layers)
        sources = sorted({shape.keys_of(layer) for layer in later if shape.keys_of(layer) <= last})

        def heads(layer: int) -> Heads:
            unit = KV_HEADS[shape.kind_of(layer)]
            return shape.heads(layer)._replace(kv=self.units(unit, tp_rank).size)

        inputs = shape.varied.inputs if shape.varied else 0
        return Message(shape.hidden, inputs, tuple(later), {layer: heads(layer) for layer in sources})

    # Holdings

    def held(self, device: int) -> Mapping[str, Interval]:
        """The slices that a device holds: parameter name -> rows. Equal for all devices of a dp group."""
        at = self.placement.coordinate(device)
        return self._held[at.pp][at.tp]

    def slice_shape(self, name: str, device: int) -> tuple[int, ...]:
        """Shape of a device's slice of a parameter. Raises KeyError when the device holds none."""
        spec, rows = self.specs[name], self.held(device)[name].size
        return (*spec.shape[: spec.dim], rows, *spec.shape[spec.dim + 1 :])

    def holders(self, name: str, dp_rank: int, cp_rank: int = 0) -> tuple[tuple[int, Interval], ...]:
        """(device, rows) of every device of a dp and cp rank that holds a slice of a parameter, by pp rank, then tp
        rank."""
        spec = self.specs[name]
        return tuple(
            (self.placement.device(dp_rank, tp_rank, pp_rank, cp_rank), self.interval(spec, tp_rank))
            for pp_rank in self.stages(spec)
            for tp_rank in range(self.placement.strategy.tp)
        )

    # Copies inside one dp rank

    def primary(self, device: int) -> Mapping[str, Interval]:
        """The rows that a device counts in sums over the model, such as gradient norms and digests: name -> rows.

        Of the rows that several devices of a dp rank hold, only one of these devices counts each.
        """
        at = self.placement.coordinate(device)
        return self._primary[at.pp][at.tp]

    def shared(self, name: str, dp_rank: int, cp_rank: int = 0) -> tuple[Shared, ...]:
        """The pieces of a parameter that several devices of a dp and cp rank hold, cut where the holders change."""
        holders = self.holders(name, dp_rank, cp_rank)
        cuts = sorted({cut for _, rows in holders for cut in rows})
        pieces: list[Shared] = []
        for start, stop in pairwise(cuts):
            devices = tuple(d for d, rows in holders if rows.start <= start and stop <= rows.stop)
            if len(devices) > 1:
                pieces.append(Shared(name, Interval(start, stop), devices))
        return tuple(pieces)

    # Tables: [pp_rank][tp_rank] -> name -> rows

    @cached_property
    def _held(self) -> tuple[tuple[Mapping[str, Interval], ...], ...]:
        s = self.placement.strategy
        on_stage: list[list[ParameterSpec]] = [[] for _ in range(s.pp)]
        for spec in self.parameters:
            for pp_rank in self.stages(spec):
                on_stage[pp_rank].append(spec)
        return tuple(
            tuple({spec.name: self.interval(spec, tp_rank) for spec in specs} for tp_rank in range(s.tp))
            for specs in on_stage
        )

    @cached_property
    def _primary(self) -> tuple[tuple[Mapping[str, Interval], ...], ...]:
        return tuple(
            tuple(
                {name: self._untaken(self.specs[name], tp_rank, pp_rank) for name in held}
                for tp_rank, held in enumerate(stage)
            )
            for pp_rank, stage in enumerate(self._held)
        )

    def _untaken(self, spec: ParameterSpec, tp_rank: int, pp_rank: int) -> Interval:
        """The rows of a tp rank that no lower tp rank and no earlier stage holds.

        The stops of the intervals never decrease from one tp rank to the next, so all rows of lower tp ranks are
        below the predecessor's stop.
        """
        rows = self.interval(spec, tp_rank)
        taken = self.interval(spec, tp_rank - 1).stop if tp_rank else 0
        if pp_rank != self.stages(spec)[0]:
            taken = rows.stop
        return Interval(max(rows.start, taken), max(rows.stop, taken))
