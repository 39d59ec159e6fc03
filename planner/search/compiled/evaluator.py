"""What a choice of options costs, compiled: the steady state of planner.plan.steady_state and the peaks of
planner.pricing.plans.

On devices that the same calls use, the same nodes run in the same order; and where the calls of one such class are
a part of another's, the other one's chain implies its own. So a few chains stand for all devices. What copies to
the devices of a class has a chain too, of the copies alone. Memory is planner/search/compiled/memory_peaks.py's, and
what moves cost planner/search/compiled/resharding_memo.py's.

An iteration's slots ordered by the total order need few passes until their start times settle under a given period:
the period rises from cycle to cycle until none exceeds it.
"""

import numpy as np
from numpy.typing import NDArray

from planner.plan.steady_state import IN_FLIGHT
from planner.search.compiled.arrays import CALL, COPY, OFFLOAD, ONLOAD, REALLOCATE, SAVE, TRANSFER, Arrays
from planner.search.compiled.compile import compiled, inner
from planner.search.compiled.memory_peaks import excesses, surely_fits
from planner.search.compiled.resharding_memo import least_reallocation, reallocation, redistribution

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ROUNDING = 1e-12  # relative; smaller gains are noise of floating-point sums


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
    options, known = arrays.options, arrays.known
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
                out[i] += redistribution(arrays, known, slot.moved, options[there].where, options[here].where)
            elif slot.kind == REALLOCATE and exact:
                out[i] += reallocation(arrays, known, int(arrays.role[slot.call]), there, here)
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


@inner
def fastest_order(
    arrays: Arrays, made: int, seconds: Floats, chains: Ints, n_chains: int, excess: Floats, limit: float
) -> tuple[float, int]:
    """(seconds, order) of the fastest of the orders of least excess; infinite if none is below the limit."""
    s = arrays.skeletons
    orders, after, across = s.order[made, :, : len(seconds)], s.after[made], s.across[made]
    load = np.zeros(n_chains)
    for i in range(len(seconds)):
        for k in range(n_chains):
            if chains[i] >> k & 1:
                load[k] += seconds[i]
    lower = load.max()
    found, found_order = np.inf, 0
    if lower >= limit:
        return found, found_order
    least = excess.min()
    for order in range(len(excess)):
        if excess[order] > least:
            continue
        time_s = _period(orders[order], after, across, seconds, chains, n_chains, lower, min(found, limit))
        if time_s < found:
            found, found_order = time_s, order
            if found <= lower * (1 + ROUNDING):
                break
    return found, found_order


@inner
def _period(
    order: Ints,
    after: Ints,
    across: Ints,
    seconds: Floats,
    chains: Ints,
    n_chains: int,
    lower: float,
    limit: float,
) -> float:
    """The steady state of a skeleton in an order: its maximum cycle ratio (planner.plan.steady_state); infinity if
    that is not less than limit.

    order            [slots] the slots in the total order
    after, across    [slots, most] slots that must have finished, in the same iteration and in the one before, -1
                     behind the last
    seconds, chains  of the slots; bit k of chains: the slot is on chain k
    lower            a lower bound of the result, e.g. the load of a device
    """
    if limit < np.inf:
        target = limit * (1 - ROUNDING)
        if (
            target <= lower
            or _settle(order, after, across, seconds, chains, n_chains, target, target) > target
        ):
            return np.inf
    return _settle(order, after, across, seconds, chains, n_chains, lower, np.inf)


@inner
def _settle(
    order: Ints,
    after: Ints,
    across: Ints,
    seconds: Floats,
    chains: Ints,
    n_chains: int,
    lower: float,
    limit: float,
) -> float:
    """The least period, from `lower` on, under which start times settle; as soon as it exceeds limit, infinity.

    Longest paths of weight seconds - delay * period by repeated passes in the total order; a cycle among the
    slots that hold each other up has a larger ratio than the period, which then takes that ratio.
    """
    n = len(seconds)
    slack = ROUNDING * seconds.sum()
    now = lower
    end = seconds.copy()
    because, delay = np.full(n, -1), np.zeros(n, np.int64)
    last, last_slot = np.full(n_chains, -np.inf), np.full(n_chains, -1)
    final, final_slot = -np.inf, -1
    while True:
        changed = False
        for k in range(n_chains):
            last[k] -= now
        wrapped = (1 << n_chains) - 1  # chains whose last slot is still of the iteration before
        final -= IN_FLIGHT * now
        following, following_slot = -np.inf, -1
        for i in order:
            if not chains[i]:
                continue  # idle: it ends at 0 and holds nobody up
            earliest, why, late = end[i] - seconds[i] + slack, -1, 0
            for delayed in range(2):
                for a in across[i] if delayed else after[i]:
                    if a < 0:
                        break
                    if end[a] - delayed * now > earliest:
                        earliest, why, late = end[a] - delayed * now, a, delayed
            for k in range(n_chains):
                if chains[i] >> k & 1 and last[k] > earliest:
                    earliest, why, late = last[k], last_slot[k], wrapped >> k & 1
            if final > earliest:
                earliest, why, late = final, final_slot, IN_FLIGHT
            if why >= 0:
                end[i] = earliest + seconds[i]
                because[i], delay[i], changed = why, late, True
            for k in range(n_chains):
                if chains[i] >> k & 1:
                    last[k], last_slot[k] = end[i], i
                    wrapped &= ~(1 << k)
            if end[i] > following:
                following, following_slot = end[i], i
        if not changed and final_slot >= 0:
            return now
        final, final_slot = following, following_slot
        ratio = _cycle_ratio(because, delay, seconds)
        if ratio > now:
            if ratio > limit:
                return np.inf
            now = ratio
            because[:] = -1


@inner
def _cycle_ratio(because: Ints, delay: Ints, seconds: Floats) -> float:
    """The largest sum of seconds over sum of delays of the cycles that `because` closes; 0 if there are none."""
    n, best = len(because), 0.0
    seen = np.full(n, -1)
    for start in range(n):
        node = start
        while node >= 0 and seen[node] < 0:
            seen[node] = start
            node = because[node]
        if node < 0 or seen[node] != start:
            continue
        spent, delays, root = seconds[node], delay[node], node
        node = because[node]
        while node != root:
            spent += seconds[node]
            delays += delay[node]
            node = because[node]
        if delays:
            best = max(best, spent / delays)
    return best
