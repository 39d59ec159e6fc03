"""A lower bound on the period of a plan, from which of its calls can run at the same time.

Two calls never run at the same time, whatever their iterations, if they lie on a cycle that reaches one iteration
ahead: they alternate. Nor do two calls whose meshes share a device. So at any moment a set of calls runs that share
no such cycle, on disjoint meshes, whose sizes add up to the cluster at most. Give each call a weight such that no
set that may run at once weighs more than 1: then the weighted seconds of all calls are at most the period,
because each call runs once per period, and at each moment at most 1 is counted. (It is the dual of covering every
call's seconds by sets that run at once.)

Cycles come from data and versions, and from devices: on a device all of an iteration precedes the next one. So
where y follows x in an iteration and both share a device, x of the next iteration follows y. A reallocation that
brings x the version of the iteration before occupies its trainer's devices too, directly before x.

Weights of 0, 1/2 and 1 are listed beforehand, with the sets that they break if these may run. Another weighting
starts from the share of the cluster that each call occupies, which is the load, and is lifted as far as
the sets allow: devices that stand idle because nothing may run on them count as busy. Where both calls of
a reallocation weigh 1, so may it, if nothing else that weighs can run at once with it.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from itertools import combinations, product
from typing import NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from planner.plan.graph import DataflowGraph
from planner.search.bounds.root_bound import data_order
from planner.search.compiled.compile import compiled, inner

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MOST_CALLS = 6  # of larger graphs only cycles and load bound the plans
FAR = 9  # iterations: calls that do not wait for each other


class Cover(NamedTuple):
    """What the bound knows of a graph.

    ahead     [calls, calls] iterations that the second call lies behind when it waits for the first: 0, 1 or FAR
    sets      [sets, calls] two or more calls
    weights   [weightings, calls]
    breaks    [weightings] bit s: the weighting gives set s more than 1, so it holds only where that set cannot run
    """

    ahead: Ints
    sets: Bools
    weights: Floats
    breaks: Ints


def cover(graph: DataflowGraph) -> Cover:
    """The cover of a graph."""
    names = [call.name for call in graph.calls]
    n, ordered = len(names), data_order(graph)
    ahead = np.full((n, n), FAR)
    for a, name in enumerate(names):
        for other in nx.descendants(ordered, name):
            ahead[a, names.index(other)] = 0
    for edge in graph.across:
        a, b = names.index(edge.writer), names.index(edge.reader)
        ahead[a, b] = min(ahead[a, b], 1)
    for k, a, b in product(range(n), repeat=3):
        ahead[a, b] = min(ahead[a, b], ahead[a, k] + ahead[k, b])
    apart = ahead + ahead.T > 1
    several = (c for size in range(2, n + 1) for c in combinations(range(n), size))
    alike = [c for c in several if all(apart[a, b] for a, b in combinations(c, 2))]
    if n > MOST_CALLS:
        return Cover(ahead, np.zeros((0, n), np.bool_), np.eye(n), np.zeros(n, np.int64))
    sets = np.array([[call in c for call in range(n)] for c in alike], np.bool_).reshape(-1, n)
    weights = np.array(list(product((0.0, 0.5, 1.0), repeat=n)))
    broken = weights @ sets.T > 1
    kept = _undominated(weights, broken)
    bits = np.array([1 << s for s in range(len(sets))], np.int64)
    return Cover(ahead, sets, weights[kept], broken[kept] @ bits)


def _undominated(weights: Floats, broken: Bools) -> list[int]:
    """The weightings that no other one matches: at least as heavy, breaking no more."""
    kept: list[int] = []
    for i in range(len(weights)):
        matched = (weights >= weights[i]).all(axis=1) & (broken <= broken[i]).all(axis=1)
        if matched.sum() == 1:  # by itself
            kept.append(i)
    return kept


class PartialChoice(NamedTuple):
    """A partial choice as the bound sees it.

    seconds     [calls] at least; least_load [calls] seconds times devices, at least
    sizes       [calls] of meshes, 0 where unknown
    meet        [calls, calls] pairs that surely share a device
    trainer, reader, moves, moved_s  of reallocations between iterations: whether there surely is one, and seconds at
                least
    """

    seconds: Floats
    least_load: Floats
    sizes: Ints
    meet: Bools
    trainer: Ints
    reader: Ints
    moves: Bools
    moved_s: Floats


@compiled
def cover_s(c: Cover, p: PartialChoice, n_devices: int) -> float:
    """Seconds that the period is at least, by the weighting that says most."""
    possible = _possible_sets(c, p, n_devices)
    most = _lifted_s(c, p, possible, n_devices)
    for w in range(len(c.weights)):
        if c.breaks[w] & possible == 0:
            total = 0.0
            for call in range(len(p.seconds)):
                total += c.weights[w, call] * p.seconds[call]
            most = max(most, total + _carried_s(c, p, w))
    return most


@inner
def _possible_sets(c: Cover, p: PartialChoice, n_devices: int) -> int:
    """Bits of the sets that may run at once."""
    ahead = c.ahead.copy()
    n = len(ahead)
    for a in range(n):
        for b in range(n):
            if c.ahead[a, b] == 0 and p.meet[a, b]:
                ahead[b, a] = min(ahead[b, a], 1)
    for k in range(len(p.moves)):
        if p.moves[k]:
            for call in range(n):
                if p.meet[call, p.trainer[k]] and c.ahead[p.reader[k], call] == 0:
                    ahead[call, p.reader[k]] = min(ahead[call, p.reader[k]], 1)
    for k in range(n):
        for a in range(n):
            for b in range(n):
                ahead[a, b] = min(ahead[a, b], ahead[a, k] + ahead[k, b])
    possible = 0
    for s in range(len(c.sets)):
        total, fits = 0, True
        for a in range(n):
            if c.sets[s, a]:
                total += p.sizes[a]
                for b in range(a):
                    fits = fits and not (c.sets[s, b] and (p.meet[a, b] or ahead[a, b] + ahead[b, a] <= 1))
        if fits and total <= n_devices:
            possible |= 1 << s
    return possible


@inner
def _carried_s(c: Cover, p: PartialChoice, w: int) -> float:
    """Seconds of the reallocations that weigh 1 beside a weighting: next to nothing that could run meanwhile.

    Not meanwhile run calls that share its devices, and those between its reader and its trainer or a call that
    follows the reader and shares its devices.
    """
    total, n = 0.0, len(p.seconds)
    for k in range(len(p.moves)):
        trainer, reader = p.trainer[k], p.reader[k]
        alone = p.moved_s[k] > 0 and c.weights[w, trainer] == 1 and c.weights[w, reader] == 1
        for call in range(n):
            if not alone:
                break
            if c.weights[w, call] > 0 and call not in (trainer, reader):
                beside = not (p.meet[call, trainer] or p.meet[call, reader])
                if beside and c.ahead[reader, call] == 0:
                    beside = c.ahead[call, trainer] != 0
                    for last in range(n):
                        if p.meet[last, trainer] or p.meet[last, reader]:
                            beside = beside and c.ahead[call, last] != 0
                alone = not beside
        for other in range(k):
            a, b = p.trainer[other], p.reader[other]
            together = p.meet[a, trainer] or p.meet[a, reader] or p.meet[b, trainer] or p.meet[b, reader]
            if p.moved_s[other] > 0 and c.weights[w, a] == 1 and c.weights[w, b] == 1 and not together:
                alone = False
        if alone:
            total += p.moved_s[k]
    return total


@inner
def _lifted_s(c: Cover, p: PartialChoice, possible: int, n_devices: int) -> float:
    """The load of the cluster, with the weights of calls lifted as far as the sets allow, the longest call first."""
    n, total = len(p.seconds), 0.0
    weight = np.empty(n)
    for a in range(n):
        total += p.least_load[a] / n_devices
        weight[a] = p.sizes[a] / n_devices if p.sizes[a] else 1.0
    if n > MOST_CALLS:
        return total
    lifted = 0  # bits of calls
    while True:
        call = -1
        for a in range(n):
            if p.sizes[a] and not lifted >> a & 1 and (call < 0 or p.seconds[a] > p.seconds[call]):
                call = a
        if call < 0:
            return total
        lifted |= 1 << call
        room = 1.0 - weight[call]
        for s in range(len(c.sets)):
            if possible >> s & 1 and c.sets[s, call]:
                together = 0.0
                for a in range(n):
                    if c.sets[s, a]:
                        together += weight[a]
                room = min(room, 1.0 - together)
        if room > 0:
            weight[call] += room
            total += room * p.seconds[call]
