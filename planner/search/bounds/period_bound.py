"""A compiled lower bound on the period of every plan that completes a partial choice of options.

A partial choice gives some calls an option, and others a row that stands for many options
(planner/search/bounds/relaxation.py). It says of some pairs of meshes whether they share a device. The rest is open.

The bound is a test: does the period exceed T? It builds a graph that every completion's steady-state graph contains.
A cycle whose seconds exceed its delay times T proves that the period of every completion exceeds T. The graph has

- the calls; an open one has the seconds of its fastest option;
- the reallocation of each copy that the choice makes necessary, on the devices of both sides;
- edges for data, for versions and for two iterations in flight, as in planner/search/bounds/root_bound.py, and the
  dispatch of a transfer where data certainly change ranks;
- for each pair of nodes that certainly share a device, their order, and the order's repetition in the next iteration.
  If the dataflow graph leaves calls unordered, every order of planner/plan/call_order.py is tried. T is exceeded
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

import numpy as np

from planner.search.bounds.relaxation import (
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
from planner.search.compiled.arrays import Rows
from planner.search.compiled.compile import Bools, Floats, Ints, compiled, inner
from rlhf_tasks.spec import IN_FLIGHT

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
