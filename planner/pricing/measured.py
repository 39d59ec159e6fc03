"""Measured profiles: what ranks found for one model on one kind of device, and the timing read from it. Computed
ones (planner/pricing/analytic.py) have the same form and are read the same way.

Seconds between measured points are linear in tokens and in context, as work is; beyond the last point they go on
with the last slope, below the first one they stay, for there overhead is all. More
tokens, bytes or parameters never take less: what was measured so is noise (`rising`).
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from statistics import fmean
from typing import Self, get_args

from pydantic import Field, model_validator

from planner.plan.workload import RoleModel
from rlhf_tasks.parallel.layout.shape import Head, ModelShape
from rlhf_tasks.profiling.measurements import (
    LEAST_S,
    MOST_BYTES,
    MOST_S,
    Exchange,
    Measurements,
    Operation,
    Pass,
    Timed,
    TimedExchange,
)
from rlhf_tasks.spec import Frozen


class ProfileError(ValueError):
    """A profile that does not fit: one sentence with the values and what to change."""


class MeasuredProfile(Frozen):
    """What was measured of one model on one kind of device, or computed in its place (planner/pricing/analytic.py).

    device         name of the device, as in DeviceProfile
    n_hosts, devices_per_host   of the cluster that it was measured on
    model          the model's shape; itemsize: bytes of its parameters
    operations     seconds of layers, ends and updates; exchanges: of collectives and messages
    dispatch_s     between two nodes of a plan on a rank
    process_bytes  memory of a rank's process besides tensors
    computed_from  the figures that a computed profile is of, as in `preset of h100-sxm`; None where ranks measured it
    Raises ValueError when a figure is missing or cannot be.
    """

    device: str
    n_hosts: int = Field(gt=0)
    devices_per_host: int = Field(gt=0)
    model: ModelShape
    itemsize: int = Field(gt=0)
    operations: tuple[Timed, ...] = Field(min_length=1)
    exchanges: tuple[TimedExchange, ...] = ()
    dispatch_s: float = Field(default=0.0, ge=0, le=MOST_S, allow_inf_nan=False)
    process_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    computed_from: str | None = None

    @model_validator(mode="after")
    def _figures_are_sound(self) -> Self:
        for timed in self.operations:
            sizes = (timed.tokens, timed.tp, timed.context + 1)
            if not (_can_be(timed.seconds) and min(sizes) >= 1 and max(sizes) <= MOST_BYTES):
                raise ProfileError(f"profile of {self.device}: {timed} has a figure that cannot be.")
        for exchange in self.exchanges:
            nothing = exchange.seconds == 0 and self.computed_from is None  # a stated latency may be 0
            sizes = (exchange.ranks - 1, exchange.size_bytes + 1)
            if nothing or not (_can_be(exchange.seconds) and min(sizes) >= 1 and max(sizes) <= MOST_BYTES):
                raise ProfileError(f"profile of {self.device}: {exchange} has a figure that cannot be.")
        return self

    @staticmethod
    def of(
        device: str,
        n_hosts: int,
        devices_per_host: int,
        model: ModelShape,
        itemsize: int,
        measured: Sequence[Measurements],
        dispatch_s: float = 0.0,
    ) -> "MeasuredProfile":
        """The profile of what all ranks measured: means over the ranks that measured the same."""
        operations, exchanges = defaultdict(list), defaultdict(list)
        for found in measured:
            for timed in found.operations:
                operations[timed.operation, timed.tp, timed.tokens, timed.context].append(timed.seconds)
            for e in found.exchanges:
                exchanges[e.kind, e.ranks, e.crosses_hosts, e.size_bytes].append(e.seconds)
        return MeasuredProfile(
            device=device,
            n_hosts=n_hosts,
            devices_per_host=devices_per_host,
            model=model,
            itemsize=itemsize,
            operations=tuple(
                Timed(operation=o, tp=tp, tokens=n, context=c, seconds=fmean(seconds))
                for (o, tp, n, c), seconds in operations.items()
            ),
            exchanges=tuple(
                TimedExchange(kind=k, ranks=r, crosses_hosts=x, size_bytes=b, seconds=fmean(seconds))
                for (k, r, x, b), seconds in exchanges.items()
            ),
            dispatch_s=dispatch_s,
            process_bytes=max(found.process_bytes for found in measured),
        )

    @property
    def title(self) -> str:
        """Whose figures these are, as in `measured profile of h100-sxm`."""
        if self.computed_from is None:
            return f"measured profile of {self.device}"
        return f"profile computed from the {self.computed_from}"

    def check(self, models: Mapping[str, RoleModel], itemsize: int) -> None:
        """Raises ProfileError when no role has this profile's model, or parameters have another size."""
        shapes = {role: model.shape for role, model in models.items()}
        if self.model not in shapes.values():
            role, shape = next(iter(shapes.items()))
            found = ", ".join(f"{name} {a}" for name, (a, _) in self.model.difference(shape).items())
            there = ", ".join(f"{name} {b}" for name, (_, b) in self.model.difference(shape).items())
            raise ProfileError(
                f"The profile of {self.device} is of another model: it has {found}, role {role!r} has {there}. "
                "Measure this run's models with prefect-rlhf profile."
            )
        if self.itemsize != itemsize:
            raise ProfileError(
                f"The profile of {self.device} is of parameters of {self.itemsize} bytes, the run's have "
                f"{itemsize}. Measure this run's models with prefect-rlhf profile."
            )

    def lacking(self) -> str:
        """What a whole profile has and this one has not, as in `optimizer at tp=2`; empty where it lacks nothing."""
        measured = {(o.operation, o.tp) for o in self.operations}
        exchanged = {(e.kind, e.ranks) for e in self.exchanges}
        n_ranks = self.n_hosts * self.devices_per_host
        wanted = {kind: 2 if kind in ("send", "redistribute") else n_ranks for kind in get_args(Exchange)}
        missing = [
            f"{o} at tp={tp}"
            for tp in self.tp_degrees
            for o in get_args(Operation)
            if (o, tp) not in measured
        ]
        if n_ranks > 1:
            missing += [f"{kind} among {n}" for kind, n in wanted.items() if (kind, n) not in exchanged]
        return ", ".join(missing[:1])

    @cached_property
    def operation_tables(self) -> Mapping[tuple[str, int], "Table"]:
        """(operation, tp) -> seconds by (context, tokens)."""
        points: dict[tuple[str, int], list[tuple[float, float, float]]] = defaultdict(list)
        for o in self.operations:
            points[o.operation, o.tp].append((o.context, o.tokens, o.seconds))
        return {key: Table(found) for key, found in points.items()}

    @cached_property
    def tp_degrees(self) -> frozenset[int]:
        """The tp degrees that were measured."""
        return frozenset(o.tp for o in self.operations)

    @cached_property
    def exchange_tables(self) -> Mapping[tuple[str, bool], "Table"]:
        """(kind, crosses hosts) -> seconds by (ranks, bytes)."""
        points: dict[tuple[str, bool], list[tuple[float, float, float]]] = defaultdict(list)
        for e in self.exchanges:
            points[e.kind, e.crosses_hosts].append((e.ranks, e.size_bytes, e.seconds))
        return {key: Table(found) for key, found in points.items()}


