"""What a choice of options costs, compiled: the steady state of planner.simulate and the peaks of planner.price.

Two facts make it fast. On devices that the same calls use, the same nodes run in the same order; and where
the calls of one such class are a part of another's, the other one's chain implies its own. So a few chains
stand for all devices. And an iteration's nodes ordered by the total order need few passes until their start
times settle under a given period: the period rises from cycle to cycle until none exceeds it. What copies to the
devices of a class has a chain too, of the copies alone.
"""

import numpy as np
from numpy.typing import NDArray

from planner.arrays import (
    CALL,
    COPY,
    OFFLOAD,
    ONLOAD,
    REALLOCATE,
    RELEASE,
    SAVE,
    TRANSFER,
    Arrays,
    Models,
)
from planner.compiled import compiled, inner
from planner.move_seconds import Parts, reallocation_s, redistribution_s
from planner.simulate import IN_FLIGHT

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ROUNDING = 1e-12  # relative; smaller gains are noise of floating-point sums

LISTED = 1024  # devices of both meshes up to which a reallocation is priced message by message

_HOSTS_APART = 1 << 22  # stands for the distance of meshes that share no host


@inner
def pattern(arrays: Arrays, rows: Ints) -> int:
    """The number of the pattern of equal sides and placements (planner.arrays) of some options by row."""
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
def redistribution(arrays: Arrays, moved: int, source: int, destination: int) -> float:
    """Seconds in which samples go from one side to another; moved: index into sample_bytes."""
    key = ((moved << 24) + source << 24) + destination
    slot = _slot(key, len(arrays.redistributions))
    known = arrays.redistributions[slot]
    if known.key != key:
        known.seconds = redistribution_s(
            arrays.sides[source],
            arrays.sides[destination],
            arrays.n_seqs,
            arrays.skeletons.sample_bytes[moved],
            arrays.links,
        )
        known.key = key
    return known.seconds


@inner
def _parts(models: Models, role: int) -> Parts:
    """The model of a role."""
    start = models.start
    return Parts(
        models.entries[start[role, 0] : start[role + 1, 0]],
        models.kinds[start[role, 1] : start[role + 1, 1]],
        models.layers[role],
        models.itemsize,
    )


