"""Seconds of the moves between two options, remembered, and the least that they can be."""

import numpy as np

from planner.search.compiled.arrays import Arrays, KnownPrices, Models
from planner.search.compiled.compile import inner
from planner.search.compiled.resharding_pieces import Parts
from planner.search.compiled.resharding_seconds import reallocation_s, redistribution_s

LISTED = 1024  # devices of both meshes up to which a reallocation is priced message by message

_HOSTS_APART = 1 << 22  # stands for the distance of meshes that share no host


@inner
def redistribution(arrays: Arrays, known: KnownPrices, moved: int, source: int, destination: int) -> float:
    """Seconds in which samples go from one side to another, from `known` or put there; moved: index into
    sample_bytes."""
    key = ((moved << 24) + source << 24) + destination
    price = known.redistributions[_slot(key, len(known.redistributions))]
    if price.key != key:
        price.seconds = redistribution_s(
            arrays.sides[source],
            arrays.sides[destination],
            arrays.n_seqs,
            arrays.skeletons.sample_bytes[moved],
            arrays.links,
        )
        price.key = key
    return price.seconds


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
def reallocation(arrays: Arrays, known: KnownPrices, role: int, source: int, destination: int) -> float:
    """Seconds in which a role's parameters go from one option's placement to another's, by row, from `known` or put
    there.

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
    """Where a memory keeps a key (multiplicative hashing by the golden ratio)."""
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    return int(mixed) % slots
