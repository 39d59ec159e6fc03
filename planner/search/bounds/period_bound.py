"""Two compiled lower bounds on the period of every plan that completes a partial choice of options.

A partial choice gives some calls an option, and others a row that stands for many options
(planner/search/bounds/relaxation.py). The rest is open. Sizes and places say of some pairs of meshes whether they
share a device. `covers` asks which calls can run at the same time, `exceeds_period` how long cycles are.

What can run at the same time
-----------------------------
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

Weightings of 0, 1/2 and 1 are listed first. For each, the sets with a total above 1 are noted: the weighting is
valid only if none of these sets is possible.
If both calls of a reallocation weigh 1, the reallocation may weigh 1 too, unless another call with a weight can run
at the same time.

Cycles
------
The bound is a test: does the period exceed T? It builds a graph that every completion's steady-state graph contains.
A cycle whose seconds exceed its delay times T proves that the period of every completion exceeds T. The graph has

- the calls; an open one has the seconds of its fastest option;
- the reallocation of each copy that the choice makes necessary, on the devices of both sides;
- edges for data, for versions and for two iterations in flight, as in planner/search/bounds/cycles.py, and the
  dispatch of a transfer where data certainly change ranks;
- for each pair of nodes that certainly share a device, their order, and the order's repetition in the next iteration.
  If the dataflow graph leaves calls unordered, every order of planner/plan/order.py is tried. T is exceeded
  only if every order exceeds it.

A reallocation may be short only between slow options. It and its calls then take longer together than the sum of
their minima. The difference is added to the edges into the reader and to the trainer's own cycle
(planner/search/bounds/relaxation.py, moves).

Onloads, offloads and their copies are left out, so the bound is the same for an option and its offloaded twin. Only
where a train_step must be offloaded (relaxation.py, must_offload), it takes longer. The devices of transfers
are left out too, so the bound of a complete choice may be a few dispatches below its period.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from itertools import combinations, product
from typing import NamedTuple

import networkx as nx
import numpy as np

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.search.bounds.cycles import data_order
from prefect_rlhf.planner.search.bounds.relaxation import (
    ALONE,
    APART,
    BOTH,
    MEET,
    OPEN,
    READER,
    TRAINER,
    Relaxation,
    must_offload,
    seconds_of,
)
from prefect_rlhf.planner.search.compiled.arrays import Rows
from prefect_rlhf.planner.search.compiled.compile import Bools, Floats, Ints, compiled, inner
from prefect_rlhf.rlhf_tasks.spec import IN_FLIGHT

MOST_CALLS = 6  # in larger graphs, only cycles and load bound the period
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


TOLERANCE = 1e-9  # relative; a cycle that exceeds a period by less does so by rounding
MOST_BITS, NO_PATTERN = 62, -1  # bits of an int64 that `_pattern` may use; its result if these are too few


@compiled
def exceeds_period(
    r: Relaxation, choice: Ints, meet: Ints, moves: Floats, period: float, allowed: Floats
) -> bool:
    """Whether every plan that completes a choice has a longer period than `period` seconds.

    choice   [calls] int64 rows, or OPEN
    meet     [calls, calls] int64: whether meshes share a device (UNKNOWN, APART, MEET)
    moves    [moves, 4] float64: seconds of each reallocation (planner.search.bounds.relaxation.moves_s)
    allowed  [calls] float64, output if the result is false: the most seconds that each call without an option may
             take in a plan with this period
    Where calls are cut into parts, the graph would need a node for each part: nothing is tested, and `allowed` stays.
    """
    if r.arrays.chunks.max() > 1:
        return False
    seconds, trailing, n = seconds_of(r, choice), np.zeros(len(choice)), len(choice)
    for call in range(n):
        if choice[call] != OPEN and r.arrays.trainer[call] == call:
            trailing[call] = r.arrays.options[choice[call]].save_s + r.arrays.options[choice[call]].evaluate_s
            if must_offload(r, choice, call):
                seconds[call] += r.away_s[choice[call]]
    # occupied: seconds on the call's devices; before: seconds of the moves directly before a node;
    # joined: seconds of slower options that the moves' columns count already, so `allowed` adds them again
    occupied, before, joined = seconds + trailing, np.zeros(n + len(moves)), np.zeros(n)
    for k in range(len(moves)):
        if r.alone[k]:
            before[r.reader[k]] += moves[k, READER]
            occupied[r.reader[k]] += r.arrays.dispatch_s if moves[k, ALONE] > 0 else 0.0
        joined[r.trainer[k]] += moves[k, BOTH] - moves[k, ALONE]
        joined[r.reader[k]] += moves[k, BOTH] - moves[k, ALONE]
    free = _free_edges(r, choice, meet, moves, seconds, trailing, occupied, period)
    weight = free.copy()
    if _has_gain(weight, period):
        return True
    related = _shared_devices(r, meet, moves)
    ahead, behind = _device_edges(r, related, moves, occupied, before, period)
    # Orders that agree on every pair of nodes that share devices have the same graph: each is tested once.
    known = np.empty(len(r.position), np.int64)
    place, n_known = np.empty(len(weight), np.int64), 0
    allowed[:] = -np.inf
    for order in range(len(r.position)):
        _places(r, r.position[order], place)
        known[n_known] = _pattern(related, place)
        if known[n_known] in known[:n_known]:
            continue
        n_known += known[n_known] != NO_PATTERN
        for a in range(len(weight)):
            for b in range(len(weight)):
                weight[a, b] = max(free[a, b], ahead[a, b] if place[a] < place[b] else behind[a, b])
        if not _has_gain(weight, period):
            # weight is now the longest paths. A call's heaviest cycle leaves it -weight[call, call] more seconds.
            for call in range(len(choice)):
                spare = seconds[call] + joined[call] - weight[call, call]
                allowed[call] = max(allowed[call], spare)
    return allowed[0] == -np.inf


@inner
def _pattern(related: Bools, place: Ints) -> int:
    """Which node of each pair that shares a device comes first, as bits; NO_PATTERN if there are too many pairs."""
    bits, bit = 0, 0
    for a in range(len(related)):
        for b in range(a):
            if related[a, b]:
                if place[a] < place[b]:
                    bits |= 1 << bit
                bit += 1
    return bits if bit <= MOST_BITS else NO_PATTERN


@inner
def _places(r: Relaxation, position: Ints, place: Ints) -> None:
    """Writes the places of all nodes, calls then moves, in an order of the calls. A move is directly before its
    reader: calls have even places, moves odd ones.

    position  [calls] int64 place of each call; place  [nodes] int64, output
    """
    n = len(position)
    for call in range(n):
        place[call] = 2 * position[call]
    for k in range(len(r.reader)):
        place[n + k] = 2 * position[r.reader[k]] - 1


@inner
def _free_edges(
    r: Relaxation,
    choice: Ints,
    meet: Ints,
    moves: Floats,
    seconds: Floats,
    trailing: Floats,
    occupied: Floats,
    period: float,
) -> Floats:
    """The edges that exist in every order: [nodes, nodes] float64, seconds minus delay x period; -inf without edge.

    Nodes are the calls, then the moves: call a is node a, move k is node n + k.
    """
    n, n_moves, dispatch_s = len(choice), len(moves), r.arrays.dispatch_s
    weight = np.full((n + n_moves, n + n_moves), -np.inf)
    for a in range(n):
        for b in range(n):
            if r.data[a, b]:
                sends = _sends(r.arrays.options, choice[a], choice[b], meet[a, b])
                weight[a, b] = seconds[a] + (dispatch_s if sends else 0.0)
            if r.ends[a] and r.begins[b]:
                weight[a, b] = max(weight[a, b], seconds[a] + trailing[a] - IN_FLIGHT * period)
        load = occupied[a] + (dispatch_s if a == r.source else 0.0)
        weight[a, a] = max(weight[a, a], load - period)
    for k in range(n_moves):
        trainer, reader = r.trainer[k], r.reader[k]
        before = seconds[trainer] - r.delay[k] * period
        weight[trainer, n + k] = before
        weight[n + k, reader] = moves[k, READER]
        weight[trainer, reader] = max(weight[trainer, reader], before + moves[k, BOTH])
        if moves[k, ALONE] > 0:
            # The trainer's devices send, so the trainer and the move alternate. The surplus of the trainer's slower
            # options counts here. On the edge from the move into the trainer (below) it does not: it could count
            # twice, because an edge out of the trainer, with the next iteration's move, may have it too.
            both = occupied[trainer] + moves[k, TRAINER]
            weight[trainer, trainer] = max(weight[trainer, trainer], both - period)
            if r.delay[k]:
                weight[n + k, trainer] = moves[k, ALONE]
    return weight


@inner
def _sends(options: Rows, a: int, b: int, related: int) -> bool:
    """Whether data between two rows certainly change ranks. related: UNKNOWN, APART or MEET, of their meshes."""
    if a == OPEN or b == OPEN:
        return False
    where, other = options[a].where, options[b].where
    return related == APART or (where != OPEN and other != OPEN and where != other)


@inner
def _shared_devices(r: Relaxation, meet: Ints, moves: Floats) -> Bools:
    """[nodes, nodes] bool: whether two nodes certainly share a device."""
    n, n_moves = len(meet), len(moves)
    related = np.zeros((n + n_moves, n + n_moves), np.bool_)
    for a in range(n):
        for b in range(a):
            related[a, b] = related[b, a] = meet[a, b] == MEET
    for k in range(n_moves):
        if moves[k, ALONE] <= 0 or not r.alone[k]:
            continue
        trainer, reader = r.trainer[k], r.reader[k]
        for a in range(n):
            related[n + k, a] = related[a, n + k] = meet[trainer, a] == MEET or meet[reader, a] == MEET
        for j in range(k):
            if moves[j, ALONE] > 0 and r.alone[j]:
                a, b = r.trainer[j], r.reader[j]
                shares = related[n + k, a] or related[n + k, b]
                related[n + k, n + j] = related[n + j, n + k] = shares
    return related


@inner
def _device_edges(
    r: Relaxation, related: Bools, moves: Floats, occupied: Floats, before: Floats, period: float
) -> tuple[Floats, Floats]:
    """Edges (a, b) between nodes that share a device: two arrays [nodes, nodes] float64, -inf without edge.

    The first array is for orders in which a is before b. The second is for orders in which a is after b, so that a
    precedes b of the next iteration.

    occupied  [calls] seconds of a call with the save, evaluation or release that follows on the same devices
    before    [nodes] seconds of the moves directly before a node, with the surplus of the node's slower options
    """
    n = len(occupied)
    ahead, behind = np.full(related.shape, -np.inf), np.full(related.shape, -np.inf)
    for a in range(len(related)):
        for b in range(len(related)):
            if related[a, b]:
                if a < n:
                    seconds = occupied[a] + before[b]
                elif b == r.reader[a - n]:
                    seconds = moves[a - n, READER]
                else:
                    seconds = moves[a - n, ALONE]
                ahead[a, b] = seconds
                behind[a, b] = seconds - period + (r.arrays.dispatch_s if b == r.source else 0.0)
    return ahead, behind


@inner
def _has_gain(weight: Floats, period: float) -> bool:
    """Whether some cycle has a positive weight.

    weight  [nodes, nodes] float64, overwritten by the longest paths between all nodes (Floyd-Warshall)
    """
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
