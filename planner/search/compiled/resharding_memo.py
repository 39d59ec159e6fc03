"""Seconds of moves between two options: exact ones with a cache, and lower bounds."""

import numpy as np

from planner.search.compiled.arrays import Arrays, KnownPrices, Models
from planner.search.compiled.compile import inner
from planner.search.compiled.resharding_pieces import Parts
from planner.search.compiled.resharding_seconds import reallocation_s, redistribution_s

LISTED = 1024  # with more devices in both meshes together, a reallocation is not priced message by message

_HOSTS_APART = 1 << 22  # stands for the distance of meshes without a common host; exceeds any other


@inner
def redistribution(arrays: Arrays, known: KnownPrices, moved: int, source: int, destination: int) -> float:
    """Seconds in which samples move from one side to another, from `known` or put there.

    moved                index into Skeletons.group_bytes
    source, destination  rows of Arrays.sides
    """
    # `+` binds tighter than `<<`: 24 bits each for both sides, the bits above for `moved`.
    key = ((moved << 24) + source << 24) + destination
    price = known.redistributions[_slot(key, len(known.redistributions))]
    if price.key != key:
        price.seconds = redistribution_s(
            arrays.sides[source],
            arrays.sides[destination],
            arrays.n_groups,
            arrays.skeletons.group_bytes[moved],
            arrays.links,
        )
        price.key = key
    return price.seconds


@inner
def _parts(models: Models, role: int) -> Parts:
    """A role's slice of the table of all models."""
    start = models.start
    return Parts(
        models.entries[start[role, 0] : start[role + 1, 0]],
        models.kinds[start[role, 1] : start[role + 1, 1]],
        models.layers[role],
        models.itemsize,
    )


@inner
def least_reallocation(arrays: Arrays, role: int, source: int, destination: int) -> float:
    """A lower bound on the seconds of a reallocation between two options, given by row (`least_move_s`)."""
    a, b, per_host = arrays.options[source], arrays.options[destination], arrays.links.per_host
    # low .. high - 1: the devices of all hosts that the source has devices on.
    low = a.first // per_host * per_host
    high = -(-(a.first + a.size) // per_host) * per_host
    shared = max(0, min(a.first + a.size, b.first + b.size) - max(a.first, b.first))
    near = max(0, min(high, b.first + b.size) - max(low, b.first))
    return least_move_s(arrays, role, source, destination, shared, near)


@inner
def least_move_s(arrays: Arrays, role: int, source: int, destination: int, shared: int, near: int) -> float:
    """A lower bound on the seconds of a role's move between two options' strategies, given by row.

    shared  number of devices in both meshes
    near    number of devices of the destination on hosts of the source

    It is the largest of four bounds, which count layers but neither embedding nor head:
    - A device receives the layers that it does not hold, those that are not on its host over the slower link.
    - The source's devices send all bytes that the destination's devices receive.
    - The source's devices send all bytes that tp groups receive from other hosts.
    - A device on a host without the source's devices receives all its layers over the slower link.
    The last two need tp groups of the destination that are on one host each.
    """
    a, b, links = arrays.options[source], arrays.options[destination], arrays.links
    layers, layer = arrays.models.layers[role], arrays.models.layer_bytes[role]
    held = min(a.layers, b.layers) * min(a.layer, b.layer)  # the most bytes that stay on a shared device
    fastest, between_hosts = links.least_per_byte_s[0 if near else 1], links.least_per_byte_s[1]
    received = b.layers * b.layer - (held if shared else 0.0)
    # At most so many layers are on the source's devices of one host.
    on_host = _stages_per_host(a.dp * a.tp, a.pp, links.per_host) * a.layers
    far = max(0, b.layers - on_host) * b.layer
    most = max(far * between_hosts + (received - far) * fastest, 0.0)
    most = max(most, max(0.0, b.dp * layers * layer - shared * held) / a.size * fastest)
    if b.tp <= links.per_host:
        stage = layers // b.pp  # layers of the destination's smallest stage
        groups = near // b.tp * max(0, stage - on_host) + (b.size - near) // b.tp * stage
        most = max(most, groups * layer / a.size * between_hosts)
        if near < b.size:
            most = max(most, stage * layer / b.tp * between_hosts)
    return most


@inner
def _stages_per_host(width: int, pp: int, per_host: int) -> int:
    """The most stages of a placement that have devices on one host. width: devices of a stage."""
    if width % per_host == 0:
        return 1
    if per_host % width == 0:
        return min(pp, per_host // width)
    return min(pp, per_host // width + 2)  # whole stages, and a part of one at both ends


@inner
def reallocation(arrays: Arrays, known: KnownPrices, role: int, source: int, destination: int) -> float:
    """Seconds in which a role's parameters move between the placements of two options, given by row; from `known` or
    put there.

    If the meshes share no host, the price does not depend on where they are. Else it depends only on the distance of
    their first devices. (The device classes along a mesh are part of its strategy's number.) For very large meshes
    the result is the lower bound, because listing their messages takes too long.
    """
    a, b, per_host = arrays.options[source], arrays.options[destination], arrays.links.per_host
    if a.size + b.size > LISTED:
        return least_reallocation(arrays, role, source, destination)
    apart = (
        a.first // per_host > (b.first + b.size - 1) // per_host
        or b.first // per_host > (a.first + a.size - 1) // per_host
    )
    # `+` binds tighter than `<<`. A distance is in -_HOSTS_APART .. _HOSTS_APART; the offset makes it fit 24 bits.
    # 18 bits for each strategy, the bits above for the role.
    distance = _HOSTS_APART if apart else b.first - a.first
    key = (((role << 18) + a.strategy << 18) + b.strategy << 24) + distance + _HOSTS_APART
    price = known.reallocations[_slot(key, len(known.reallocations))]
    if price.key != key:
        price.seconds = reallocation_s(
            _parts(arrays.models, role),
            np.array([a.first, a.dp, a.tp, a.pp]),
            np.array([b.first, b.dp, b.tp, b.pp]),
            arrays.links,
        )
        price.key = key
    return price.seconds


@inner
def _slot(key: int, slots: int) -> int:
    """The only entry of a direct-mapped cache in which a key may be (multiplicative hashing by the golden ratio)."""
    # The product's high bits are the well mixed ones: the upper 24 of 64 are used.
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    return int(mixed) % slots
