"""The price of a choice of options, compiled: the steady state of planner.plan.steady_state and the memory peaks of
planner.pricing.plans.

A device runs its nodes one after another, in the total order: they form a chain. Devices used by the same calls have
the same chain. If a device's calls are a subset of another device's calls, the other device's chain implies its own.
So a few chains stand for all devices. The copies to the same devices form a chain of their own, if there are several
copies. Memory is in memory_peaks.py. Moves between two options, given by row of Arrays.options, are priced by the
formulas of planner/pricing/resharding.py, or bounded from below.

The period is found by a rising sequence of lower bounds (`_settle`). Passes over the slots in the total order compute
start times under the current period. If a cycle is longer than the period allows, the period rises to that cycle's
ratio. It ends when the start times settle.
"""

import numpy as np
from numba.extending import register_jitable

from prefect_rlhf.planner.pricing import resharding
from prefect_rlhf.planner.pricing.resharding import Heads, HeldModel, Wires
from prefect_rlhf.planner.search.compiled.arrays import (
    CALL,
    COPY,
    EVALUATE,
    OFFLOAD,
    ONLOAD,
    REALLOCATE,
    SAVE,
    SYNC,
    TRANSFER,
    Arrays,
)
from prefect_rlhf.planner.search.compiled.compile import Floats, Ints, compiled, inner
from prefect_rlhf.planner.search.compiled.memory_peaks import excesses, host_excess
from prefect_rlhf.rlhf_tasks.spec import IN_FLIGHT

register_jitable(resharding.kept_slices)  # which `reallocation` calls
_reallocation, _redistribution = inner(resharding.reallocation), inner(resharding.redistribution)


@inner
def _wires(arrays: Arrays, source: int, destination: int) -> Wires:
    """The slowest links of two meshes."""
    a = arrays.wires[arrays.options[source].classes]
    b = arrays.wires[arrays.options[destination].classes]
    return Wires(max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3]))


@inner
def _held(arrays: Arrays, row: int) -> HeldModel:
    option = arrays.options[row]
    return HeldModel(option.first, option.dp, option.tp, option.pp, option.layer, option.shares)


@inner
def _heads(arrays: Arrays, row: int) -> Heads:
    side = arrays.sides[arrays.options[row].where]
    return Heads(side[0], side[1], side[2])


@inner
def reallocation_s(arrays: Arrays, role: int, source: int, destination: int) -> float:
    """Seconds in which a role's parameters move from one option to another, dispatch and overhead included."""
    held, wanted = _held(arrays, source), _held(arrays, destination)
    layers, wires = arrays.layers[role], _wires(arrays, source, destination)
    return arrays.overhead_s[role] + _reallocation(layers, held, wanted, arrays.per_host, wires)[0]


@inner
def transfer_s(arrays: Arrays, moved: int, source: int, destination: int) -> float:
    """Seconds in which samples move from one option to another, dispatch and overhead included.

    moved  index into Templates.transfers
    """
    transfer, wires = arrays.templates.transfers[moved], _wires(arrays, source, destination)
    held, wanted = _heads(arrays, source), _heads(arrays, destination)
    return transfer.overhead_s + _redistribution(held, wanted, transfer.bytes, arrays.per_host, wires)[0]


@inner
def least_reallocation_s(
    arrays: Arrays, role: int, source: int, destination: int, shared: int, near: int
) -> float:
    """A lower bound on `reallocation_s` between all options like two given ones, wherever their meshes are.

    shared  the most devices that can be in both meshes
    near    the most devices of the destination that can be on hosts of the source

    Some device has the destination's largest stage. If it is in both meshes, it keeps no more than the smaller number
    of layers, and of these the smaller slice. No host has more layers of the source than those of all stages that can
    be on it; the others come from other hosts.
    """
    a, b, layers = arrays.options[source], arrays.options[destination], arrays.layers[role]
    wires = _wires(arrays, source, destination)
    between_byte_s = wires.between_byte_s
    inside_byte_s = min(wires.inside_byte_s, between_byte_s)
    kept_bytes = min(a.layers, b.layers) * min(a.layer, b.layer) if shared else 0.0
    on_host = _stages_per_host(a.dp * a.tp, a.pp, arrays.per_host) * a.layers if near else 0
    far_bytes = max(0, b.layers - on_host) * b.layer
    near_bytes = max(b.layers * b.layer - far_bytes - kept_bytes, 0.0)
    busiest_s = far_bytes * between_byte_s + near_bytes * inside_byte_s
    stage = layers // b.pp  # layers of the destination's smallest stage
    if near < b.size:
        busiest_s = max(busiest_s, stage * b.layer * between_byte_s)
    crossing = near * max(0, stage - on_host) + (b.size - near) * stage  # layers x devices
    moved_bytes = b.dp * b.tp * layers * b.layer - shared * kept_bytes
    total_s = crossing * b.layer * (between_byte_s - inside_byte_s) + moved_bytes * inside_byte_s
    return arrays.overhead_s[role] + max(busiest_s, total_s / a.size)


