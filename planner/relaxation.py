"""A compiled lower bound on the period of every plan that completes a partial choice of options.

A partial choice gives some calls an option and leaves the others open (-1). Every plan that completes it has the
steady state of a graph with more nodes and edges than the one here, so a cycle here whose seconds exceed
its delay times T proves that the plan's period exceeds T. The graph has

- the calls, an open one with the seconds of its fastest option and without devices;
- the reallocation of each copy that the decided options make necessary, on the devices of both sides;
- edges for data, for versions and for two iterations in flight, as planner/bound.py has them, and the dispatch
  of a transfer where data change ranks;
- for each pair of decided nodes that share a device, the order of the calls and its repetition in the next
  iteration. Calls that the graph leaves unordered are tried in every order of planner/call_order.py, and T is
  exceeded only if every order exceeds it.

Left out are onloads, offloads and copies, so the bound is the same for an option and its offloaded twin, and the
devices of transfers; so the bound of a complete choice may lie some dispatches below its period.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.arrays import Arrays, Rows
from planner.bound import data_order
from planner.compiled import compiled, inner
from planner.evaluator import least_reallocation, memory_of, reallocation
from planner.simulate import IN_FLIGHT
from planner.tables import Tables

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

OPEN = -1
TOLERANCE = 1e-9  # relative; a cycle that exceeds a period by less is rounding


class Relaxation(NamedTuple):
    """What the bound needs beside the arrays of a problem. Options are named by their row there.

    fastest       [calls] seconds of the fastest option
    least         [options, 3] the smallest of resident, copy, active bytes over the stages
    data          [calls, calls] whether data lead from one to the other
    ends, begins  [calls] whether the call is the last, the first of a path of data
    trainer, reader, delay  [moves] a copy of the role that `trainer` trains is made for `reader`, from the
                  version of `delay` iterations before; alone: no other call may share the copy
    position      [orders, calls] place of each call
    source        the call behind the fetch
    """

    arrays: Arrays
    fastest: Floats
    least: Floats
    data: Bools
    ends: Bools
    begins: Bools
    trainer: Ints
    reader: Ints
    delay: Ints
    alone: Bools
    position: Ints
    source: int
    n_devices: int


def relaxation(tables: Tables) -> Relaxation:
    """The relaxation of a problem's tables."""
    graph, arrays, names = tables.problem.graph, tables.arrays, tables.calls
    number = {name: i for i, name in enumerate(names)}
    ordered = data_order(graph)
    moves = np.array(_moves(tables, number), np.int64).reshape(-1, 4).T.copy()
    starts = arrays.start
    return Relaxation(
        arrays=arrays,
        fastest=np.array([arrays.options[a:b].seconds.min() for a, b in pairwise(starts)]),
        least=_least_stages(arrays),
        data=np.array([[ordered.has_edge(a, b) for b in names] for a in names]),
        ends=np.array([not ordered.out_degree(name) for name in names]),
        begins=np.array([not ordered.in_degree(name) for name in names]),
        trainer=moves[0],
        reader=moves[1],
        delay=moves[2],
        alone=moves[3].astype(np.bool_),
        position=np.array([[order.index(name) for name in names] for order in tables.orders], np.int64),
        source=number[graph.source.name],
        n_devices=tables.problem.cluster.n_devices,
    )


def _least_stages(arrays: Arrays) -> Floats:
    """[options, 3] the smallest of resident, copy, active bytes over an option's stages."""
    begins, option = np.unique(arrays.options.stage, return_inverse=True)
    columns = (arrays.stages.resident, arrays.stages["copy"], arrays.stages.active)
    return np.stack([np.minimum.reduceat(column, begins)[option] for column in columns], axis=1)


def _moves(tables: Tables, number: dict[str, int]) -> list[tuple[int, int, int, bool]]:
    """(trainer, reader, delay, alone) of every copy that may have to be made."""
    graph, found = tables.problem.graph, []
    for call in graph.calls:
        trainer = graph.trainer(call.role)
        if trainer is None or trainer.name == call.name:
            continue
        alike = [
            other
            for other in graph.calls
            if other.role == call.role and other.name not in (call.name, trainer.name)
        ]
        delay = 0 if graph.reads_updated(call) else 1
        found.append((number[trainer.name], number[call.name], delay, not alike))
    return found


@inner
def overlap(o: Rows, a: int, b: int) -> bool:
    """Whether the meshes of two options share a device."""
    return o[a].first < o[b].first + o[b].size and o[b].first < o[a].first + o[a].size


@inner
def save_s(arrays: Arrays, call: int, row: int) -> float:
    """Seconds of the save behind a call; 0 where it trains nothing."""
    return arrays.options[row].save_s if arrays.trainer[call] == call else 0.0


