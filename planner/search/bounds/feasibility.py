"""Feasibility tests of partial choices.

Do the calls fit within a period, by what can run at the same time? Can the meshes be placed so that exactly the given
pairs share a device?
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

import numpy as np

from planner.search.bounds.concurrency_bound import PartialChoice, cover_s
from planner.search.bounds.relaxation import (
    ALONE,
    APART,
    BOTH,
    MEET,
    OPEN,
    Relaxation,
    placed,
    relation,
    seconds_of,
)
from planner.search.bounds.tree_order import Tree
from planner.search.compiled.compile import Floats, Ints, compiled, inner

SLACK = 1 + 1e-9  # a period that exceeds a threshold by less counts as equal
MOST_TRIES = 10_000  # positions that `can_be_arranged` tries; this takes a tenth of a millisecond


@inner
def covers(r: Relaxation, t: Tree, choice: Ints, meet: Ints, moves: Floats, threshold: float) -> bool:
    """Whether the concurrency bound (concurrency_bound.py) does not exceed the threshold, in seconds.

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
    return cover_s(t.cover, parts, r.n_devices) <= threshold * SLACK


@inner
def lies_as_said(r: Relaxation, choice: Ints, meet: Ints, call: int) -> bool:
    """Whether a placed call shares a device with exactly those placed calls with which `meet` says so.

    choice  [calls] int64 rows; meet  [calls, calls] int64: APART or MEET
    """
    o = r.arrays.options
    for other in range(len(choice)):
        there = choice[other]
        if placed(o, there) and relation(o, r.n_devices, choice[call], there) != meet[call, other]:
            return False
    return True


@compiled
def can_be_arranged(r: Relaxation, order: Ints, choice: Ints, meet: Ints) -> bool:
    """Whether the meshes of all calls can be placed as `meet` says; also true if MOST_TRIES do not decide it.

    order   [calls] int64: the order in which calls are placed
    choice  [calls] int64 rows, none of them OPEN
    meet    [calls, calls] int64: UNKNOWN, APART or MEET

    Backtracking: a call takes the next position of its group; if there is none, the call before it moves on. Calls
    that have a placement come first and stay where they are.
    """
    o, n = r.arrays.options, len(choice)
    call, size, first = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    spot, begin, end = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    n_placed = i = 0
    for with_place in (True, False):
        for c in order:
            row = choice[c]
            if placed(o, row) == with_place:
                while not with_place and o[row].strategy != OPEN:  # up from a kind to its group
                    row = r.above[row]
                call[i], size[i], first[i] = c, o[row].size, o[row].first
                if not with_place:
                    group = row - r.arrays.start[-1]  # rows behind the options are counted from 0
                    spot[i] = begin[i] = r.spots[group]
                    end[i] = r.spots[group + 1]
                i += 1
        n_placed = i if with_place else n_placed
    i, tries = n_placed, 0
    while n_placed <= i < n and tries < MOST_TRIES:
        tries += 1
        if spot[i] == end[i]:  # no position left: backtrack
            spot[i] = begin[i]
            i -= 1
            spot[i] += 1
            continue
        first[i] = r.spot[spot[i]]
        if _lies(i, first, size, call, meet):
            i += 1
        else:
            spot[i] += 1
    return i >= n_placed


@inner
def _lies(i: int, first: Ints, size: Ints, call: Ints, meet: Ints) -> bool:
    """Whether mesh i shares a device with exactly those meshes before it with which `meet` says so."""
    for j in range(i):
        shares = first[i] < first[j] + size[j] and first[j] < first[i] + size[i]
        if meet[call[i], call[j]] == (APART if shares else MEET):
            return False
    return True
