"""What a choice of options costs, compiled: the steady state of planner.plan.steady_state and the peaks of
planner.pricing.plans.

On devices that the same calls use, the same nodes run in the same order; and where the calls of one such class are
a part of another's, the other one's chain implies its own. So a few chains stand for all devices. What copies to
the devices of a class has a chain too, of the copies alone. Start times along chains are
planner/search/compiled/steady_period.py's, memory is planner/search/compiled/memory_peaks.py's, and what moves cost
planner/search/compiled/resharding_memo.py's.
"""

import numpy as np
from numpy.typing import NDArray

from planner.search.compiled.arrays import CALL, COPY, OFFLOAD, ONLOAD, REALLOCATE, SAVE, TRANSFER, Arrays
from planner.search.compiled.compile import compiled, inner
from planner.search.compiled.memory_peaks import excesses, surely_fits
from planner.search.compiled.resharding_memo import least_reallocation, reallocation, redistribution
from planner.search.compiled.steady_period import fastest_order

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@inner
def pattern(arrays: Arrays, rows: Ints) -> int:
    """The number of the pattern of equal sides and placements (planner.search.compiled.arrays) of some options by
    row."""
    options, number = arrays.options, 0
    for i in range(arrays.n_calls):
        side = 0
        while options[rows[side]].where != options[rows[i]].where:
            side += 1
        number = number * (i + 1) + side
        if arrays.trainer[i] < 0:
            continue
        alike, found, place = 0, False, 0  # calls of the role so far, whether one is placed alike, its number
        for j in range(i + 1):
            if arrays.role[j] == arrays.role[i]:
                if not found and options[rows[j]].place == options[rows[i]].place:
                    found, place = True, alike
                alike += 1
        number = number * alike + place
    return number


@inner
def durations(arrays: Arrays, made: int, rows: Ints, chains: Ints, out: Floats, exact: bool) -> None:
    """Seconds of every slot of a skeleton, 0 of idle ones. exact: else at least so many, without pricing any move."""
    options = arrays.options
    for i in range(len(out)):
        slot = arrays.skeletons.slots[made, i]
        here, there = int(rows[slot.call]), int(rows[slot.source])
        if not chains[i]:
            out[i] = 0.0
        elif slot.kind == CALL:
            out[i] = options[here].seconds
        elif slot.kind == SAVE:
            out[i] = options[here].save_s
        elif slot.kind == COPY:
            out[i] = options[here].copy_s
        else:
            out[i] = arrays.dispatch_s
            if slot.kind == TRANSFER and exact:
                out[i] += redistribution(arrays, slot.moved, options[there].where, options[here].where)
            elif slot.kind == REALLOCATE and exact:
                out[i] += reallocation(arrays, int(arrays.role[slot.call]), there, here)
            elif slot.kind == REALLOCATE:
                out[i] += least_reallocation(arrays, int(arrays.role[slot.call]), there, here)


@inner
def device_masks(arrays: Arrays, rows: Ints, out: Ints) -> int:
    """Writes the largest sets of calls that share a device (bit c: call c) to out; returns their number.

    The devices of a largest set begin where the mesh of one of its calls begins.
    """
    options, n = arrays.options, 0
    for i in range(len(rows)):
        first, mask = options[rows[i]].first, 0
        for j in range(len(rows)):
            other = options[rows[j]]
            if other.first <= first < other.first + other.size:
                mask |= 1 << j
        covered = False
        for k in range(n):
            covered = covered or mask & ~out[k] == 0
        if covered:
            continue
        kept = 0
        for k in range(n):
            if out[k] & ~mask:
                out[kept] = out[k]
                kept += 1
        out[kept] = mask
        n = kept + 1
    return n


@compiled
def value(arrays: Arrays, choice: Ints, limit: float) -> tuple[float, float, int]:
    """(steady-state seconds per iteration, missing bytes, order) of a choice: planner.search.compiled.tables.Value;
    with infinite seconds if they are not less than a limit."""
    return priced(arrays, choice, limit, False)


@inner
def priced(arrays: Arrays, choice: Ints, limit: float, endless: bool) -> tuple[float, float, int]:
    """`value`, or, if memory is endless, the same of every order.

    Moves are what takes time to price; so they are, only if their least seconds leave the choice below the limit.
    """
    n_calls, s = arrays.n_calls, arrays.skeletons
    rows = arrays.start[:n_calls] + choice
    made = s.of[pattern(arrays, rows)]
    masks, chains = np.empty(n_calls, np.int64), np.zeros(s.size[made], np.int64)
    n_masks = device_masks(arrays, rows, masks)
    n_chains = _chains(arrays, made, rows, masks, n_masks, chains)
    excess = np.zeros(s.order.shape[1])
    if not endless and not surely_fits(arrays, made, rows, chains, masks, n_masks):
        excess = excesses(arrays, made, rows, chains)
    best, order, seconds = np.inf, 0, np.empty(len(chains))
    for exact in range(0 if limit < np.inf else 1, 2):
        durations(arrays, made, rows, chains, seconds, exact == 1)
        best, order = fastest_order(arrays, made, seconds, chains, n_chains, excess, limit)
        if best == np.inf:
            break
    return best, excess.min(), order


@inner
def _chains(arrays: Arrays, made: int, rows: Ints, masks: Ints, n_masks: int, out: Ints) -> int:
    """Writes the chains that each slot is on (bit k: chain k) to out; returns their number.

    On none is an idle slot: it serves offloaded parameters, and the call's option has resident ones.
    Chain k orders the slots on devices of masks[k]; where there are several copies, chain n_masks + k orders those to
    these devices.
    """
    copies = 0
    for i in range(len(out)):
        slot = arrays.skeletons.slots[made, i]
        serves = slot.kind == ONLOAD or slot.kind == OFFLOAD or slot.kind == COPY
        if serves and rows[slot.call] < arrays.offloaded[slot.call]:
            continue
        copies += 1 if slot.kind == COPY else 0
        for k in range(n_masks):
            if slot.mask & masks[k]:
                out[i] |= 1 << (n_masks + k if slot.kind == COPY else k)
    return 2 * n_masks if copies > 1 else n_masks