@compiled
def move_s(r: Relaxation, move: int, trainer: int, reader: int, exact: bool) -> float:
    """Seconds of a reallocation between two options, its dispatch included; 0 when none is needed.

    exact  else at least so many, at once"""
    place = r.arrays.options.place
    if place[trainer] == place[reader]:
        return 0.0
    role = r.arrays.role[r.trainer[move]]
    if not exact:
        return r.arrays.dispatch_s + least_reallocation(r.arrays, role, trainer, reader)
    return r.arrays.dispatch_s + reallocation(r.arrays, role, trainer, reader)


@compiled
def exceeds(
    r: Relaxation, choice: Ints, least_s: Floats, moved_s: Floats, period: float, allowed: Floats
) -> bool:
    """Whether every plan that completes a choice has a longer period.

    choice   [calls] rows of options, or OPEN
    least_s  [calls] seconds at least of calls that are open
    moved_s  [moves] seconds of each reallocation whose ends are decided; 0 where none is needed
    allowed  [calls] out, if not: the most seconds that each open call may take in such a plan of this period
    """
    free = _free_edges(r, choice, least_s, moved_s, period)
    weight = free.copy()
    if _has_gain(weight, period):
        return True
    related = _shared_devices(r, choice, moved_s)
    allowed[:] = -np.inf
    before = -1
    for order in range(len(r.position)):
        if before >= 0 and _same_order(r, related, r.position[before], r.position[order]):
            continue
        before = order
        weight = _with_devices(r, free, related, choice, least_s, moved_s, r.position[order], period)
        if not _has_gain(weight, period):
            for call in range(len(choice)):
                allowed[call] = max(allowed[call], least_s[call] - weight[call, call])
    return allowed[0] == -np.inf


@inner
def _same_order(r: Relaxation, related: Bools, before: Ints, now: Ints) -> bool:
    """Whether nodes that share devices stand alike in two orders of the calls."""
    for a in range(len(related)):
        for b in range(a):
            if related[a, b] and (
                (_place(r, before, a) < _place(r, before, b)) != (_place(r, now, a) < _place(r, now, b))
            ):
                return False
    return True


@inner
def _place(r: Relaxation, position: Ints, node: int) -> int:
    """The place of a node in an order of the calls: a move stands directly before its reader."""
    n = len(position)
    return 2 * position[node] if node < n else 2 * position[r.reader[node - n]] - 1


@inner
def _free_edges(r: Relaxation, choice: Ints, least_s: Floats, moved_s: Floats, period: float) -> Floats:
    """[nodes, nodes] seconds less delays of the edges that hold in every order; nodes are calls, then moves."""
    n, n_moves = len(choice), len(moved_s)
    weight = np.full((n + n_moves, n + n_moves), -np.inf)
    for a in range(n):
        seconds = _seconds(r, choice, least_s, a)
        for b in range(n):
            if r.data[a, b]:
                weight[a, b] = seconds
                if (
                    choice[a] != OPEN
                    and choice[b] != OPEN
                    and r.arrays.options[choice[a]].where != r.arrays.options[choice[b]].where
                ):
                    weight[a, b] += r.arrays.dispatch_s
            if r.ends[a] and r.begins[b]:
                behind = 0.0 if choice[a] == OPEN else save_s(r.arrays, a, choice[a])
                weight[a, b] = max(weight[a, b], seconds + behind - IN_FLIGHT * period)
        weight[a, a] = max(weight[a, a], _load(r, choice, least_s, moved_s, a) - period)
    for k in range(n_moves):
        trainer, reader = r.trainer[k], r.reader[k]
        weight[trainer, n + k] = _seconds(r, choice, least_s, trainer) - r.delay[k] * period
        weight[n + k, reader] = moved_s[k]
        if moved_s[k] > 0 and r.delay[k]:
            weight[n + k, trainer] = moved_s[k]
    return weight


@inner
def _seconds(r: Relaxation, choice: Ints, least_s: Floats, call: int) -> float:
    return least_s[call] if choice[call] == OPEN else r.arrays.options[choice[call]].seconds


@inner
def _load(r: Relaxation, choice: Ints, least_s: Floats, moved_s: Floats, call: int) -> float:
    """Seconds of a call on its devices, with the fetch, save or release that stands beside it."""
    seconds = _seconds(r, choice, least_s, call) + _behind(r, choice, moved_s, call)
    return seconds + r.arrays.dispatch_s if call == r.source else seconds


