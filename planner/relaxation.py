"""What the bounds on partial choices know of a problem: mesh rows, the seconds of moves, memory.

A mesh row stands for all options of a call on a mesh: in all that the bounds ask for it is as good as the best of
them. So a call that has a mesh but no option yet is a row like others.
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
from planner.moves import least_reallocation, reallocation
from planner.peaks import memory_of
from planner.tables import Tables

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

OPEN = -1
ALONE, TRAINER, READER, BOTH = range(4)
"""Columns of a move's seconds: of the move itself, and what it and the trainer, the reader, or both take at least
beyond the least seconds of these."""
KNOWN_MOVES = 1 << 18  # that are remembered; newer ones displace older ones


class Relaxation(NamedTuple):
    """What the bounds need beside the arrays of a problem. Options are named by their row.

    options       those of the arrays, then the mesh rows, whose where, place and strategy are OPEN
    mesh_row      [options] row -> its mesh's; OPEN of offloaded options
    kinds         the fastest row of every strategy on a mesh, mesh by mesh: mesh row m has kinds[kind[m]] ..
                  kinds[kind[m + 1] - 1], where m counts mesh rows from 0
    fastest       [calls] seconds of the fastest option
    least         [options] the smallest of resident, copy, active bytes over the stages
    data          [calls, calls] whether data lead from one to the other
    ends, begins  [calls] whether the call is the last, the first of a path of data
    trainer, reader, delay  [moves] a copy of the role that `trainer` trains is made for `reader`, from the
                  version of `delay` iterations before; alone: no other call may share the copy
    position      [orders, calls] place of each call
    source        the call behind the fetch
    keys, known_s  [KNOWN_MOVES] pairs of rows, [KNOWN_MOVES, 4] the seconds of the move between (`moves_s`)
    """

    arrays: Arrays
    options: Rows
    mesh_row: Ints
    kinds: Ints
    kind: Ints
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
    keys: Ints
    known_s: Floats


def relaxation(tables: Tables) -> Relaxation:
    """The relaxation of a problem's tables."""
    graph, arrays, names = tables.problem.graph, tables.arrays, tables.calls
    number = {name: i for i, name in enumerate(names)}
    ordered = data_order(graph)
    moves = np.array(_moves(tables, number), np.int64).reshape(-1, 4).T.copy()
    meshes = _meshes(arrays)
    options, mesh_row = _with_mesh_rows(arrays.options, meshes)
    least = _least_stages(arrays)
    kinds = [_kinds(arrays.options, own) for own in meshes]
    return Relaxation(
        arrays=arrays,
        options=options,
        mesh_row=mesh_row,
        kinds=np.concatenate(kinds),
        kind=np.cumsum([0, *map(len, kinds)]),
        fastest=np.array([arrays.options[a:b].seconds.min() for a, b in pairwise(arrays.start)]),
        least=np.concatenate([least, [least[own].min(axis=0) for own in meshes]]),
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


def _meshes(arrays: Arrays) -> list[Ints]:
    """The resident rows of each call on each of its meshes, fastest first."""
    o, found = arrays.options, list[Ints]()
    for a, b in zip(arrays.start[:-1], arrays.offloaded, strict=True):
        rows = a + np.lexsort((o.seconds[a:b], o.first[a:b], o["size"][a:b]))
        new = np.diff(o.first[rows]) | np.diff(o["size"][rows])
        found += np.split(rows, 1 + np.flatnonzero(new))
    return found


def _with_mesh_rows(options: Rows, meshes: list[Ints]) -> tuple[Rows, Ints]:
    """The options and a row for each mesh, and each row's mesh row."""
    mesh_row = np.concatenate([np.full(len(options), OPEN), len(options) + np.arange(len(meshes))])
    rows = options[[own[0] for own in meshes]].copy()
    for i, own in enumerate(meshes):
        mesh_row[own] = len(options) + i
        rows.save_s[i] = options.save_s[own].min()
    rows.where[:] = rows.place[:] = rows.strategy[:] = OPEN
    return np.concatenate([options, rows]).view(np.recarray), mesh_row


def _kinds(options: Rows, own: Ints) -> Ints:
    """The fastest of the rows of each strategy, given the fastest first."""
    return own[np.sort(np.unique(options.strategy[own], return_index=True)[1])]


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
def save_s(r: Relaxation, call: int, row: int) -> float:
    """Seconds of the save behind a call; 0 where it trains nothing."""
    return r.options[row].save_s if r.arrays.trainer[call] == call else 0.0


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
def moves_s(r: Relaxation, move: int, trainer: int, reader: int, exact: bool, out: Floats) -> None:
    """Seconds of a reallocation between two rows, of options or meshes, in all of its columns.

    exact  of two options: else at least so many, at once
    """
    n = len(r.arrays.options)
    if trainer < n and reader < n:
        out[:] = move_s(r, move, trainer, reader, exact)
        return
    key = (move * len(r.options) + trainer) * len(r.options) + reader
    slot = key % len(r.keys)
    if r.keys[slot] != key:
        _least_moves(r, move, trainer, reader, r.known_s[slot])
        r.keys[slot] = key
    out[:] = r.known_s[slot]


@inner
def _least_moves(r: Relaxation, move: int, trainer: int, reader: int, out: Floats) -> None:
    """`moves_s` of two rows, by the kinds of those that stand for meshes."""
    n, o = len(r.arrays.options), r.options
    out[:] = np.inf
    for i in range(1 if trainer < n else r.kind[trainer - n + 1] - r.kind[trainer - n]):
        a = trainer if trainer < n else r.kinds[r.kind[trainer - n] + i]
        for j in range(1 if reader < n else r.kind[reader - n + 1] - r.kind[reader - n]):
            b = reader if reader < n else r.kinds[r.kind[reader - n] + j]
            taken = move_s(r, move, a, b, False)
            slower_a, slower_b = o[a].seconds - o[trainer].seconds, o[b].seconds - o[reader].seconds
            out[ALONE] = min(out[ALONE], taken)
            out[TRAINER] = min(out[TRAINER], taken + slower_a)
            out[READER] = min(out[READER], taken + slower_b)
            out[BOTH] = min(out[BOTH], taken + slower_a + slower_b)


@inner
def may_offload(arrays: Arrays, call: int) -> bool:
    """Whether a call has offloaded options."""
    return arrays.offloaded[call] < arrays.start[call + 1]


@compiled
def lacks(r: Relaxation, choice: Ints) -> bool:
    """Whether some device lacks memory for the decided calls already, by the stages that hold least, whether or not
    what may be offloaded is."""
    o, n = r.options, r.arrays.n_calls
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
            elif _counts(r, choice, call):
                static += r.least[row, 0]
            for k in range(len(r.reader)):
                trainer = choice[r.trainer[k]]
                if r.reader[k] == call and trainer != OPEN and not _may_be_alike(o, row, trainer):
                    needed += r.least[row, 1]
            peak = max(peak, needed)
        if static + peak > memory_of(r.arrays, device):
            return True
    return False


@inner
def _counts(r: Relaxation, choice: Ints, call: int) -> bool:
    """Whether a call's resident bytes are surely its own: of a frozen role's calls at one placement the first has
    them."""
    if r.arrays.trainer[call] >= 0:
        return True
    for other in range(call):
        same = r.arrays.role[other] == r.arrays.role[call] and choice[other] != OPEN
        if same and _may_be_alike(r.options, choice[other], choice[call]):
            return False
    return True


@inner
def _may_be_alike(o: Rows, a: int, b: int) -> bool:
    """Whether two rows may have one placement."""
    if o[a].place == OPEN or o[b].place == OPEN:
        return o[a].first == o[b].first and o[a].size == o[b].size
    return o[a].place == o[b].place