@inner
def _stages_per_host(width: int, pp: int, per_host: int) -> int:
    """The most stages of a placement that have devices on one host. width: devices of a stage."""
    if width % per_host == 0:
        return 1
    if per_host % width == 0:
        return min(pp, per_host // width)
    return min(pp, per_host // width + 2)  # whole stages, and a part of one at both ends


ROUNDING = 1e-12  # relative; smaller gains are noise of floating-point sums


@inner
def pattern(arrays: Arrays, rows: Ints) -> int:
    """The number of the pattern (planner.search.compiled.arrays) of a choice.

    rows  [calls] int64 rows of options
    """
    options, number = arrays.options, 0
    for i in range(arrays.n_calls):
        side = 0
        while options[rows[side]].where != options[rows[i]].where:
            side += 1
        number = number * (i + 1) + side  # call i has i + 1 candidates for its side (`radices`)
        if arrays.trainer[i] < 0:
            continue
        # alike: calls of the role up to i, the radix; place: index among these of the first with an equal placement
        alike, found, place = 0, False, 0
        for j in range(i + 1):
            if arrays.role[j] == arrays.role[i]:
                if not found and options[rows[j]].place == options[rows[i]].place:
                    found, place = True, alike
                alike += 1
        number = number * alike + place
    return number


@inner
def durations(arrays: Arrays, template: int, rows: Ints, chains: Ints, out: Floats) -> None:
    """Writes the seconds of every slot of a template to out, [slots] float64; 0 for idle ones.

    template  number of the plan template
    rows      [calls] int64 rows of options
    chains    [slots] int64 chains of each slot (`_chains`)
    """
    options = arrays.options
    for i in range(len(out)):
        slot = arrays.templates.slots[template, i]
        here, there = int(rows[slot.call]), int(rows[slot.source])
        if not chains[i]:
            out[i] = 0.0
        elif slot.kind == CALL:
            out[i] = options[here].seconds / arrays.chunks[slot.call]
        elif slot.kind == SAVE:
            out[i] = options[here].save_s
        elif slot.kind == EVALUATE:
            out[i] = options[here].evaluate_s
        elif slot.kind == COPY:
            out[i] = options[here].copy_s
        elif slot.kind == OFFLOAD and arrays.trainer[slot.call] == slot.call:
            # What has trained goes back to host memory first.
            out[i] = options[here].copy_s + arrays.dispatch_s
        elif slot.kind == REALLOCATE or slot.kind == SYNC:
            out[i] = reallocation_s(arrays, int(arrays.role[slot.call]), there, here)
            if slot.kind == SYNC:
                out[i] = arrays.dispatch_s + (out[i] - arrays.dispatch_s) * arrays.sync_share
        elif slot.kind == TRANSFER:
            out[i] = transfer_s(arrays, slot.moved, there, here)
        else:
            out[i] = arrays.dispatch_s


@inner
def device_masks(arrays: Arrays, rows: Ints, out: Ints) -> int:
    """Writes the maximal sets of calls that share a device to out, [calls] int64; returns their number.

    Bit c of a set stands for call c.

    Every maximal set is found on the first device of one of its meshes, so only these devices are looked at.
    """
    options, n = arrays.options, 0
    for i in range(len(rows)):
        first, mask = options[rows[i]].first, 0
        for j in range(len(rows)):
            other = options[rows[j]]
            if other.first <= first < other.first + other.size:
                mask |= 1 << j
        covered = False  # is the set a subset of one found before?
        for k in range(n):
            covered = covered or mask & ~out[k] == 0
        if covered:
            continue
        kept = 0  # remove the sets found before that are subsets of this one
        for k in range(n):
            if out[k] & ~mask:
                out[kept] = out[k]
                kept += 1
        out[kept] = mask
        n = kept + 1
    return n


@compiled
def value(arrays: Arrays, choice: Ints, limit: float) -> tuple[float, float, int]:
    """(steady-state seconds per iteration, missing bytes, order) of a choice: planner.search.compiled.tables.Value.

    choice  [calls] int64 option numbers
    limit   seconds; if the choice does not take less, its seconds are infinite
    """
    return priced(arrays, choice, limit, False)


@inner
def priced(arrays: Arrays, choice: Ints, limit: float, endless: bool) -> tuple[float, float, int]:
    """`value` with a limit in seconds; if `endless`, memory is unlimited, so that every order is allowed."""
    n_calls, s = arrays.n_calls, arrays.templates
    rows = arrays.start[:n_calls] + choice
    template = s.of[pattern(arrays, rows)]
    masks, chains = np.empty(n_calls, np.int64), np.zeros(s.size[template], np.int64)
    n_masks = device_masks(arrays, rows, masks)
    n_chains = _chains(arrays, template, rows, masks, n_masks, chains)
    excess = np.zeros(s.order.shape[1])
    if not endless:
        excess = np.maximum(
            excesses(arrays, template, rows, chains), host_excess(arrays, template, rows, chains)
        )
    seconds = np.empty(len(chains))
    durations(arrays, template, rows, chains, seconds)
    best, order = fastest_order(arrays, template, seconds, chains, n_chains, excess, limit)
    return best, excess.min(), order


@inner
def _chains(arrays: Arrays, template: int, rows: Ints, masks: Ints, n_masks: int, out: Ints) -> int:
    """Writes the chains of each slot to out ([slots] int64, bit k: chain k); returns the number of chains.

    Chain k has the slots on the devices of masks[k]. If there are several copies, chain n_masks + k has the copies to
    these devices. An idle slot is on no chain: it serves parameters that come and go, but in this choice they stay.
    """
    copies = 0
    for i in range(len(out)):
        slot = arrays.templates.slots[template, i]
        serves = slot.kind == ONLOAD or slot.kind == OFFLOAD or slot.kind == COPY
        if serves and not _comes_and_goes(arrays, rows, masks, n_masks, int(slot.call)):
            continue
        copies += 1 if slot.kind == COPY else 0
        for k in range(n_masks):
            if slot.mask & masks[k]:
                out[i] |= 1 << (n_masks + k if slot.kind == COPY else k)
    return 2 * n_masks if copies > 1 else n_masks


@inner
def _comes_and_goes(arrays: Arrays, rows: Ints, masks: Ints, n_masks: int, call: int) -> bool:
    """Whether a call has an onload: its option has one, and another call may use one of its devices meanwhile."""
    for k in range(n_masks):
        if masks[k] >> call & 1 and masks[k] & arrays.while_idle[call]:
            return arrays.options[rows[call]].onloaded > 0
    return False


@inner
def fastest_order(
    arrays: Arrays, template: int, seconds: Floats, chains: Ints, n_chains: int, excess: Floats, limit: float
) -> tuple[float, int]:
    """(seconds per iteration, order) of the fastest order of least excess; infinite if not below the limit.

    seconds, chains  [slots] of each slot; excess: [orders] missing bytes
    """
    s = arrays.templates
    orders, after, across = s.order[template, :, : len(seconds)], s.after[template], s.across[template]
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
    """Seconds per iteration of a template in an order, or infinity if these are not below `limit`.

    They are the maximum cycle ratio (planner.plan.steady_state).

    order            [slots] int64: the slots in the total order
    after, across    [slots, most] int64: slots that must have finished, of the same and of the previous iteration;
                     padded with -1
    seconds, chains  [slots] of each slot; bit k of chains: the slot is on chain k
    lower            a lower bound on the result, e.g. the load of a device
    """
    if limit < np.inf:
        # First a cheap test: does any cycle exceed the limit?
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
    """The least period, from `lower` on, under which start times settle; infinity as soon as it exceeds `limit`.

    Longest paths with edge weights seconds - delay x period, by repeated passes in the total order (Bellman-Ford).
    `because` holds the slot that delays each slot most. A cycle of these has a larger ratio than the period, which
    then takes that ratio. Parameters are as in `_period`.
    """
    n = len(seconds)
    slack = ROUNDING * seconds.sum()
    now = lower
    end = seconds.copy()
    # end: relative to t * period in iteration t; because, delay: each slot's latest predecessor, and the edge's delay
    because, delay = np.full(n, -1), np.zeros(n, np.int64)
    last, last_slot = np.full(n_chains, -np.inf), np.full(n_chains, -1)
    final, final_slot = -np.inf, -1
    while True:
        changed = False
        # A pass begins with the ends of the previous pass, which are those of the iteration before: a period earlier.
        for k in range(n_chains):
            last[k] -= now
        wrapped = (1 << n_chains) - 1  # chains whose last slot is still of the iteration before
        final -= IN_FLIGHT * now  # the end of the iteration that must be over
        following, following_slot = -np.inf, -1
        for i in order:
            if not chains[i]:
                continue  # idle: it ends at 0 and delays no other slot
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
        if not changed and final_slot >= 0:  # the first pass does not know the end of the iteration yet
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
    """The largest ratio of seconds to delays over the cycles of `because`; 0 if there is none.

    because  [slots] int64: predecessor of each slot, or -1; delay: [slots] int64 iterations of that edge
    """
    n, best = len(because), 0.0
    seen = np.full(n, -1)  # the start from which a slot was reached first
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