def _can_be(seconds: float) -> bool:
    return seconds == 0 or LEAST_S <= seconds <= MOST_S


class Table:
    """Seconds over a grid (row, column), linear between its points; see the module."""

    def __init__(self, points: Iterable[tuple[float, float, float]]) -> None:
        rows: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for row, column, seconds in points:
            rows[row].append((column, seconds))
        self.rows = sorted(rows)
        self._columns = [[column for column, _ in sorted(rows[row])] for row in self.rows]
        self._seconds = [rising([seconds for _, seconds in sorted(rows[row])]) for row in self.rows]

    def at(self, row: float, column: float) -> float:
        """Seconds at a point."""
        if len(self.rows) == 1:
            return self._in_row(0, column)
        place, share = _between(self.rows, row)
        low, high = self._in_row(place, column), self._in_row(place + 1, column)
        return max(low + share * (high - low), 0.0)

    def _in_row(self, place: int, column: float) -> float:
        columns, seconds = self._columns[place], self._seconds[place]
        if len(columns) == 1:
            return seconds[0]
        if (
            column > columns[-1]
        ):  # by the last slope that is none of noise, which leaves the last values alike
            i = max(bisect_left(seconds, seconds[-1]) - 1, 0)
            share = (column - columns[i]) / (columns[-1] - columns[i])
            return seconds[i] + share * (seconds[-1] - seconds[i])
        i, share = _between(columns, column)
        return seconds[i] + share * (seconds[i + 1] - seconds[i])


