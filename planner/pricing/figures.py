"""Figures that were measured: profiles of ranks, calls of earlier runs, and the files of both in the output folder.

A measured profile has what ranks measured for one model on one kind of device. Computed profiles
(planner/pricing/analytic.py) have the same form and are read the same way. Seconds between measured points are linear
in tokens and in context, as the work is. Beyond the last point they continue with the last slope. Below the first
point they are constant, because overhead dominates there. More tokens, bytes or parameters never take less time:
measurements that say so are noise and are smoothed (`rising`).

A profile predicts a call from its parts; a run measures it as a whole. If the two differ by more than LIMIT, the
run's figures are stored, and the cost model uses them (docs/adr/0006-measured-figures.md).

Profiles are stored as one JSON file for each model shape and kind of device. A user did not ask for the files, so a
broken one must not stop a command: it is put aside, with a warning that names it.
"""

import hashlib
import json
import logging
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self, TypeVar, get_args
from uuid import uuid4

from pydantic import Field, TypeAdapter, model_validator

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths, RoleModel, Workload
from prefect_rlhf.planner.pricing.device_classes import DeviceClasses
from prefect_rlhf.rlhf_tasks.config.files import read_document
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Head, ModelShape
from prefect_rlhf.rlhf_tasks.profiling.measurements import (
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
from prefect_rlhf.rlhf_tasks.spec import CallAssignment, Frozen, ModelFunctionCall, SavedShape


class ProfileError(ValueError):
    """A profile does not fit its use; the message names the values and what to change."""


class MeasuredProfile(Frozen):
    """Measurements of one model on one kind of device, or computed figures in their place.

    device         name of the device, as in DeviceProfile
    n_hosts, devices_per_host   of the cluster that it was measured on
    model          the model's shape; itemsize: bytes of a parameter
    operations     seconds of layers, model ends and updates; exchanges: of collectives and messages
    dispatch_s     seconds between two nodes of a plan on a rank
    process_bytes  memory of a rank's process besides tensors, the least of those measured
    threads        of each rank on a CPU; 0: unknown
    computed_from  source of a computed profile's figures, as in `preset of h100-sxm`; None for a measured profile
    Raises ValueError when a figure is missing or impossible.
    """

    device: str
    n_hosts: int = Field(gt=0)
    devices_per_host: int = Field(gt=0)
    model: SavedShape
    itemsize: int = Field(gt=0)
    operations: tuple[Timed, ...] = Field(min_length=1)
    exchanges: tuple[TimedExchange, ...] = ()
    dispatch_s: float = Field(default=0.0, ge=0, le=MOST_S, allow_inf_nan=False)
    process_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    threads: int = Field(default=0, ge=0, le=MOST_BYTES)
    computed_from: str | None = None

    @model_validator(mode="after")
    def _figures_are_sound(self) -> Self:
        for timed in self.operations:
            sizes = (timed.tokens, timed.tp, timed.context + 1)
            if not (_can_be(timed.seconds) and min(sizes) >= 1 and max(sizes) <= MOST_BYTES):
                raise ProfileError(f"profile of {self.device}: {timed} has an impossible figure.")
        for exchange in self.exchanges:
            # A computed exchange takes 0 s if its stated latency is 0.
            nothing = exchange.seconds == 0 and self.computed_from is None
            sizes = (exchange.ranks - 1, exchange.size_bytes + 1)
            if nothing or not (_can_be(exchange.seconds) and min(sizes) >= 1 and max(sizes) <= MOST_BYTES):
                raise ProfileError(f"profile of {self.device}: {exchange} has an impossible figure.")
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
        """The profile from all ranks' measurements: mean seconds over the ranks that measured the same point.

        itemsize: bytes of a parameter; dispatch_s: seconds.
        """
        operations = defaultdict[tuple[Operation, int, int, int], list[float]](list)
        exchanges = defaultdict[tuple[Exchange, int, bool, int], list[float]](list)
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
            # A process keeps code of every shape that it has multiplied, and those of a profile are many.
            process_bytes=min((found.process_bytes for found in measured if found.process_bytes), default=0),
            threads=max(found.threads for found in measured),
        )

    @property
    def title(self) -> str:
        """What the profile is, as in `measured profile of h100-sxm`."""
        if self.computed_from is None:
            return f"measured profile of {self.device}"
        return f"profile computed from the {self.computed_from}"

    def check(self, models: Mapping[str, RoleModel], itemsize: int) -> None:
        """Raises ProfileError when no role has this profile's model, or parameters are not of `itemsize` bytes."""
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
        """The first figure that this profile lacks, as in `optimizer at tp=2`; empty if it is complete."""
        measured = {(o.operation, o.tp) for o in self.operations}
        exchanged = {(e.kind, e.ranks) for e in self.exchanges}
        n_ranks = self.n_hosts * self.devices_per_host
        wanted = {kind: 2 if kind in ("send", "redistribute") else n_ranks for kind in get_args(Exchange)}
        missing = [
            f"{o} at tp={tp}"
            for tp in self.tp_degrees
            for o in get_args(Operation)
            if o not in ("reallocation", "transfer") or (tp == 1 and n_ranks > 1)
            if (o, tp) not in measured
        ]
        if n_ranks > 1:
            missing += [f"{kind} among {n}" for kind, n in wanted.items() if (kind, n) not in exchanged]
        return ", ".join(missing[:1])

    @cached_property
    def operation_tables(self) -> Mapping[tuple[str, int], "Table"]:
        """(operation, tp) -> table of seconds: a row for each context, a column for each number of tokens."""
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
        """(kind, crosses hosts) -> table of seconds: a row for each number of ranks, a column for each of bytes."""
        points: dict[tuple[str, bool], list[tuple[float, float, float]]] = defaultdict(list)
        for e in self.exchanges:
            points[e.kind, e.crosses_hosts].append((e.ranks, e.size_bytes, e.seconds))
        return {key: Table(found) for key, found in points.items()}


