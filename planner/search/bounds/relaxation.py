"""The data of the bounds on partial choices: rows that stand for many options, seconds of moves, least memory.

Rows form a hierarchy with four levels:
- an option;
- a placement: all options at it, which differ in micro-batches;
- a mesh: all options on it;
- a group: all options on meshes of one size.
Meshes stand above strategies, because most options are cut for their mesh: the calls on its devices take too long
together. In every figure that the bounds use, a row is as good as the best of the options that it stands for.

A move is the reallocation of a trained role's parameters to one of its readers. Unless one side has a placement and
the other a mesh, it is bounded by kinds: a kind is a row of all options with one strategy on meshes of one size. It
is below no other row.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.search.bounds.cycles import data_order
from prefect_rlhf.planner.search.compiled.arrays import Arrays, Rows
from prefect_rlhf.planner.search.compiled.compile import Bools, Floats, Ints, compiled, inner
from prefect_rlhf.planner.search.compiled.evaluator import least_reallocation_s, reallocation_s
from prefect_rlhf.planner.search.compiled.memory_peaks import memory_of
from prefect_rlhf.planner.search.compiled.tables import Tables

OPEN = -1
UNKNOWN, APART, MEET = range(3)
"""Whether the meshes of two calls share a device."""
ALONE, TRAINER, READER, BOTH = range(4)
"""Columns of a move's seconds. ALONE: the least seconds of the move itself. TRAINER, READER, BOTH: the least seconds
of the move plus the surplus of the trainer's, the reader's, or both calls' options over the fastest of their rows."""
KNOWN_MOVES = 1 << 18  # entries of the cache of moves; newer entries replace older ones


class Relaxation(NamedTuple):
    """The bounds' data about a problem, besides its arrays. Options are given by row. Numbers are int64 and float64.

    arrays        of the problem. After the options come the rows of placements, meshes, groups and kinds. where and
                  place are OPEN in rows without placement; first in groups and kinds; strategy in meshes and groups
    above         [rows] the row one level up; OPEN for groups, kinds and offloaded options
    begin, below  row n_options + i stands for the rows below[begin[i]] .. below[begin[i + 1] - 1], fastest first
    kinds         [rows, 2] a row's kinds, which are consecutive: the first one and the one after the last. Meshes
                  and options have none
    call          [rows] the call of each row
    least         [rows, 6] the smallest of resident, frozen, copy, active bytes over the stages; and of the resident
                  bytes and of the onload's if it is offloaded, where it can be (a train_step: or is not)
    away_s        [rows] the least seconds that a train_step takes more if it is offloaded; 0: other calls
    while_away    [calls, calls] bool: whether the second may run while what the first one onloads is away
    fastest       [calls] seconds of the fastest option
    data          [calls, calls] bool: whether an edge of data leads from one to the other
    ends, begins  [calls] bool: whether the call is the last, the first of a path of data
    trainer, reader, delay  [moves] `reader` needs the parameters that `trainer` left `delay` iterations before
    alone         [moves] bool: no other call can share the reader's copy
    position      [orders, calls] place of each call
    source        the call that the fetch feeds
    keys, known_s  a cache of `_least_moves`: [KNOWN_MOVES] keys, [KNOWN_MOVES, 4] seconds
    """

    arrays: Arrays
    above: Ints
    begin: Ints
    below: Ints
    kinds: Ints
    call: Ints
    least: Floats
    away_s: Floats
    while_away: Bools
    fastest: Floats
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
    keys: Ints
    known_s: Floats


def relaxation(tables: Tables) -> Relaxation:
    """The bounds' data about a problem."""
    graph, arrays, names = tables.problem.graph, tables.arrays, tables.calls
    number = {name: i for i, name in enumerate(names)}
    ordered = data_order(graph)
    moves = np.array(_moves(tables, number), np.int64).reshape(-1, 4).T.copy()
    rows, above, kinds = _levels(arrays)
    return Relaxation(
        arrays=arrays._replace(options=rows.options),
        above=above,
        begin=rows.begin,
        below=rows.below,
        kinds=kinds,
        call=rows.call,
        least=rows.least,
        away_s=rows.away_s,
        while_away=_while_away(graph, moves),
        fastest=np.array([arrays.options[a:b].seconds.min() for a, b in pairwise(arrays.start)]),
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
        keys=np.full(KNOWN_MOVES, -1),
        known_s=np.zeros((KNOWN_MOVES, 4)),
    )


