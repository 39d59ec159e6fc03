"""What a walk through partial choices goes by: the calls' order, and their options by group, mesh and speed.

A group is all options of a call on meshes of one size. Offloaded ones are in no group: bounds are the same for their
resident twins (planner/arrays.py), and the walk tries them at complete choices.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.arrays import Arrays, Rows
from planner.bound import Cycles
from planner.compiled import compiled
from planner.cover import Cover, cover
from planner.moves import least_move_s
from planner.relaxation import OPEN, Relaxation
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
    begin     [groups + 1] the meshes of a group are Tree.meshes[begin[g]] .. Tree.meshes[begin[g + 1] - 1]
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

    order   [calls] calls by depth
    load    [options, mesh rows] seconds x devices, with the save of a train_step, at least
    meshes  [meshes] mesh rows group by group, those of a group fastest first
    rows    [resident options] mesh by mesh, those of a mesh fastest first
    row     [meshes + 1] mesh row m, counted from 0, has rows[row[m]] .. rows[row[m + 1] - 1]
    """

    order: Ints
    load: Floats
    meshes: Ints
    rows: Ints
    row: Ints
    groups: Groups
    cycles: Cycles
    cover: Cover


def tree(tables: Tables, r: Relaxation, cycles: Cycles) -> Tree:
    """The tree of a problem's partial choices."""
    o, n = r.options, len(r.arrays.options)
    resident = np.flatnonzero(r.mesh_row != OPEN)[: -(len(o) - n)]
    rows = resident[np.lexsort((o.seconds[resident], r.mesh_row[resident]))]
    row = np.searchsorted(r.mesh_row[rows], np.arange(n, len(o) + 1))
    load, call = o.seconds * o["size"], np.searchsorted(r.arrays.start, rows, side="right") - 1
    trains = rows[r.arrays.trainer[call] == call]
    load[trains] += o.save_s[trains] * o["size"][trains]
    load[n:] = np.minimum.reduceat(load[rows], row[:-1])
    call_of_mesh = call[row[:-1]]
    meshes, begin, start = list[int](), [0], [0]
    for c in range(r.arrays.n_calls):
        for group in _by_size(o, n + np.flatnonzero(call_of_mesh == c)):
            meshes += group
            begin.append(len(meshes))
        start.append(len(begin) - 1)
    groups = _groups(r, np.array(start), np.array(begin), np.array(meshes), load)
    heaviest = np.argsort([-groups.lightest[g - 1] for g in groups.start[1:]], kind="stable")
    return Tree(heaviest, load, np.array(meshes), rows, row, groups, cycles, cover(tables.problem.graph))


def _by_size(o: Rows, meshes: Ints) -> list[list[int]]:
    """Mesh rows by size, the sizes and the meshes of each fastest first."""
    found: dict[int, list[int]] = {}
    for mesh in meshes[np.argsort(o.seconds[meshes], kind="stable")]:
        found.setdefault(int(o[mesh]["size"]), []).append(int(mesh))
    return list(found.values())


def _groups(r: Relaxation, start: Ints, begin: Ints, meshes: Ints, load: Floats) -> Groups:
    o = r.options
    first = meshes[begin[:-1]]
    size, seconds = o["size"][first], o.seconds[first]
    least = np.minimum.reduceat(load[meshes], begin[:-1])
    calls = list(pairwise(start))
    lightest, bare = (
        np.concatenate([np.minimum.accumulate(figure[a:b]) for a, b in calls])
        for figure in (least, seconds * size)
    )
    most = max(b - a for a, b in calls)
    pair_s = np.zeros((len(r.trainer), most, most))
    for k, (trainer, reader) in enumerate(zip(r.trainer, r.reader, strict=True)):
        kinds = [_kinds(r, meshes, begin, *calls[call]) for call in (trainer, reader)]
        between = _pairs(r.arrays, r.arrays.role[trainer], *kinds[0], *kinds[1])
        firsts = [
            np.searchsorted(group, np.arange(b - a))
            for (_, group), (a, b) in zip(kinds, (calls[trainer], calls[reader]), strict=True)
        ]
        by_group = np.minimum.reduceat(np.minimum.reduceat(between, firsts[0], axis=0), firsts[1], axis=1)
        pair_s[k, : by_group.shape[0], : by_group.shape[1]] = by_group
    smallest = np.minimum.reduceat(r.least[meshes], begin[:-1])
    return Groups(start, size, seconds, least, lightest, bare, smallest, begin, pair_s)


def _kinds(r: Relaxation, meshes: Ints, begin: Ints, low: int, high: int) -> tuple[Ints, Ints]:
    """Of every strategy in each of a call's groups the fastest row, and the group's number, counted from low."""
    n, found, groups = len(r.arrays.options), list[int](), list[int]()
    for group in range(low, high):
        fastest: dict[int, int] = {}
        for mesh in meshes[begin[group] : begin[group + 1]]:  # fastest first; alike but for device classes
            for row in r.kinds[r.kind[mesh - n] : r.kind[mesh - n + 1]]:
                kind = int(r.options.strategy[row])
                if kind not in fastest or r.options.seconds[row] < r.options.seconds[fastest[kind]]:
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