def _can_be(seconds: float) -> bool:
    return seconds == 0 or LEAST_S <= seconds <= MOST_S


class Table:
    """Seconds at points (row, column), interpolated as the module says."""

    def __init__(self, points: Iterable[tuple[float, float, float]]) -> None:
        rows: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for row, column, seconds in points:
            rows[row].append((column, seconds))
        self.rows = sorted(rows)
        self._columns = [[column for column, _ in sorted(rows[row])] for row in self.rows]
        self._seconds = [rising([seconds for _, seconds in sorted(rows[row])]) for row in self.rows]

    def at(self, row: float, column: float) -> float:
        """Seconds at a point; the rows and columns are those of the constructor's points."""
        if len(self.rows) == 1:
            return self._in_row(0, column)
        place, share = _between(self.rows, row)
        low, high = self._in_row(place, column), self._in_row(place + 1, column)
        return max(low + share * (high - low), 0.0)

    def _in_row(self, place: int, column: float) -> float:
        columns, seconds = self._columns[place], self._seconds[place]
        if len(columns) == 1:
            return seconds[0]
        if column > columns[-1]:
            # Extrapolate along the line from the last smaller value to the last point. Smoothing may leave several
            # equal values at the end; a slope of zero between these would be noise.
            i = max(bisect_left(seconds, seconds[-1]) - 1, 0)
            share = (column - columns[i]) / (columns[-1] - columns[i])
            return seconds[i] + share * (seconds[-1] - seconds[i])
        i, share = _between(columns, column)
        return seconds[i] + share * (seconds[i + 1] - seconds[i])


def rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing values closest to the given ones by least squares (isotonic regression).

    Pools adjacent violators (Ayer et al. 1955): a falling run of values is replaced by its mean.
    """
    pools: list[tuple[float, int]] = []  # mean and number of values
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _between(grid: Sequence[float], value: float) -> tuple[int, float]:
    """(i, share): the value lies at this share of the way from point i to point i + 1.

    Below the grid: its first point. Beyond the grid: share > 1 on the line through its last two points.
    """
    if value <= grid[0]:
        return 0, 0.0
    i = min(bisect_right(grid, value), len(grid) - 1) - 1
    return i, (value - grid[i]) / (grid[i + 1] - grid[i])


class ProfileTables:
    """Timing (planner/pricing/rooflines.py) from a measured profile.

    crosses  whether the tp group spans hosts. Ranks measure a tp group inside one host if it fits there
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
        """Seconds of a layer over `tokens` tokens.

        If the tp group spans hosts but was measured inside one, the layer's two sums cost more.
        """
        seconds = self._at(f"layer/{kind}", tokens, context)
        if self._crosses and self._tp <= self._profile.devices_per_host:
            size_bytes = tokens * self._profile.model.hidden * self._profile.itemsize
            across, inside = (
                self.exchange_s("all_reduce", self._tp, size_bytes, crosses) for crosses in (True, False)
            )
            seconds += 2 * max(across - inside, 0.0)
        return seconds

    def embedding_s(self, kind: Pass, tokens: float) -> float:
        """Seconds of the embedding of `tokens` tokens; a prefill or decoding step counts as a forward pass."""
        if kind == "decode" or kind == "prefill":
            kind = "forward"
        return self._at(f"embedding/{kind}", tokens, 0)

    def head_s(self, kind: Pass, tokens: float, context: float) -> float:
        """Seconds of the head over `tokens` tokens. Its measurements include the embedding, which is subtracted."""
        return max(self._at(f"{self._head}/{kind}", tokens, context) - self.embedding_s(kind, tokens), 0.0)

    def update_s(self, parameters: float, dp: int) -> float:
        """Seconds of the update of a dp rank's share of `parameters` parameters."""
        return self._at("optimizer", parameters / dp, 0)

    def exchange_s(self, kind: Exchange, ranks: int, size_bytes: float, crosses_hosts: bool) -> float:
        """Seconds of a collective or message of size_bytes bytes in all; 0 for one rank.

        If it was measured only inside a host, or only across hosts, those figures serve for both.
        """
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


T = TypeVar("T")
ASIDE = ".refused"  # suffix of a file that was put aside


def read_kept(path: Path, read: Callable[[Path], T], nothing: T) -> tuple[T, tuple[str, ...]]:
    """(what `read` returns for a file, no warnings); if it raises ValueError, (`nothing`, the warning)."""
    try:
        return read(path), ()
    except ValueError as error:
        aside = path.with_name(f"{path.name}{ASIDE}")
        # If the folder is not writable, the file stays and is skipped each time.
        with suppress(OSError):
            path.replace(aside)
        where = f"It is put aside as {aside.name}, and" if aside.exists() else "It is passed over:"
        return nothing, (f"{error} {where} plans continue without it.",)


def write_kept(path: Path, content: bytes) -> None:
    """Write a file atomically, even if other runs write it at the same time. Raises OSError."""
    partial = path.with_name(f"{path.stem}.{uuid4().hex}.tmp")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


_PROFILES = TypeAdapter(tuple[MeasuredProfile, ...])


def cache_file(folder: Path, device: str, cluster: Cluster, model: ModelShape, itemsize: int) -> Path:
    """The path of a model's profile. Its name contains a hash of everything that the profile depends on.

    itemsize  bytes of a parameter
    """
    subject = {"device": device, "cluster": str(cluster), "model": asdict(model), "itemsize": itemsize}
    digest = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()
    return folder / f"{device}-{model.family}-{digest[:16]}.json"


def store(profile: MeasuredProfile, folder: Path) -> Path:
    """Write a profile to the cache atomically. Returns its path."""
    cluster = Cluster(profile.n_hosts, profile.devices_per_host)
    path = cache_file(folder, profile.device, cluster, profile.model, profile.itemsize)
    folder.mkdir(parents=True, exist_ok=True)
    write_profiles([profile], path)
    return path