def rising(values: Sequence[float]) -> list[float]:
    """The values that never fall and lie closest to some given ones by least squares (Ayer et al. 1955): where these
    fall, their mean. More work never takes less time, so what says otherwise is noise."""
    pools: list[tuple[float, int]] = []  # mean and number of values
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _between(grid: Sequence[float], value: float) -> tuple[int, float]:
    """(i, share): the value lies at this share of the way from point i to the next; below the grid at its start,
    beyond it on the line through its last two points."""
    if value <= grid[0]:
        return 0, 0.0
    i = min(bisect_right(grid, value), len(grid) - 1) - 1
    return i, (value - grid[i]) / (grid[i + 1] - grid[i])


class ProfileTables:
    """Timing (planner/pricing/rooflines.py) from a measured profile.

    crosses  whether a tp group spans hosts: operations are measured on neighbours of one host where they fit on one
    Raises ProfileError when tp was not measured.
    """

    def __init__(self, profile: MeasuredProfile, head: Head, tp: int, crosses: bool) -> None:
        self._profile, self._head, self._tp, self._crosses = profile, head, tp, crosses
        if tp not in profile.tp_degrees:
            degrees = ", ".join(map(str, sorted(profile.tp_degrees)))
            raise ProfileError(
                f"The profile of {profile.device} has no figures for tp={tp} (it has tp={degrees}). "
                "Measure on the run's cluster with prefect-rlhf profile."
            )

    def layer_s(self, kind: Pass, tokens: float, context: float) -> float:
        """A layer's seconds. Its two sums are dearer where the tp group spans hosts and was measured inside one."""
        seconds = self._at(f"layer/{kind}", tokens, context)
        if self._crosses and self._tp <= self._profile.devices_per_host:
            size_bytes = tokens * self._profile.model.hidden * self._profile.itemsize
            across, inside = (
                self.exchange_s("all_reduce", self._tp, size_bytes, crosses) for crosses in (True, False)
            )
            seconds += 2 * max(across - inside, 0.0)
        return seconds

    def embedding_s(self, kind: Pass, tokens: float) -> float:
        if kind == "decode" or kind == "prefill":
            kind = "forward"
        return self._at(f"embedding/{kind}", tokens, 0)

    def head_s(self, kind: Pass, tokens: float, context: float) -> float:
        """What was measured of both ends less the embedding. A model that generates has an `lm` head."""
        return max(self._at(f"{self._head}/{kind}", tokens, context) - self.embedding_s(kind, tokens), 0.0)

    def update_s(self, parameters: float, dp: int) -> float:
        return self._at("optimizer", parameters / dp, 0)

    def exchange_s(self, kind: Exchange, ranks: int, size_bytes: float, crosses_hosts: bool) -> float:
        if ranks == 1:
            return 0.0
        tables = self._profile.exchange_tables
        table = tables.get((kind, crosses_hosts)) or tables.get((kind, not crosses_hosts))
        most = table.rows[-1] if table is not None else 1
        if table is None or ranks > most:
            raise ProfileError(
                f"The profile of {self._profile.device} has no figures for {kind} among {ranks} ranks (it has up to "
                f"{most:.0f}). Measure on the run's cluster with prefect-rlhf profile."
            )
        return table.at(ranks, size_bytes)

    def _at(self, operation: str, tokens: float, context: float) -> float:
        table = self._profile.operation_tables.get((operation, self._tp))
        if table is None:
            raise ProfileError(
                f"The profile of {self._profile.device} has no figures for {operation} at tp={self._tp}. "
                "Measure it again with prefect-rlhf profile."
            )
        return table.at(context, tokens)
