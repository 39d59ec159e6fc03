"""Seconds of moves between two options: by the formulas that plans are priced with, and lower bounds on them.

All options are given by row of Arrays.options.
"""

from numba.extending import register_jitable

from planner.pricing import resharding
from planner.pricing.resharding import Heads, HeldModel, Wires
from planner.search.compiled.arrays import Arrays
from planner.search.compiled.compile import inner

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
    return HeldModel(option.first, option.dp, option.tp, option.pp, option.layer)


@inner
def _heads(arrays: Arrays, row: int) -> Heads:
    side = arrays.sides[arrays.options[row].where]
    return Heads(side[0], side[1], side[2])


@inner
def reallocation_s(arrays: Arrays, role: int, source: int, destination: int) -> float:
    """Seconds in which a role's parameters move from one option to another, dispatch and overhead included."""
    held, wanted = _held(arrays, source), _held(arrays, destination)
    layers, wires = arrays.models.layers[role], _wires(arrays, source, destination)
    return arrays.models.overhead_s[role] + _reallocation(layers, held, wanted, arrays.per_host, wires)[0]


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
    a, b, layers = arrays.options[source], arrays.options[destination], arrays.models.layers[role]
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
    return arrays.models.overhead_s[role] + max(busiest_s, total_s / a.size)


@inner
def _stages_per_host(width: int, pp: int, per_host: int) -> int:
    """The most stages of a placement that have devices on one host. width: devices of a stage."""
    if width % per_host == 0:
        return 1
    if per_host % width == 0:
        return min(pp, per_host // width)
    return min(pp, per_host // width + 2)  # whole stages, and a part of one at both ends