class _Levels:
    """The rows so far. Arguments are the arrays of a problem, whose options are the first rows."""

    def __init__(self, arrays: Arrays) -> None:
        self.options = arrays.options
        self.call = np.searchsorted(arrays.start, np.arange(len(arrays.options)), side="right") - 1
        self.least, self.away_s = _least_stages(arrays)
        self.begin, self.below = np.zeros(1, np.int64), np.zeros(0, np.int64)

    def merge(self, members: Ints, alike: Sequence[str], opened: Sequence[str]) -> tuple[Ints, Ints]:
        """Adds a row for each set of a call's rows that have the columns `alike` in common.

        opened  columns that become OPEN
        Returns `members`, set by set and fastest first, and the new row of each.
        """
        keys = np.stack([self.call[members], *(self.options[name][members] for name in alike)])
        order = np.lexsort((self.options.seconds[members], *keys[::-1]))
        members, new = members[order], np.diff(keys[:, order]).any(axis=0)
        starts, first = np.concatenate([[0], 1 + np.flatnonzero(new)]), len(self.options)
        rows = self.options[members[starts]].copy()  # the fastest members
        for trailing in ("save_s", "evaluate_s"):
            rows[trailing] = np.minimum.reduceat(self.options[trailing][members], starts)
        for name in opened:
            rows[name] = OPEN
        self.options = np.concatenate([self.options, rows]).view(np.recarray)
        self.call = np.concatenate([self.call, self.call[members[starts]]])
        self.least = np.concatenate([self.least, np.minimum.reduceat(self.least[members], starts)])
        self.away_s = np.concatenate([self.away_s, np.minimum.reduceat(self.away_s[members], starts)])
        self.begin = np.concatenate([self.begin, self.begin[-1] + np.append(starts[1:], len(members))])
        self.below = np.concatenate([self.below, members])
        return members, first + np.cumsum(np.concatenate([[0], new]))


def _levels(arrays: Arrays) -> tuple[_Levels, Ints, Ints]:
    """The rows of all levels; above and kinds of Relaxation."""
    rows = _Levels(arrays)
    members = np.flatnonzero(np.arange(len(rows.call)) < arrays.offloaded[rows.call])
    levels = [rows.merge(members, ("place",), ())]
    placements = np.unique(levels[0][1])
    levels.append(rows.merge(placements, ("size", "first"), ("where", "place", "strategy")))
    levels.append(rows.merge(np.unique(levels[1][1]), ("size",), ("first", "where", "place", "strategy")))
    placements, kind = rows.merge(placements, ("size", "strategy"), ("first", "where", "place"))
    above = np.full(len(rows.options), OPEN)
    for members, row in levels:
        above[members] = row
    kinds = np.stack([np.full(len(above), len(above)), np.zeros(len(above), np.int64)], axis=1)
    for row in (kind, placements, above[above[placements]]):
        np.minimum.at(kinds[:, 0], row, kind)
        np.maximum.at(kinds[:, 1], row, kind + 1)
    return rows, above, kinds


def _least_stages(arrays: Arrays) -> tuple[Floats, Floats]:
    """(least, away_s) of Relaxation, of options."""
    begins, option = np.unique(arrays.options.stage, return_inverse=True)
    columns = (arrays.stages[name] for name in ("resident", "frozen", "copy", "active", "resident", "copy"))
    least = np.stack([np.minimum.reduceat(column, begins)[option] for column in columns], axis=1)
    least[:, 5] *= arrays.options.onloaded
    away_s, seconds = np.zeros(len(least)), arrays.options.seconds
    for call in range(arrays.n_calls):
        here = slice(arrays.start[call], arrays.offloaded[call])
        away = slice(arrays.offloaded[call], arrays.start[call + 1])
        if away.start < away.stop:
            least[here, 4:] = least[away, 4:]
            away_s[here] = np.maximum(seconds[away] - seconds[here], 0.0)
            if arrays.trainer[call] == call:
                # Two chunks of a small state may be more than the whole: then it is no smaller offloaded. An option
                # that fits only offloaded, which has the same stages in both places, cannot be kept.
                stage = arrays.options.stage
                only_away = stage[here] == stage[away]
                whole = np.where(only_away, np.inf, least[here, 0])
                least[here, 4] = np.minimum(least[here, 4], whole)
                least[here, 5] = np.minimum(least[here, 5], whole - least[here, 4])
    return least, away_s


def _while_away(graph: DataflowGraph, moves: Ints) -> Bools:
    """while_away of Relaxation. What a train_step onloads leaves when its readers in other places have their copies:
    before a reader of the same iteration runs."""
    names = [call.name for call in graph.calls]
    away = np.array([[name in graph.while_idle(call.role) for name in names] for call in graph.calls])
    for trainer in moves[0, moves[2] == 0]:
        away[trainer, np.arange(len(names)) != trainer] = True
    return away


