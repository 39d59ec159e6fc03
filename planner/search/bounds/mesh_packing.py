"""Whether meshes can lie to each other as a partial choice says: which share a device, and which do not."""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

import numpy as np
from numpy.typing import NDArray

from planner.search.bounds.relaxation import APART, MEET, OPEN, Relaxation, placed, relation
from planner.search.compiled.compile import compiled, inner

Ints = NDArray[np.int64]

MOST_TRIES = 10_000  # places that are tried; a tenth of a millisecond


@inner
def lies_as_said(r: Relaxation, choice: Ints, meet: Ints, call: int) -> bool:
    """Whether the mesh of a call with a place shares a device with those of the others with which it should."""
    o = r.arrays.options
    for other in range(len(choice)):
        there = choice[other]
        if placed(o, there) and relation(o, r.n_devices, choice[call], there) != meet[call, other]:
            return False
    return True


@compiled
def can_be_arranged(r: Relaxation, order: Ints, choice: Ints, meet: Ints) -> bool:
    """Whether the calls without a place have one each, so that all meshes lie to each other as they should; or
    whether that has not been found out in MOST_TRIES.

    order   [calls] in which calls are given places; where one finds none, the call before it takes another
    choice  [calls] rows, none of them OPEN; meet  [calls, calls] UNKNOWN, APART or MEET
    """
    o, n = r.arrays.options, len(choice)
    call, size, first = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    spot, begin, end = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    n_placed = i = 0
    for with_place in (True, False):
        for c in order:
            row = choice[c]
            if placed(o, row) == with_place:
                while not with_place and o[row].strategy != OPEN:
                    row = r.above[row]
                call[i], size[i], first[i] = c, o[row].size, o[row].first
                if not with_place:
                    group = row - r.arrays.start[-1]
                    spot[i] = begin[i] = r.spots[group]
                    end[i] = r.spots[group + 1]
                i += 1
        n_placed = i if with_place else n_placed
    i, tries = n_placed, 0
    while n_placed <= i < n and tries < MOST_TRIES:
        tries += 1
        if spot[i] == end[i]:
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
    """Whether mesh i shares a device with those before it with which it should."""
    for j in range(i):
        shares = first[i] < first[j] + size[j] and first[j] < first[i] + size[i]
        if meet[call[i], call[j]] == (APART if shares else MEET):
            return False
    return True