@inner
def _behind(r: Relaxation, choice: Ints, moved_s: Floats, call: int) -> float:
    """Seconds of the save or release that follows a call on its devices."""
    if choice[call] == OPEN:
        return 0.0
    seconds = save_s(r.arrays, call, choice[call])
    for k in range(len(moved_s)):
        if r.reader[k] == call and r.alone[k] and moved_s[k] > 0:
            seconds += r.arrays.dispatch_s
    return seconds


@inner
def _shared_devices(r: Relaxation, choice: Ints, moved_s: Floats) -> Bools:
    """[nodes, nodes] whether two decided nodes share a device."""
    n, n_moves = len(choice), len(moved_s)
    related = np.zeros((n + n_moves, n + n_moves), np.bool_)
    for a in range(n):
        for b in range(a):
            if choice[a] != OPEN and choice[b] != OPEN and overlap(r.arrays.options, choice[a], choice[b]):
                related[a, b] = related[b, a] = True
    for k in range(n_moves):
        if moved_s[k] <= 0 or not r.alone[k]:
            continue
        source, target = choice[r.trainer[k]], choice[r.reader[k]]
        for a in range(n):
            if choice[a] != OPEN and (
                overlap(r.arrays.options, source, choice[a]) or overlap(r.arrays.options, target, choice[a])
            ):
                related[n + k, a] = related[a, n + k] = True
        for j in range(k):
            if moved_s[j] > 0 and r.alone[j]:
                other_source, other_target = choice[r.trainer[j]], choice[r.reader[j]]
                if (
                    overlap(r.arrays.options, source, other_source)
                    or overlap(r.arrays.options, source, other_target)
                    or overlap(r.arrays.options, target, other_source)
                    or overlap(r.arrays.options, target, other_target)
                ):
                    related[n + k, n + j] = related[n + j, n + k] = True
    return related


@inner
def _with_devices(
    r: Relaxation,
    free: Floats,
    related: Bools,
    choice: Ints,
    least_s: Floats,
    moved_s: Floats,
    position: Ints,
    period: float,
) -> Floats:
    """The free edges and, between nodes that share a device, those of an order."""
    n = len(choice)
    weight = free.copy()
    for a in range(len(related)):
        seconds = (
            moved_s[a - n] if a >= n else _seconds(r, choice, least_s, a) + _behind(r, choice, moved_s, a)
        )
        for b in range(len(related)):
            if related[a, b]:
                if _place(r, position, a) < _place(r, position, b):
                    gain = seconds
                else:
                    gain = seconds - period + (r.arrays.dispatch_s if b == r.source else 0.0)
                weight[a, b] = max(weight[a, b], gain)
    return weight


@inner
def _has_gain(weight: Floats, period: float) -> bool:
    """Whether a cycle's weights add up to more than nothing (longest paths between all nodes; overwrites)."""
    n = len(weight)
    slack = TOLERANCE * period
    for k in range(n):
        for a in range(n):
            to = weight[a, k]
            if to == -np.inf:
                continue
            for b in range(n):
                if to + weight[k, b] > weight[a, b]:
                    weight[a, b] = to + weight[k, b]
        for a in range(n):
            if weight[a, a] > slack:
                return True
    return False


@inner
def may_offload(arrays: Arrays, call: int) -> bool:
    """Whether a call has offloaded options."""
    return arrays.offloaded[call] < arrays.start[call + 1]


@compiled
def lacks(r: Relaxation, choice: Ints) -> bool:
    """Whether some device lacks memory for the decided calls already, by the stages that hold least, whether or not
    what may be offloaded is."""
    o, n = r.arrays.options, r.arrays.n_calls
    for point in range(n):
        if choice[point] == OPEN:
            continue
        device = o[choice[point]].first
        static, peak = 0.0, 0.0
        for call in range(n):
            row = choice[call]
            if row == OPEN or not o[row].first <= device < o[row].first + o[row].size:
                continue
            needed = r.least[row, 2]
            if may_offload(r.arrays, call):
                needed += r.least[row, 1]
            elif _counts(r.arrays, choice, call):
                static += r.least[row, 0]
            for k in range(len(r.reader)):
                trainer = choice[r.trainer[k]]
                if r.reader[k] == call and trainer != OPEN and o[row].place != o[trainer].place:
                    needed += r.least[row, 1]
            peak = max(peak, needed)
        if static + peak > memory_of(r.arrays, device):
            return True
    return False


@inner
def _counts(arrays: Arrays, choice: Ints, call: int) -> bool:
    """Whether a call's resident bytes are its own: of a frozen role's calls at one placement the first has them."""
    if arrays.trainer[call] >= 0:
        return True
    for other in range(call):
        alike = arrays.role[other] == arrays.role[call] and choice[other] != OPEN
        if alike and arrays.options[choice[other]].place == arrays.options[choice[call]].place:
            return False
    return True