@inner
def least_reallocation(arrays: Arrays, role: int, source: int, destination: int) -> float:
    """Seconds that a reallocation takes at least, by row (`least_move_s`)."""
    a, b, per_host = arrays.options[source], arrays.options[destination], arrays.links.per_host
    low = a.first // per_host * per_host
    high = -(-(a.first + a.size) // per_host) * per_host
    shared = max(0, min(a.first + a.size, b.first + b.size) - max(a.first, b.first))
    near = max(0, min(high, b.first + b.size) - max(low, b.first))
    return least_move_s(arrays, role, source, destination, shared, near)


@inner
def least_move_s(arrays: Arrays, role: int, source: int, destination: int, shared: int, near: int) -> float:
    """Seconds that a role's move takes at least between two options' strategies.

    shared  devices of both meshes; near  devices of the destination's on hosts of the source's
    A device receives the layers that it does not hold, and through the slower link those that no stage of the
    source on its host holds; and what all receive is sent by the source's devices. Embedding and head are left out.
    """
    a, b, links = arrays.options[source], arrays.options[destination], arrays.links
    layers, layer = arrays.models.layers[role], arrays.models.layer_bytes[role]
    held = min(a.layers, b.layers) * min(a.layer, b.layer)
    fastest, between_hosts = links.least_per_byte_s[0 if near else 1], links.least_per_byte_s[1]
    received = b.layers * b.layer - (held if shared else 0.0)
    on_host = _stages_per_host(a.dp * a.tp, a.pp, links.per_host) * a.layers
    far = max(0, b.layers - on_host) * b.layer
    most = max(far * between_hosts + (received - far) * fastest, 0.0)
    most = max(most, max(0.0, b.dp * layers * layer - shared * held) / a.size * fastest)
    if b.tp <= links.per_host:
        stage = layers // b.pp
        groups = near // b.tp * max(0, stage - on_host) + (b.size - near) // b.tp * stage
        most = max(most, groups * layer / a.size * between_hosts)
        if near < b.size:
            most = max(most, stage * layer / b.tp * between_hosts)
    return most


@inner
def _stages_per_host(width: int, pp: int, per_host: int) -> int:
    """The most stages of a placement that have devices on one host; width: devices of a stage."""
    if width % per_host == 0:
        return 1
    if per_host % width == 0:
        return min(pp, per_host // width)
    return min(pp, per_host // width + 2)


@inner
def reallocation(arrays: Arrays, role: int, source: int, destination: int) -> float:
    """Seconds in which a role's parameters go from one option's placement to another's, by row.

    Where the meshes share no host, the price is the same wherever they are; else it depends on the distance of
    their first devices alone. (The classes along a mesh are part of its strategy's number.) Of very large meshes it
    is the least seconds: listing the messages would take too long.
    """
    a, b, per_host = arrays.options[source], arrays.options[destination], arrays.links.per_host
    if a.size + b.size > LISTED:
        return least_reallocation(arrays, role, source, destination)
    apart = (
        a.first // per_host > (b.first + b.size - 1) // per_host
        or b.first // per_host > (a.first + a.size - 1) // per_host
    )
    distance = _HOSTS_APART if apart else b.first - a.first
    key = (((role << 18) + a.strategy << 18) + b.strategy << 24) + distance + _HOSTS_APART
    known = arrays.reallocations[_slot(key, len(arrays.reallocations))]
    if known.key != key:
        known.seconds = reallocation_s(
            _parts(arrays.models, role),
            np.array([a.first, a.dp, a.tp, a.pp]),
            np.array([b.first, b.dp, b.tp, b.pp]),
            arrays.links,
        )
        known.key = key
    return known.seconds


@inner
def _slot(key: int, slots: int) -> int:
    """Where a memory keeps a key (multiplicative hashing by the golden ratio)."""
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    return int(mixed) % slots


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
    """(steady-state seconds per iteration, missing bytes, order) of a choice: planner.tables.Value; with infinite
    seconds if they are not less than a limit."""
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
    if not endless and not _surely_fits(arrays, made, rows, chains, masks, n_masks):
        excess = excesses(arrays, made, rows, chains)
    best, best_order, seconds = np.inf, 0, np.empty(len(chains))
    for exact in range(0 if limit < np.inf else 1, 2):
        durations(arrays, made, rows, chains, seconds, exact == 1)
        best, best_order = _best_order(arrays, made, seconds, chains, n_chains, excess, limit)
        if best == np.inf:
            break
    return best, excess.min(), best_order


@inner
def always_fits(arrays: Arrays, choice: Ints) -> bool:
    """Whether a choice fits memory in every order."""
    rows = arrays.start[: arrays.n_calls] + choice
    made, masks = arrays.skeletons.of[pattern(arrays, rows)], np.empty(len(rows), np.int64)
    n_masks = device_masks(arrays, rows, masks)
    chains = np.zeros(arrays.skeletons.size[made], np.int64)
    _chains(arrays, made, rows, masks, n_masks, chains)
    if _surely_fits(arrays, made, rows, chains, masks, n_masks):
        return True
    return excesses(arrays, made, rows, chains).max() <= 0


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
def _best_order(
    arrays: Arrays, made: int, seconds: Floats, chains: Ints, n_chains: int, excess: Floats, limit: float
) -> tuple[float, int]:
    """(seconds, order) of the fastest of the orders of least excess; infinite if none is below the limit."""
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
        time_s = period(arrays, made, order, seconds, chains, n_chains, lower, min(found, limit))
        if time_s < found:
            found, found_order = time_s, order
            if found <= lower * (1 + ROUNDING):
                break
    return found, found_order


@inner
def period(
    arrays: Arrays,
    made: int,
    order: int,
    seconds: Floats,
    chains: Ints,
    n_chains: int,
    lower: float,
    limit: float,
) -> float:
    """The steady state of a skeleton in an order: its maximum cycle ratio (planner.simulate); infinity if that is
    not less than limit.

    seconds, chains  of the slots; bit k of chains: the slot is on chain k
    lower            a lower bound of the result, e.g. the load of a device
    """
    if limit < np.inf:
        target = limit * (1 - ROUNDING)
        if (
            target <= lower
            or _settle(arrays, made, order, seconds, chains, n_chains, target, target) > target
        ):
            return np.inf
    return _settle(arrays, made, order, seconds, chains, n_chains, lower, np.inf)


@inner
def _settle(
    arrays: Arrays,
    made: int,
    order: int,
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
    s, n = arrays.skeletons, arrays.skeletons.size[made]
    total = seconds.sum()
    slack = ROUNDING * total
    now = lower
    end = np.zeros(n)
    for i in range(n):
        end[i] = seconds[i]
    because, delay = np.full(n, -1), np.zeros(n, np.int64)
    last, last_slot = np.full(n_chains, -np.inf), np.full(n_chains, -1)
    final = -np.inf
    final_slot = -1
    while True:
        changed = False
        for k in range(n_chains):
            last[k] -= now
        wrapped = (1 << n_chains) - 1  # chains whose last slot is still of the iteration before
        final -= IN_FLIGHT * now
        following, following_slot = -np.inf, -1
        for j in range(n):
            i = s.order[made, order, j]
            if not chains[i]:
                continue  # idle: it ends at 0 and holds nobody up
            start = end[i] - seconds[i]
            earliest = start + slack
            why, late = -1, 0
            for e in range(s.after.shape[2]):
                a = s.after[made, i, e]
                if a < 0:
                    break
                if end[a] > earliest:
                    earliest, why, late = end[a], a, 0
            for e in range(s.across.shape[2]):
                a = s.across[made, i, e]
                if a < 0:
                    break
                if end[a] - now > earliest:
                    earliest, why, late = end[a] - now, a, 1
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
            for i in range(n):
                because[i] = -1


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


# Memory


@inner
def _counts(arrays: Arrays, rows: Ints, call: int) -> bool:
    """Whether a call's resident bytes are its own: of a frozen role's calls at one placement the first has them."""
    if arrays.trainer[call] >= 0:
        return True
    for other in range(call):
        alike = arrays.options[rows[other]].place == arrays.options[rows[call]].place
        if alike and arrays.role[other] == arrays.role[call]:
            return False
    return True


@inner
def _surely_fits(arrays: Arrays, made: int, rows: Ints, chains: Ints, masks: Ints, n_masks: int) -> bool:
    """Whether every device has room for the largest stages, all copies and the largest call at once."""
    for k in range(n_masks):
        held, active = 0.0, 0.0
        for c in range(len(rows)):
            if masks[k] >> c & 1:
                if _counts(arrays, rows, c):
                    held += arrays.options[rows[c]].resident
                active = max(active, arrays.options[rows[c]].active)
        for i in range(arrays.skeletons.size[made]):
            slot = arrays.skeletons.slots[made, i]
            brings = slot.kind == REALLOCATE or (slot.kind == ONLOAD and chains[i] > 0)
            if brings and masks[k] >> slot.call & 1:
                held += arrays.options[rows[slot.call]].copy
        if held + active > arrays.memory_bytes:
            return False
    return True


@inner
def excesses(arrays: Arrays, made: int, rows: Ints, chains: Ints) -> Floats:
    """Missing bytes of the fullest device, order by order.

    Memory changes along the devices only where a stage begins or a mesh ends, and at the end it only shrinks; what
    there is of it changes only from class to class: the first devices of all stages and of all runs of a class
    stand for all.
    """
    worst = np.zeros(arrays.skeletons.order.shape[1])
    stage = np.empty(len(rows), np.int64)
    for c in range(len(rows)):
        option = arrays.options[rows[c]]
        for p in range(option.pp):
            _note_excess(arrays, made, rows, chains, option.first + p * option.dp * option.tp, stage, worst)
    for run in range(1, len(arrays.memories)):
        _note_excess(arrays, made, rows, chains, arrays.memories[run].first, stage, worst)
    return worst


@inner
def _note_excess(
    arrays: Arrays, made: int, rows: Ints, chains: Ints, device: int, stage: Ints, worst: Floats
) -> None:
    """Raises the missing bytes in each order to those of a device. stage: room for the rows of its stages."""
    there = memory_of(arrays, device)
    resident, most = _stages_on(arrays, made, rows, chains, device, stage)
    if most > there:
        for order in range(len(worst)):
            worst[order] = max(worst[order], _peak(arrays, made, order, chains, stage, resident) - there)


@inner
def memory_of(arrays: Arrays, device: int) -> float:
    """Bytes of memory of a device."""
    run = 0
    while run + 1 < len(arrays.memories) and arrays.memories[run + 1].first <= device:
        run += 1
    return arrays.memories[run].bytes


@inner
def _stages_on(
    arrays: Arrays, made: int, rows: Ints, chains: Ints, device: int, stage: Ints
) -> tuple[float, float]:
    """Writes the row of each call's stage on a device, -1 off its mesh.

    Returns the bytes that are resident there, and a bound of its peak: these, all copies, and the largest call.
    """
    resident, copies, active = 0.0, 0.0, 0.0
    for c in range(len(rows)):
        option = arrays.options[rows[c]]
        stage[c] = -1
        if option.first <= device < option.first + option.size:
            stage[c] = option.stage + (device - option.first) // (option.dp * option.tp)
            active = max(active, arrays.stages[stage[c]].active)
            if _counts(arrays, rows, c):
                resident += arrays.stages[stage[c]].resident
    for i in range(arrays.skeletons.size[made]):
        slot = arrays.skeletons.slots[made, i]
        brings = slot.kind == REALLOCATE or (slot.kind == ONLOAD and chains[i] > 0)
        if brings and stage[slot.call] >= 0:
            copies += arrays.stages[stage[slot.call]].copy
    return resident, resident + copies + active


@inner
def _peak(arrays: Arrays, made: int, order: int, chains: Ints, stage: Ints, resident: float) -> float:
    """The most that a device holds in an order. stage: row of each call's stage there, -1 off its mesh."""
    held, peak = resident, 0.0
    for j in range(arrays.skeletons.size[made]):
        i = arrays.skeletons.order[made, order, j]
        slot = arrays.skeletons.slots[made, i]
        at = stage[slot.call]
        if at < 0 or not chains[i]:
            continue
        if slot.kind == REALLOCATE or slot.kind == ONLOAD:
            held += arrays.stages[at].copy
            peak = max(peak, held)
        elif slot.kind == RELEASE or slot.kind == OFFLOAD:
            held -= arrays.stages[at].copy
        elif slot.kind == CALL:
            peak = max(peak, held + arrays.stages[at].active)
    return peak
