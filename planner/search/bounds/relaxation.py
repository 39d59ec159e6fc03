"""The data of the bounds on partial choices: rows that stand for many options, seconds of moves, least memory.

Rows form a hierarchy with four levels:
- an option;
- a placement: all options at it, which differ in micro-batches;
- a kind: all options with one strategy on meshes of one size;
- a group: all options on meshes of one size.
In every figure that the bounds use, a row is as good as the best of the options that it stands for.

A move is the reallocation of a trained role's parameters to one of its readers.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from itertools import pairwise
from typing import NamedTuple

import numpy as np

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

    arrays        of the problem. After the options come the rows of placements, kinds and groups. first, where and
                  place are OPEN in rows without placement (kinds, groups); strategy is OPEN in groups
    above         [rows] the row one level up; OPEN for groups and for offloaded options
    begin, below  row n_options + i stands for the rows below[begin[i]] .. below[begin[i + 1] - 1], fastest first
    least         [rows, 6] the smallest of resident, frozen, copy, active bytes over the stages; and of the resident
                  bytes and of the onload's if it is offloaded, where it can be
    away_s        [rows] the least seconds that a train_step takes more if it is offloaded; 0: other calls
    while_idle    [calls, calls] bool: whether the second may run while the first one's role is idle
    fastest       [calls] seconds of the fastest option
    data          [calls, calls] bool: whether an edge of data leads from one to the other
    ends, begins  [calls] bool: whether the call is the last, the first of a path of data
    trainer, reader, delay  [moves] `reader` needs the parameters that `trainer` left `delay` iterations before
    alone         [moves] bool: no other call can share the reader's copy
    position      [orders, calls] place of each call
    source        the call that the fetch feeds
    keys, known_s  a cache of `moves_s`: [KNOWN_MOVES] keys, [KNOWN_MOVES, 4] seconds
    """

    arrays: Arrays
    above: Ints
    begin: Ints
    below: Ints
    least: Floats
    away_s: Floats
    while_idle: Bools
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
    roles, (options, above, begin, below, least, away_s) = [call.role for call in graph.calls], _rows(arrays)
    return Relaxation(
        arrays=arrays._replace(options=options),
        above=above,
        begin=begin,
        below=below,
        least=least,
        away_s=away_s,
        while_idle=np.array([[b in idle for b in names] for idle in map(graph.while_idle, roles)]),
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


_RUNGS = (
    (("place",), ()),
    (("size", "strategy"), ("first", "where", "place")),
    (("size",), ("first", "where", "place", "strategy")),
)
"""For placements, kinds and groups: the columns that their members have in common, and those that become OPEN."""


def _rows(arrays: Arrays) -> tuple[Rows, Ints, Ints, Ints, Floats, Floats]:
    """(options, above, begin, below, least, away_s) of Relaxation, for the rows of all levels: each pass of the loop
    groups the rows of one level into those of the next."""
    options, n = arrays.options, len(arrays.options)
    call = np.searchsorted(arrays.start, np.arange(n), side="right") - 1
    members = np.flatnonzero(np.arange(n) < arrays.offloaded[call])
    least, away_s = _least_stages(arrays)
    above, begin, below = np.full(n, OPEN), [np.zeros(1, np.int64)], list[Ints]()
    for alike, opened in _RUNGS:
        keys = np.stack([call[members], *(options[name][members] for name in alike)])
        order = np.lexsort((options.seconds[members], *keys[::-1]))
        members, new = members[order], np.diff(keys[:, order]).any(axis=0)
        starts = np.concatenate([[0], 1 + np.flatnonzero(new)])
        rows = options[members[starts]].copy()  # the fastest member, since each run is sorted by seconds
        for trailing in ("save_s", "evaluate_s"):
            rows[trailing] = np.minimum.reduceat(options[trailing][members], starts)
        for name in opened:
            rows[name] = OPEN
        begin.append(begin[-1][-1] + np.append(starts[1:], len(members)))
        below.append(members)
        first = len(options)
        above[members] = first + np.cumsum(np.concatenate([[0], new]))
        above = np.concatenate([above, np.full(len(rows), OPEN)])
        call = np.concatenate([call, call[members[starts]]])
        least = np.concatenate([least, np.minimum.reduceat(least[members], starts)])
        away_s = np.concatenate([away_s, np.minimum.reduceat(away_s[members], starts)])
        options = np.concatenate([options, rows]).view(np.recarray)
        members = first + np.arange(len(rows))
    return options, above, np.concatenate(begin), np.concatenate(below), least, away_s


def _least_stages(arrays: Arrays) -> tuple[Floats, Floats]:
    """(least, away_s) of Relaxation, of options."""
    begins, option = np.unique(arrays.options.stage, return_inverse=True)
    columns = (arrays.stages[name] for name in ("resident", "frozen", "copy", "active", "resident", "copy"))
    least = np.stack([np.minimum.reduceat(column, begins)[option] for column in columns], axis=1)
    least[:, 5] *= arrays.options.onloaded
    away_s, seconds = np.zeros(len(least)), arrays.options.seconds
    for call in range(arrays.n_calls):
        own, away, end = arrays.start[call], arrays.offloaded[call], arrays.start[call + 1]
        if away < end:
            least[own:away, 4:] = least[away:end, 4:]
            away_s[own:away] = np.maximum(seconds[away:end] - seconds[own:away], 0.0)
    return least, away_s


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
def placed(options: Rows, row: int) -> bool:
    """Whether a row has a placement."""
    return row != OPEN and options[row].first != OPEN


@compiled
def relation(options: Rows, n_devices: int, a: int, b: int) -> int:
    """Whether the meshes of two rows (int64, or OPEN) share a device, from their sizes and placements.

    Without placements, two meshes certainly meet if they have more devices together than the cluster.
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
    """Writes the seconds of a move between two rows to out, [4] float64 (ALONE, TRAINER, READER, BOTH)."""
    o = r.arrays.options
    if o[trainer].first != OPEN and o[reader].first != OPEN:
        out[:] = move_s(r, move, trainer, reader)
        return
    a = _unplaced(r, trainer)
    b = _unplaced(r, reader)
    # One number for move and rows. The cache is direct-mapped: a slot for each remainder.
    key = (move * len(o) + a) * len(o) + b
    slot = key % len(r.keys)
    if r.keys[slot] != key:
        _least_moves(r, move, a, b, r.known_s[slot])
        r.keys[slot] = key
    out[:] = r.known_s[slot]


@inner
def _unplaced(r: Relaxation, row: int) -> int:
    """The kind of a row with a placement; any other row itself."""
    while r.arrays.options[row].first != OPEN:
        row = r.above[row]
    return row


@inner
def _least_moves(r: Relaxation, move: int, trainer: int, reader: int, out: Floats) -> None:
    """`moves_s` of two rows without placement: the minima over the kinds of both."""
    o = r.arrays.options
    out[:] = np.inf
    for i in range(_n_kinds(r, trainer)):
        a = _kind(r, trainer, i)
        for j in range(_n_kinds(r, reader)):
            b = _kind(r, reader, j)
            taken = _least_move_s(r, move, a, b)
            slower_a, slower_b = o[a].seconds - o[trainer].seconds, o[b].seconds - o[reader].seconds
            out[ALONE] = min(out[ALONE], taken)
            out[TRAINER] = min(out[TRAINER], taken + slower_a)
            out[READER] = min(out[READER], taken + slower_b)
            out[BOTH] = min(out[BOTH], taken + slower_a + slower_b)


@inner
def _n_kinds(r: Relaxation, row: int) -> int:
    """The number of a group's kinds; 1 for a kind."""
    i = row - r.arrays.start[-1]
    return r.begin[i + 1] - r.begin[i] if r.arrays.options[row].strategy == OPEN else 1


@inner
def _kind(r: Relaxation, row: int, i: int) -> int:
    """Kind i of a group; a kind itself."""
    return r.below[r.begin[row - r.arrays.start[-1]] + i] if r.arrays.options[row].strategy == OPEN else row


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
    """Whether some device certainly lacks memory for the calls with placements.

    choice  [calls] int64 rows, or OPEN
    kept    number of a train_step that is not offloaded, or OPEN

    Each call counts with its least stage, and as if it were offloaded if it can be and is not kept. Only the first
    device of each mesh is checked: one of these holds the most.
    """
    o, n = r.arrays.options, r.arrays.n_calls
    static, needed, onloaded, on = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n, np.bool_)
    for call in range(n):
        row = choice[call]
        if placed(o, row):
            needed[call], static[call] = r.least[row, 3], r.least[row, 0 if call == kept else 4]
            onloaded[call] = 0.0 if call == kept else r.least[row, 5]
            frozen_away = may_offload(r.arrays, call) and r.arrays.trainer[call] < 0
            if not frozen_away and not _stands_before(o, r.arrays.weights, choice, call):
                static[call] += r.least[row, 1]
    for k in range(len(r.reader)):
        reader, trainer = choice[r.reader[k]], choice[r.trainer[k]]
        if placed(o, reader) and placed(o, trainer) and o[reader].place != o[trainer].place:
            needed[r.reader[k]] += r.least[reader, 2]
    for row in choice:
        if placed(o, row):
            device, held, peak = o[row].first, 0.0, 0.0
            for call in range(n):
                mesh = o[choice[call]]
                on[call] = placed(o, choice[call]) and mesh.first <= device < mesh.first + mesh.size
                held += static[call] if on[call] else 0.0
            for call in range(n):
                if on[call]:
                    during = needed[call]
                    for other in range(n):
                        during += onloaded[other] if on[other] and not r.while_idle[other, call] else 0.0
                    peak = max(peak, during)
            if held + peak > memory_of(r.arrays, device):
                return True
    return False


@compiled
def must_offload(r: Relaxation, choice: Ints, call: int) -> bool:
    """Whether a call is a train_step that certainly has no room on its devices beside the calls with placements, if
    it is not offloaded."""
    trains = r.arrays.trainer[call] == call and may_offload(r.arrays, call)
    return trains and placed(r.arrays.options, choice[call]) and lacks(r, choice, call)


@inner
def _stands_before(options: Rows, weights: Ints, choice: Ints, call: int) -> bool:
    """Whether an earlier call with the same weights has the same placement, so that they share what is frozen."""
    for other in range(call):
        same = weights[other] == weights[call] and placed(options, choice[other])
        if same and options[choice[other]].place == options[choice[call]].place:
            return True
    return False
