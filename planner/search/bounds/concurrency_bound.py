"""A lower bound on the period of a plan, from which of its calls can run at the same time.

Two calls never run at the same time, in whatever iterations, if they lie on a cycle with a delay of one iteration:
then they alternate. Two calls whose meshes share a device never run at the same time either. So the calls that run at
any moment share no such cycle, and are on disjoint meshes that fit in the cluster together. Such a set is called
possible here.

Give each call a weight such that no possible set has a total weight above 1. Each call runs once per period, and at
any moment the running calls weigh at most 1. So the weighted seconds of all calls are at most the period. (This is
the dual of the linear program that covers every call's seconds by possible sets.)

Cycles come from data, from versions and from devices. A device finishes an iteration before it begins the next one.
So if y follows x in an iteration and both share a device, x of the next iteration follows y. A reallocation that
brings x the version of the previous iteration runs directly before x, and occupies the trainer's devices too.
Between two calls that are cut into parts, data make no cycle: a part of the one runs while the next part of the other
does.

Weightings of 0, 1/2 and 1 are listed beforehand. For each, the sets with a total above 1 are noted: the weighting is
valid only if none of these sets is possible.
If both calls of a reallocation weigh 1, the reallocation may weigh 1 too, unless another call with a weight can run
at the same time.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from itertools import combinations, product
from typing import NamedTuple

import networkx as nx
import numpy as np

from planner.plan.graph import DataflowGraph
from planner.search.bounds.relaxation import ALONE, BOTH, MEET, OPEN, Relaxation, seconds_of
from planner.search.bounds.root_bound import data_order
from planner.search.compiled.compile import Bools, Floats, Ints, compiled, inner

MOST_CALLS = 6  # in larger graphs, only cycles bound the period besides the root bound's load
SLACK = 1 + 1e-9  # a period that exceeds a threshold by less counts as equal
FAR = 9  # iterations; stands for infinity: the calls do not wait for each other


class Cover(NamedTuple):
    """The bound's data about a graph.

    ahead     [calls, calls] int64: b of iteration t + ahead[a, b] waits for a of iteration t; FAR if never
    sets      [sets, calls] bool: sets of two or more calls that data and versions allow to run at the same time
    weights   [weightings, calls] float64
    breaks    [weightings] int64: bit s says that set s weighs more than 1, so the weighting is valid only if set s
              is not possible
    """

    ahead: Ints
    sets: Bools
    weights: Floats
    breaks: Ints


def covering(graph: DataflowGraph) -> Cover:
    """The bound's data about a graph."""
    names = [call.name for call in graph.calls]
    n, ordered = len(names), data_order(graph)
    ahead = np.full((n, n), FAR)
    cut = [call.chunks > 1 for call in graph.calls]
    for a, name in enumerate(names):
        for b in map(names.index, nx.descendants(ordered, name)):
            ahead[a, b] = FAR if cut[a] and cut[b] else 0
    for edge in graph.across:
        a, b = names.index(edge.writer), names.index(edge.reader)
        ahead[a, b] = min(ahead[a, b], 1)
    for data in graph.lagged:
        a, b = names.index(data.writer), names.index(data.reader)
        ahead[a, b] = min(ahead[a, b], FAR if cut[a] and cut[b] else data.lag)
    # Floyd-Warshall: the shortest delay of any path. k is the outermost index.
    for k, a, b in product(range(n), repeat=3):
        ahead[a, b] = min(ahead[a, b], ahead[a, k] + ahead[k, b])
    apart = ahead + ahead.T > 1  # not on a cycle with a delay of at most one iteration
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
    """Indices of the weightings that no other one dominates (weights at least as large, no further broken set)."""
    kept: list[int] = []
    for i in range(len(weights)):
        matched = (weights >= weights[i]).all(axis=1) & (broken <= broken[i]).all(axis=1)
        if matched.sum() == 1:  # by itself
            kept.append(i)
    return kept