def _moves(tables: Tables, number: dict[str, int]) -> list[tuple[int, int, int, bool]]:
    """(trainer, reader, delay, alone) of every possible move."""
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
def on_mesh(options: Rows, row: int) -> bool:
    """Whether a row has a mesh."""
    return row != OPEN and options[row].first != OPEN


@compiled
def relation(options: Rows, n_devices: int, a: int, b: int) -> int:
    """Whether two rows (int64, or OPEN) share a device, from their sizes and meshes.

    Without a mesh of both, two meshes certainly meet if they have more devices together than the cluster.
    """
    if a == OPEN or b == OPEN:
        return UNKNOWN
    one, other = options[a], options[b]
    if one.first == OPEN or other.first == OPEN:
        return MEET if one.size + other.size > n_devices else UNKNOWN
    share = one.first < other.first + other.size and other.first < one.first + one.size
    return MEET if share else APART


@inner
def seconds_of(r: Relaxation, choice: Ints) -> Floats:
    """[calls] float64: lower bounds on seconds."""
    seconds = r.fastest.copy()
    for call in range(len(choice)):
        if choice[call] != OPEN:
            seconds[call] = r.arrays.options[choice[call]].seconds
    return seconds


@compiled
def move_s(r: Relaxation, move: int, trainer: int, reader: int) -> float:
    """Seconds of a move between two rows with placements, all overheads included; 0 if they are equal."""
    place = r.arrays.options.place
    if place[trainer] == place[reader]:
        return 0.0
    return reallocation_s(r.arrays, r.arrays.role[r.trainer[move]], trainer, reader)


@compiled
def moves_s(r: Relaxation, move: int, trainer: int, reader: int, out: Floats) -> None:
    """Writes the seconds of a move between two rows, of no offloaded options, to out, [4] float64 (ALONE, TRAINER,
    READER, BOTH)."""
    place = r.arrays.options.place
    if place[trainer] != OPEN and place[reader] != OPEN:
        out[:] = move_s(r, move, trainer, reader)
        return
    a = _stand_in(r, trainer, reader)
    b = _stand_in(r, reader, trainer)
    # One number for move and rows. The cache is direct-mapped: a slot for each remainder.
    key = (move * len(place) + a) * len(place) + b
    slot = key % len(r.keys)
    if r.keys[slot] != key:
        _least_moves(r, move, a, b, r.known_s[slot])
        r.keys[slot] = key
    out[:] = r.known_s[slot]
    # Of a mesh whose group stands in, the surplus is over the fastest option of the group, which may be faster.
    slower_a, slower_b = _slower_s(r, trainer, a), _slower_s(r, reader, b)
    out[TRAINER] = max(out[ALONE], out[TRAINER] - slower_a)
    out[READER] = max(out[ALONE], out[READER] - slower_b)
    out[BOTH] = max(out[TRAINER], out[READER], out[BOTH] - slower_a - slower_b)


@inner
def _stand_in(r: Relaxation, row: int, other: int) -> int:
    """The row whose moves stand for those of a row to or from another one.

    Between a placement and a mesh these are the rows themselves. Else they are kinds and groups: between two meshes
    there are too many pairs of placements.
    """
    o = r.arrays.options
    if o[row].place != OPEN:
        placement = row if row >= r.arrays.start[-1] else r.above[row]
        return placement if on_mesh(o, other) else r.kinds[placement, 0]
    return r.above[row] if on_mesh(o, row) and o[other].place == OPEN else row


@inner
def _slower_s(r: Relaxation, row: int, stand_in: int) -> float:
    """The seconds that the fastest option of a mesh takes more than that of the group that stands in; else 0."""
    o = r.arrays.options
    return o[row].seconds - o[stand_in].seconds if o[row].place == OPEN else 0.0


@inner
def _least_moves(r: Relaxation, move: int, trainer: int, reader: int, out: Floats) -> None:
    """`moves_s` of two rows: the minima over the placements of both, or over the kinds if one has no mesh."""
    o = r.arrays.options
    on_meshes = on_mesh(o, trainer) and on_mesh(o, reader)
    out[:] = np.inf
    for a in _candidates(r, trainer, on_meshes):
        for b in _candidates(r, reader, on_meshes):
            taken = move_s(r, move, a, b) if on_meshes else _least_move_s(r, move, a, b)
            slower_a, slower_b = o[a].seconds - o[trainer].seconds, o[b].seconds - o[reader].seconds
            out[ALONE] = min(out[ALONE], taken)
            out[TRAINER] = min(out[TRAINER], taken + slower_a)
            out[READER] = min(out[READER], taken + slower_b)
            out[BOTH] = min(out[BOTH], taken + slower_a + slower_b)


