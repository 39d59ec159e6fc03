"""A compiled lower bound on the period of every plan that completes a partial choice of options.

A partial choice gives some calls an option, others a row that stands for many (planner/relaxation.py), says of some
meshes whether they share devices, and leaves the rest open. Every plan that completes
it has the steady state of a graph with more nodes and edges than the one here, so a cycle here whose seconds exceed
its delay times T proves that the plan's period exceeds T. The graph has

- the calls, an open one with the seconds of its fastest option;
- the reallocation of each copy that the choice makes necessary, on the devices of both sides;
- edges for data, for versions and for two iterations in flight, as planner/bound.py has them, and the dispatch
  of a transfer where data change ranks;
- for each pair of nodes that surely share a device, the order of the calls and its repetition in the next
  iteration. Calls that the graph leaves unordered are tried in every order of planner/call_order.py, and T is
  exceeded only if every order exceeds it.

Where a reallocation is short only between slow options, it and the call beside it take longer together than the
least of each: the edge between them has what is missing (planner/relaxation.py, moves).

Left out are onloads, offloads and copies, so the bound is the same for an option and its offloaded twin, and the
devices of transfers; so the bound of a complete choice may lie some dispatches below its period.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

import numpy as np
from numpy.typing import NDArray

from planner.compiled import compiled, inner
from planner.relaxation import ALONE, APART, BOTH, MEET, OPEN, READER, TRAINER, Relaxation, save_s
from planner.simulate import IN_FLIGHT

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

TOLERANCE = 1e-9  # relative; a cycle that exceeds a period by less is rounding


@compiled
def exceeds(r: Relaxation, choice: Ints, meet: Ints, moves: Floats, period: float, allowed: Floats) -> bool:
    """Whether every plan that completes a choice has a longer period.

    choice   [calls] rows, or OPEN
    meet     [calls, calls] whether their meshes share a device: UNKNOWN, APART, MEET
    moves    [moves, 4] seconds of each reallocation (Relaxation.moves_s)
    allowed  [calls] out, if not: the most seconds that each call without an option may take in such a plan of this
             period
    """
    free = _free_edges(r, choice, meet, moves, period)
    weight = free.copy()
    if _has_gain(weight, period):
        return True
    related = _shared_devices(r, meet, moves)
    allowed[:] = -np.inf
    before = -1
    for order in range(len(r.position)):
        if before >= 0 and _same_order(r, related, r.position[before], r.position[order]):
            continue
        before = order
        weight = _with_devices(r, free, related, choice, moves, r.position[order], period)
        if not _has_gain(weight, period):
            for call in range(len(choice)):
                spare = _seconds(r, choice, call) - weight[call, call]
                allowed[call] = max(allowed[call], spare + _joined_s(r, moves, call))
    return allowed[0] == -np.inf


@inner
def _joined_s(r: Relaxation, moves: Floats, call: int) -> float:
    """Seconds of the moves beside a call that a slower option of it may spare."""
    spared = 0.0
    for k in range(len(moves)):
        if r.trainer[k] == call or r.reader[k] == call:
            spared += moves[k, BOTH] - moves[k, ALONE]
    return spared


@inner
def _same_order(r: Relaxation, related: Bools, before: Ints, now: Ints) -> bool:
    """Whether nodes that share devices stand alike in two orders of the calls."""
    for a in range(len(related)):
        for b in range(a):
            if related[a, b] and (
                (_place(r, before, a) < _place(r, before, b)) != (_place(r, now, a) < _place(r, now, b))
            ):
                return False
    return True


@inner
def _place(r: Relaxation, position: Ints, node: int) -> int:
    """The place of a node in an order of the calls: a move stands directly before its reader."""
    n = len(position)
    return 2 * position[node] if node < n else 2 * position[r.reader[node - n]] - 1


@inner
def _free_edges(r: Relaxation, choice: Ints, meet: Ints, moves: Floats, period: float) -> Floats:
    """[nodes, nodes] seconds less delays of the edges that hold in every order; nodes are calls, then moves."""
    n, n_moves = len(choice), len(moves)
    weight = np.full((n + n_moves, n + n_moves), -np.inf)
    for a in range(n):
        seconds = _seconds(r, choice, a)
        for b in range(n):
            if r.data[a, b]:
                weight[a, b] = seconds
                if _sends(r, choice, meet, a, b):
                    weight[a, b] += r.arrays.dispatch_s
            if r.ends[a] and r.begins[b]:
                behind = 0.0 if choice[a] == OPEN else save_s(r, a, choice[a])
                weight[a, b] = max(weight[a, b], seconds + behind - IN_FLIGHT * period)
        weight[a, a] = max(weight[a, a], _load(r, choice, moves, a) - period)
    for k in range(n_moves):
        trainer, reader = r.trainer[k], r.reader[k]
        before = _seconds(r, choice, trainer) - r.delay[k] * period
        weight[trainer, n + k] = before
        weight[n + k, reader] = moves[k, READER]
        weight[trainer, reader] = max(weight[trainer, reader], before + moves[k, BOTH])
        if moves[k, ALONE] > 0 and r.delay[k]:
            weight[n + k, trainer] = moves[k, TRAINER]
    return weight


@inner
def _sends(r: Relaxation, choice: Ints, meet: Ints, a: int, b: int) -> bool:
    """Whether data between two calls surely change ranks."""
    if choice[a] == OPEN or choice[b] == OPEN:
        return False
    where, other = r.arrays.options[choice[a]].where, r.arrays.options[choice[b]].where
    return meet[a, b] == APART or (where != OPEN and other != OPEN and where != other)


@inner
def _seconds(r: Relaxation, choice: Ints, call: int) -> float:
    return r.fastest[call] if choice[call] == OPEN else r.arrays.options[choice[call]].seconds


@inner
def _load(r: Relaxation, choice: Ints, moves: Floats, call: int) -> float:
    """Seconds of a call on its devices, with the fetch, save or release that stands beside it."""
    seconds = _seconds(r, choice, call) + _behind(r, choice, moves, call)
    return seconds + r.arrays.dispatch_s if call == r.source else seconds


@inner
def _behind(r: Relaxation, choice: Ints, moves: Floats, call: int) -> float:
    """Seconds of the save or release that follows a call on its devices."""
    if choice[call] == OPEN:
        return 0.0
    seconds = save_s(r, call, choice[call])
    for k in range(len(moves)):
        if r.reader[k] == call and r.alone[k] and moves[k, ALONE] > 0:
            seconds += r.arrays.dispatch_s
    return seconds


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
def _with_devices(
    r: Relaxation,
    free: Floats,
    related: Bools,
    choice: Ints,
    moves: Floats,
    position: Ints,
    period: float,
) -> Floats:
    """The free edges and, between nodes that share a device, those of an order."""
    n = len(choice)
    weight = free.copy()
    for a in range(len(related)):
        seconds = moves[a - n, ALONE] if a >= n else _seconds(r, choice, a) + _behind(r, choice, moves, a)
        for b in range(len(related)):
            if related[a, b]:
                if a >= n and b == r.reader[a - n]:
                    seconds = moves[a - n, READER]
                elif a >= n:
                    seconds = moves[a - n, TRAINER if b == r.trainer[a - n] else ALONE]
                if _place(r, position, a) < _place(r, position, b):
                    gain = seconds
                else:
                    gain = seconds - period + (r.arrays.dispatch_s if b == r.source else 0.0)
                if a < n:
                    gain += _before_reader(r, moves, b)
                weight[a, b] = max(weight[a, b], gain)
    return weight


@inner
def _before_reader(r: Relaxation, moves: Floats, node: int) -> float:
    """Seconds that a call takes on its devices beyond its least, with the move that may stand directly before it."""
    seconds = 0.0
    for k in range(len(moves)):
        if r.reader[k] == node and r.alone[k]:
            seconds += moves[k, READER]
    return seconds


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