class PartialChoice(NamedTuple):
    """A partial choice as the bound sees it.

    seconds     [calls] float64: lower bounds on seconds
    sizes       [calls] int64: devices of each mesh, 0 if unknown
    meet        [calls, calls] bool: whether two meshes certainly share a device
    trainer, reader  [moves] int64: the calls of each reallocation
    moves       [moves] bool: whether it certainly happens, with the version of the previous iteration
    moved_s     [moves] float64: lower bounds on its seconds
    """

    seconds: Floats
    sizes: Ints
    meet: Bools
    trainer: Ints
    reader: Ints
    moves: Bools
    moved_s: Floats


@inner
def covers(r: Relaxation, c: Cover, choice: Ints, meet: Ints, moves: Floats, threshold: float) -> bool:
    """Whether the bound of a partial choice does not exceed the threshold, in seconds.

    choice   [calls] int64 rows, or OPEN
    meet     [calls, calls] int64: UNKNOWN, APART or MEET
    moves    [moves, 4] float64 seconds (Relaxation.moves_s)
    """
    o, n, seconds = r.arrays.options, r.arrays.n_calls, seconds_of(r, choice)
    sizes, meeting = np.zeros(n, np.int64), meet == MEET
    for call in range(n):
        meeting[call, call] = False
        if choice[call] != OPEN:
            sizes[call] = o[choice[call]].size
    moved, moved_s = np.zeros(len(r.trainer), np.bool_), np.zeros(len(r.trainer))
    for k in range(len(moves)):
        if r.delay[k] == 1 and r.alone[k]:
            moved[k], moved_s[k] = moves[k, ALONE] > 0, moves[k, BOTH]
    parts = PartialChoice(seconds, sizes, meeting, r.trainer, r.reader, moved, moved_s)
    return cover_s(c, parts, r.n_devices) <= threshold * SLACK


@compiled
def cover_s(c: Cover, p: PartialChoice, n_devices: int) -> float:
    """A lower bound on the period, in seconds: that of the best weighting."""
    possible = _possible_sets(c, p, n_devices)
    most = 0.0
    for w in range(len(c.weights)):
        if c.breaks[w] & possible == 0:
            total = 0.0
            for call in range(len(p.seconds)):
                total += c.weights[w, call] * p.seconds[call]
            most = max(most, total + _carried_s(c, p, w))
    return most


@inner
def _possible_sets(c: Cover, p: PartialChoice, n_devices: int) -> int:
    """The possible sets: bit s for set s."""
    ahead = c.ahead.copy()
    n = len(ahead)
    for a in range(n):
        for b in range(n):
            # b follows a on a device, so a of the next iteration follows b.
            if c.ahead[a, b] == 0 and p.meet[a, b]:
                ahead[b, a] = min(ahead[b, a], 1)
    for k in range(len(p.moves)):
        if p.moves[k]:
            # The move runs on the trainer's devices just before its reader. A call that shares these devices and
            # follows the reader precedes the next iteration's move, and so the next iteration's reader.
            for call in range(n):
                if p.meet[call, p.trainer[k]] and c.ahead[p.reader[k], call] == 0:
                    ahead[call, p.reader[k]] = min(ahead[call, p.reader[k]], 1)
    for k in range(n):  # Floyd-Warshall again, with the edges of devices
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
    """Seconds of the reallocations that may weigh 1 in addition to weighting w.

    That is so if no call with a weight can run at the same time. A call cannot run at the same time if it shares a
    device with the reallocation. Nor can it if it follows the reader, and precedes the trainer or another call that
    shares a device with the reallocation: it then runs between two reallocations.
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
        # Two moves may both weigh 1 only if they share a device; else this one does not count.
        for other in range(k):
            a, b = p.trainer[other], p.reader[other]
            together = p.meet[a, trainer] or p.meet[a, reader] or p.meet[b, trainer] or p.meet[b, reader]
            if p.moved_s[other] > 0 and c.weights[w, a] == 1 and c.weights[w, b] == 1 and not together:
                alone = False
        if alone:
            total += p.moved_s[k]
    return total
