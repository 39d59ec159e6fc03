"""What a walk through partial choices goes by: the calls' order, and their options by group, mesh and speed.

A group is all options of a call on meshes of one size. Offloaded ones are in no group: bounds are the same for their
resident twins (planner/arrays.py), and the walk tries them at complete choices.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.arrays import Arrays
from planner.bound import Cycles
from planner.compiled import compiled
from planner.cover import Cover, cover
from planner.evaluator import least_move_s
from planner.relaxation import Relaxation
from planner.tables import Tables

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Groups(NamedTuple):
    """Groups of all calls one after another, those of a call fastest first.

    start     [calls + 1] the groups of call c are start[c] .. start[c + 1] - 1
    size      [groups] devices
    seconds   [groups] of the fastest option
    load      [groups] the least seconds x devices of an option, with the save of a train_step
    lightest  [groups] the least load of the call's groups up to this one; lightest_bare: the same without saves
    least     [groups, 3] the smallest of resident, copy, active bytes over options and stages
    begin     [groups + 1] the rows of a group are Tree.rows[begin[g]] .. Tree.rows[begin[g + 1] - 1]
    pair_s    [moves, groups of the trainer, groups of the reader] seconds that both calls and the move between take
              at least
    """

    start: Ints
    size: Ints
    seconds: Floats
    load: Floats
    lightest: Floats
    lightest_bare: Floats
    least: Floats
    begin: Ints
    pair_s: Floats


class Tree(NamedTuple):
    """What a walk goes by.

    order     [calls] calls by depth
    load      [options] seconds x devices of a row, with the save of a train_step
    rows      [resident options] group by group; in each mesh by mesh, meshes and the rows of each fastest first
    end       [resident options] by place in rows: where the next mesh begins
    floor     [resident options] by place in rows: the least load of the rows of the mesh
    spread_s  [resident options] by place in rows: by how much a row of the mesh may need less than its fastest
              elsewhere: in transfers that it spares, and in its save
    """

    order: Ints
    load: Floats
    rows: Ints
    end: Ints
    floor: Floats
    spread_s: Floats
    groups: Groups
    cycles: Cycles
    cover: Cover


def tree(tables: Tables, r: Relaxation, cycles: Cycles) -> Tree:
    """The tree of a problem's partial choices."""
    o = r.arrays.options
    starts = list(zip(r.arrays.start[:-1], r.arrays.offloaded, strict=True))
    saves, n_rows = np.zeros(len(o)), sum(b - a for a, b in starts)
    for call, (a, b) in enumerate(starts):
        if r.arrays.trainer[call] == call:
            saves[a:b] = o[a:b].save_s
    load = (o.seconds + saves) * o["size"]
    rows, end = np.empty(n_rows, np.int64), np.empty(n_rows, np.int64)
    floor, spread_s = np.empty(n_rows), np.empty(n_rows)
    place, begin, start = 0, [0], [0]
    for call, (a, b) in enumerate(starts):
        spared_s = r.arrays.dispatch_s * (r.data[call].sum() + r.data[:, call].sum())
        for group in _by(o["size"], o.seconds, range(a, b)):
            for mesh in _by(o.first, o.seconds, group):
                here = slice(place, place + len(mesh))
                rows[here], end[here], floor[here] = mesh, here.stop, load[mesh].min()
                spread_s[here] = spared_s + saves[mesh[0]] - saves[mesh].min()
                place = here.stop
            begin.append(place)
        start.append(len(begin) - 1)
    groups = _groups(r, np.array(start), np.array(begin), rows, load)
    heaviest = np.argsort([-groups.lightest[g - 1] for g in groups.start[1:]], kind="stable")
    return Tree(heaviest, load, rows, end, floor, spread_s, groups, cycles, cover(tables.problem.graph))


def _by(key: Ints, seconds: Floats, rows: Iterable[int]) -> list[list[int]]:
    """Rows by a key, the keys and the rows of each fastest first."""
    found: dict[int, list[int]] = {}
    for row in sorted(rows, key=lambda row: seconds[row]):
        found.setdefault(int(key[row]), []).append(row)
    return list(found.values())


def _groups(r: Relaxation, start: Ints, begin: Ints, rows: Ints, load: Floats) -> Groups:
    o = r.arrays.options
    first = rows[begin[:-1]]
    size, seconds = o["size"][first], o.seconds[first]
    least = np.minimum.reduceat(load[rows], begin[:-1])
    calls = list(pairwise(start))
    lightest, bare = (
        np.concatenate([np.minimum.accumulate(figure[a:b]) for a, b in calls])
        for figure in (least, seconds * size)
    )
    most = max(b - a for a, b in calls)
    pair_s = np.zeros((len(r.trainer), most, most))
    for k, (trainer, reader) in enumerate(zip(r.trainer, r.reader, strict=True)):
        kinds = [_kinds(r.arrays, rows, begin, *calls[call]) for call in (trainer, reader)]
        between = _pairs(r.arrays, r.arrays.role[trainer], *kinds[0], *kinds[1])
        firsts = [
            np.searchsorted(group, np.arange(b - a))
            for (_, group), (a, b) in zip(kinds, (calls[trainer], calls[reader]), strict=True)
        ]
        by_group = np.minimum.reduceat(np.minimum.reduceat(between, firsts[0], axis=0), firsts[1], axis=1)
        pair_s[k, : by_group.shape[0], : by_group.shape[1]] = by_group
    smallest = np.minimum.reduceat(r.least[rows], begin[:-1])
    return Groups(start, size, seconds, least, lightest, bare, smallest, begin, pair_s)


def _kinds(arrays: Arrays, rows: Ints, begin: Ints, low: int, high: int) -> tuple[Ints, Ints]:
    """Of every strategy in each of a call's groups the fastest row, and the group's number, counted from low."""
    found: list[int] = []
    groups: list[int] = []
    for group in range(low, high):
        fastest: dict[int, int] = {}
        for row in rows[begin[group] : begin[group + 1]]:
            kind = int(arrays.options.strategy[row])
            if kind not in fastest or arrays.options.seconds[row] < arrays.options.seconds[fastest[kind]]:
                fastest[kind] = int(row)
        found += fastest.values()
        groups += [group - low] * len(fastest)
    return np.array(found), np.array(groups)


@compiled
def _pairs(
    arrays: Arrays, role: int, trainers: Ints, trainer_group: Ints, readers: Ints, reader_group: Ints
) -> Floats:
    """[trainers, readers] seconds that two calls and the move between take at least, wherever their meshes lie."""
    o, per_host = arrays.options, arrays.links.per_host
    found = np.empty((len(trainers), len(readers)))
    for i in range(len(trainers)):
        for j in range(len(readers)):
            a, b = trainers[i], readers[j]
            found[i, j] = o[a].seconds + o[b].seconds
            if o[a].strategy != o[b].strategy:
                near = min(max(o[a].size, per_host), o[b].size)
                shared = min(o[a].size, o[b].size)
                found[i, j] += arrays.dispatch_s + least_move_s(arrays, role, a, b, shared, near)
    return found