def cached(
    folder: Path,
    device: str,
    cluster: Cluster,
    models: Mapping[str, RoleModel],
    itemsize: int,
    threads: int = 0,
) -> tuple[tuple[MeasuredProfile, ...], tuple[str, ...]]:
    """The cached profiles of a run's models, one for each shape, and a warning for each file that was put aside or
    left out.

    A file is put aside when its profile is incomplete or is not the one that its name says. It is left out when its
    ranks computed with another number of threads.
    itemsize  bytes of a parameter
    threads   of the run's ranks; 0: any
    """
    profiles: list[MeasuredProfile] = []
    warnings: list[str] = []

    def read(path: Path) -> tuple[MeasuredProfile, ...]:
        found = read_profiles(path)
        for profile in found:
            if lacking := profile.lacking():
                raise ProfileError(f"{path} has no figures for {lacking}.")
            its_cluster = Cluster(profile.n_hosts, profile.devices_per_host)
            named = cache_file(folder, profile.device, its_cluster, profile.model, profile.itemsize)
            if named.name != path.name:
                raise ProfileError(f"{path} has a profile of another model, device or cluster.")
        return found

    for shape in dict.fromkeys(model.shape for model in models.values()):
        path = cache_file(folder, device, cluster, shape, itemsize)
        if path.exists():
            found, refused = read_kept(path, read, ())
            warnings += refused
            other = next((p.threads for p in found if threads and p.threads not in (0, threads)), 0)
            if other:
                warnings.append(
                    f"{path} is not used: its ranks computed with {other} threads, those of this run have {threads}. "
                    "Measure again with prefect-rlhf profile."
                )
            else:
                profiles += found
    return tuple(profiles), tuple(warnings)


def write_profiles(profiles: Iterable[MeasuredProfile], path: Path) -> None:
    """Write profiles as a JSON list, atomically."""
    write_kept(path, json.dumps([p.model_dump(mode="json") for p in profiles]).encode())


def read_profiles(path: Path) -> tuple[MeasuredProfile, ...]:
    """The profiles in a file of `write_profiles`. Raises ProfileError, which names the file and what is wrong."""
    return read_document(
        path, _PROFILES, "no profile", ProfileError, "Measure again with prefect-rlhf profile."
    )


LIMIT = 0.25
"""Measured seconds or bytes have drifted if they differ from the planned ones by more than this share of them."""


class FiguresError(ValueError):
    """A file of measured figures cannot be used; the message names it."""


class RanTurns(Frozen):
    """What a call's responses of several turns were, in the median of the iterations.

    drawn, observed    tokens of a response that were drawn, and that environments said; means
    mean_s, longest_s, among  as of Thinking (planner/plan/workload.py); the longest in the mean of the dp ranks
    """

    drawn: float = Field(ge=1, le=MOST_BYTES, allow_inf_nan=False)
    observed: float = Field(ge=0, le=MOST_BYTES, allow_inf_nan=False)
    mean_s: float = Field(ge=0, le=MOST_S, allow_inf_nan=False)
    longest_s: float = Field(ge=0, le=MOST_S, allow_inf_nan=False)
    among: int = Field(gt=0, le=MOST_BYTES)


class RanCall(Frozen):
    """A call as it ran.

    seconds       median of its durations; of a call that is cut, the mean over its parts
    active_bytes  memory beyond parameters on the fullest device, if it drifted; else None
    turns         None: its responses have no turns
    """

    call: str
    assignment: CallAssignment
    seconds: float = Field(ge=LEAST_S, le=MOST_S, allow_inf_nan=False)
    active_bytes: float | None = Field(default=None, ge=0, le=MOST_BYTES, allow_inf_nan=False)
    turns: RanTurns | None = None


class Factor(NamedTuple):
    """Corrects a price: factors on a call's seconds and on its memory beyond parameters.

    added_s  seconds added to a call whose price is 0 (Python rewards without a stated cost): no factor corrects that
    """

    seconds: float = 1.0
    memory: float = 1.0
    added_s: float = 0.0


