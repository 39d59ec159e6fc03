"""A compiled lower bound on the period of every plan that completes a partial choice of options.

A partial choice gives some calls an option, others a row that stands for many (planner/search/bounds/relaxation.py),
says of some meshes whether they share devices, and leaves the rest open. Every plan that completes
it has the steady state of a graph with more nodes and edges than the one here, so a cycle here whose seconds exceed
its delay times T proves that the plan's period exceeds T. The graph has

- the calls, an open one with the seconds of its fastest option;
- the reallocation of each copy that the choice makes necessary, on the devices of both sides;
- edges for data, for versions and for two iterations in flight, as planner/search/bounds/root_bound.py has them, and
  the dispatch of a transfer where data change ranks;
- for each pair of nodes that surely share a device, the order of the calls and its repetition in the next
  iteration. Calls that the graph leaves unordered are tried in every order of planner/plan/call_order.py, and T is
  exceeded only if every order exceeds it.

Where a reallocation is short only between slow options, it and the calls beside it take longer together than the
least of each: the edges into the reader, and the trainer's own, have what is missing
(planner/search/bounds/relaxation.py, moves).

Left out are onloads, offloads and copies, so the bound is the same for an option and its offloaded twin, and the
devices of transfers; so the bound of a complete choice may lie some dispatches below its period.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

import numpy as np
from numpy.typing import NDArray

from planner.plan.steady_state import IN_FLIGHT
from planner.search.bounds.relaxation import (
    ALONE,
    APART,
    BOTH,
    MEET,
    OPEN,
    READER,
    TRAINER,
    Relaxation,
    seconds_of,
)
from planner.search.compiled.arrays import Rows
from planner.search.compiled.compile import compiled, inner

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

TOLERANCE = 1e-9  # relative; a cycle that exceeds a period by less is rounding
MOST_BITS, NO_PATTERN = 62, -1


@compiled
def exceeds(r: Relaxation, choice: Ints, meet: Ints, moves: Floats, period: float, allowed: Floats) -> bool:
    """Whether every plan that completes a choice has a longer period.

    choice   [calls] rows, or OPEN
    meet     [calls, calls] whether their meshes share a device: UNKNOWN, APART, MEET
    moves    [moves, 4] seconds of each reallocation (Relaxation.moves_s)
    allowed  [calls] out, if not: the most seconds that each call without an option may take in such a plan of this
             period
    """
    seconds, saves, n = seconds_of(r, choice), np.zeros(len(choice)), len(choice)
    for call in range(n):
        if choice[call] != OPEN and r.arrays.trainer[call] == call:
            saves[call] = r.arrays.options[choice[call]].save_s
    occupied, before, joined = seconds + saves, np.zeros(n + len(moves)), np.zeros(n)
    for k in range(len(moves)):
        if r.alone[k]:
            before[r.reader[k]] += moves[k, READER]
            occupied[r.reader[k]] += r.arrays.dispatch_s if moves[k, ALONE] > 0 else 0.0
        joined[r.trainer[k]] += moves[k, BOTH] - moves[k, ALONE]
        joined[r.reader[k]] += moves[k, BOTH] - moves[k, ALONE]
    free = _free_edges(r, choice, meet, moves, seconds, saves, occupied, period)
    weight = free.copy()
    if _has_gain(weight, period):
        return True
    related = _shared_devices(r, meet, moves)
    ahead, behind = _device_edges(r, related, moves, occupied, before, period)
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
            for call in range(len(choice)):
                spare = seconds[call] + joined[call] - weight[call, call]
                allowed[call] = max(allowed[call], spare)
    return allowed[0] == -np.inf


@inner
def _pattern(related: Bools, place: Ints) -> int:
    """Which of each two nodes that share devices stands first, as bits; NO_PATTERN when there are too many."""
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
    """The places of all nodes in an order of the calls: a move stands directly before its reader."""
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
    saves: Floats,
    occupied: Floats,
    period: float,
) -> Floats:
    """[nodes, nodes] seconds less delays of the edges that hold in every order; nodes are calls, then moves."""
    n, n_moves, dispatch_s = len(choice), len(moves), r.arrays.dispatch_s
    weight = np.full((n + n_moves, n + n_moves), -np.inf)
    for a in range(n):
        for b in range(n):
            if r.data[a, b]:
                sends = _sends(r.arrays.options, choice[a], choice[b], meet[a, b])
                weight[a, b] = seconds[a] + (dispatch_s if sends else 0.0)
            if r.ends[a] and r.begins[b]:
                weight[a, b] = max(weight[a, b], seconds[a] + saves[a] - IN_FLIGHT * period)
        load = occupied[a] + (dispatch_s if a == r.source else 0.0)
        weight[a, a] = max(weight[a, a], load - period)
    for k in range(n_moves):
        trainer, reader = r.trainer[k], r.reader[k]
        before = seconds[trainer] - r.delay[k] * period
        weight[trainer, n + k] = before
        weight[n + k, reader] = moves[k, READER]
        weight[trainer, reader] = max(weight[trainer, reader], before + moves[k, BOTH])
        if moves[k, ALONE] > 0:
            # The trainer's own devices send; its slower options count here, for else they could count twice: on the
            # way into the trainer and, with the move of the next iteration, out of it
            both = occupied[trainer] + moves[k, TRAINER]
            weight[trainer, trainer] = max(weight[trainer, trainer], both - period)
            if r.delay[k]:
                weight[n + k, trainer] = moves[k, ALONE]
    return weight


@inner
def _sends(options: Rows, a: int, b: int, related: int) -> bool:
    """Whether data between two rows surely change ranks; related: what is known of their meshes."""
    if a == OPEN or b == OPEN:
        return False
    where, other = options[a].where, options[b].where
    return related == APART or (where != OPEN and other != OPEN and where != other)


@inner
def _shared_devices(r: Relaxation, meet: Ints, moves: Floats) -> Bools:
    """[nodes, nodes] whether two nodes surely share a device."""
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
    """[nodes, nodes] edges between nodes that share a device: where the first stands before the second, and where it
    stands behind it and precedes it in the next iteration.

    occupied  [calls] seconds, with the save or release that follows on the same devices
    before    [nodes] seconds that a node takes beyond its least, with the move that may stand directly before it
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
