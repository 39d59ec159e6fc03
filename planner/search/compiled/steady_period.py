"""The steady state of a skeleton's slots, compiled: the least period under which start times settle.

An iteration's slots ordered by the total order need few passes until their start times settle under a given period:
the period rises from cycle to cycle until none exceeds it.
"""

import numpy as np
from numpy.typing import NDArray

from planner.plan.steady_state import IN_FLIGHT
from planner.search.compiled.arrays import Arrays
from planner.search.compiled.compile import inner

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ROUNDING = 1e-12  # relative; smaller gains are noise of floating-point sums


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