LEAST_PRICE_S = 1e-9
"""A call with a price of fewer seconds counts as having no price."""

logger = logging.getLogger(__name__)
_FIGURES = TypeAdapter(tuple[RanCall, ...])


def drifted(planned: float, measured: float) -> bool:
    """Whether measured seconds or bytes differ from the planned ones by more than LIMIT."""
    return abs(measured - planned) > LIMIT * planned


def figures_file(
    folder: Path,
    devices: DeviceClasses,
    models: Mapping[str, RoleModel],
    workload: Workload,
    calls: Iterable[ModelFunctionCall],
    users: str = "",
) -> Path:
    """The path of the figures of runs of some calls. Its name contains a hash of everything they depend on.

    users  says which code of the user's takes part: environments and rewards think as long as they like
    """
    subject = {
        "devices": str(devices),
        "models": {role: _described(model) for role, model in models.items()},
        "workload": workload.model_dump(mode="json"),
        "calls": [call.model_dump(mode="json") for call in calls],
        "users": users,
    }
    digest = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()
    return folder / f"ran-{digest[:16]}.json"


def _described(model: RoleModel) -> list[Any]:
    adapters = [] if model.lora is None else [asdict(model.lora)]
    return [asdict(model.shape), model.head, *adapters]


def read_figures(path: Path) -> tuple[RanCall, ...]:
    """The figures in a file; none if there is no file. Raises FiguresError."""
    if not path.exists():
        return ()
    return read_document(path, _FIGURES, "no measured figures of runs", FiguresError)


def keep_figures(path: Path, found: Sequence[RanCall]) -> None:
    """Add figures to a file, as its last; they replace those of the same call under the same assignment. Raises
    OSError."""
    before, warnings = read_kept(path, read_figures, ())
    for warning in warnings:
        logger.warning(warning)
    new = {(ran.call, ran.assignment): ran for ran in found}
    kept = {key: ran for ran in before if (key := (ran.call, ran.assignment)) not in new} | new
    path.parent.mkdir(parents=True, exist_ok=True)
    write_kept(path, _FIGURES.dump_json(tuple(kept.values()), indent=1))


def as_it_ran(workload: Workload, history: Sequence[RanCall]) -> Workload:
    """The workload with the lengths and the thinking of the newest responses of several turns that were measured."""
    turns = next((ran.turns for ran in reversed(history) if ran.turns is not None), None)
    if turns is None or workload.thinking is None:
        return workload
    tokens = min(round(turns.drawn + turns.observed), workload.longest_response)
    thought = turns.model_dump(include={"mean_s", "longest_s", "among"})
    return workload.model_copy(
        update={
            "new_tokens": Lengths.fixed(tokens),
            "max_new_tokens": workload.longest_response,
            "counted_tokens": turns.drawn,
            "thinking": workload.thinking.model_copy(update=thought),
        }
    )


def factor_of(ran: RanCall, seconds: float, active_bytes: float) -> Factor:
    """The factor from a call's price (seconds; active_bytes of the fullest device) to what a run measured."""
    memory = 1.0 if ran.active_bytes is None or active_bytes < 1 else ran.active_bytes / active_bytes
    if seconds < LEAST_PRICE_S:
        return Factor(memory=memory, added_s=ran.seconds)
    return Factor(ran.seconds / seconds, memory)


def factor_elsewhere(factors: Collection[Factor]) -> Factor:
    """The factor for assignments that have not run, from the factors of those that have.

    seconds  geometric mean: one call twice too slow and one twice too fast cancel out
    added_s  mean
    memory   largest, at least 1: a plan with too little memory fails, one with too much is only slower
    """
    if not factors:
        return Factor()
    seconds = exp(fmean(log(factor.seconds) for factor in factors))
    added_s = fmean(factor.added_s for factor in factors)
    return Factor(seconds, max(1.0, *(factor.memory for factor in factors)), added_s)