@inner
def _candidates(r: Relaxation, row: int, on_meshes: bool) -> Ints:
    """The placements of a row, or its kinds."""
    if not on_meshes:
        return np.arange(r.kinds[row, 0], r.kinds[row, 1])
    if r.arrays.options[row].place != OPEN:
        return np.arange(row, row + 1)
    i = row - r.arrays.start[-1]
    return r.below[r.begin[i] : r.begin[i + 1]]


@inner
def _least_move_s(r: Relaxation, move: int, a: int, b: int) -> float:
    """A lower bound on the seconds of a move between options of two kinds, over all positions of their meshes."""
    o, per_host = r.arrays.options, r.arrays.per_host
    if o[a].strategy == o[b].strategy:
        return 0.0
    # Upper bounds: devices in both meshes, and devices of the destination on hosts of the source.
    shared = min(o[a].size, o[b].size)
    near = min(max(o[a].size, per_host), o[b].size)
    return least_reallocation_s(r.arrays, r.arrays.role[r.trainer[move]], a, b, shared, near)


@inner
def may_offload(arrays: Arrays, call: int) -> bool:
    """Whether a call has offloaded options."""
    return arrays.offloaded[call] < arrays.start[call + 1]


@compiled
def lacks(r: Relaxation, choice: Ints, kept: int) -> bool:
    """Whether some device certainly lacks memory for the calls with meshes.

    choice  [calls] int64 rows, or OPEN
    kept    number of a train_step that is not offloaded, or OPEN

    Each call counts with its least stage, and as if it were offloaded if that is less and it is not kept. Only the
    first device of each mesh is checked: one of these holds the most.
    """
    o, n = r.arrays.options, r.arrays.n_calls
    static, needed, onloaded, on = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n, np.bool_)
    for call in range(n):
        row = choice[call]
        if on_mesh(o, row):
            needed[call], static[call] = r.least[row, 3], r.least[row, 0 if call == kept else 4]
            onloaded[call] = 0.0 if call == kept else r.least[row, 5]
            frozen_away = may_offload(r.arrays, call) and r.arrays.trainer[call] < 0
            if _stands_before(o, r.arrays.weights, choice, call):
                onloaded[call] = 0.0 if frozen_away else onloaded[call]
            elif not frozen_away:
                static[call] += r.least[row, 1]
    for k in range(len(r.reader)):
        reader, trainer = choice[r.reader[k]], choice[r.trainer[k]]
        if on_mesh(o, reader) and on_mesh(o, trainer) and not _may_coincide(o, reader, trainer):
            needed[r.reader[k]] += r.least[reader, 2]
    for row in choice:
        if on_mesh(o, row):
            device, held, peak = o[row].first, 0.0, 0.0
            for call in range(n):
                mesh = o[choice[call]]
                on[call] = on_mesh(o, choice[call]) and mesh.first <= device < mesh.first + mesh.size
                held += static[call] if on[call] else 0.0
            for call in range(n):
                if on[call]:
                    during = needed[call]
                    for other in range(n):
                        during += onloaded[other] if on[other] and not r.while_away[other, call] else 0.0
                    peak = max(peak, during)
            if held + peak > memory_of(r.arrays, device):
                return True
    return False


@compiled
def must_offload(r: Relaxation, choice: Ints, call: int) -> bool:
    """Whether a call is a train_step that certainly has no room on its devices beside the calls with meshes, if it
    is not offloaded."""
    trains = r.arrays.trainer[call] == call and may_offload(r.arrays, call)
    return trains and on_mesh(r.arrays.options, choice[call]) and lacks(r, choice, call)


@inner
def _may_coincide(options: Rows, a: int, b: int) -> bool:
    """Whether two rows with meshes may have the same placement."""
    one, other = options[a], options[b]
    if one.place != OPEN and other.place != OPEN:
        return one.place == other.place
    return one.first == other.first and one.size == other.size


@inner
def _stands_before(options: Rows, weights: Ints, choice: Ints, call: int) -> bool:
    """Whether an earlier call with the same weights may have the same placement: they then share what is frozen."""
    for other in range(call):
        same = weights[other] == weights[call] and on_mesh(options, choice[other])
        if same and _may_coincide(options, choice[other], choice[call]):
            return True
    return False
