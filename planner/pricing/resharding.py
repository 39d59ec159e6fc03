"""What it takes to move parameters or samples from one layout to another: one formula for each.

Plans and the search are priced with the same functions: these are plain Python, which
planner/search/compiled/evaluator.py compiles.

Both formulas have three parts: the seconds in which the busiest device receives what it lacks, or in which the
senders send all that is lacking if they share it evenly, whichever is longer; a latency for each message; and an
overhead, measured by a profile, which the callers add. The lists of messages that the executors run
(rlhf_tasks/parallel/layout/transfers.py) mostly take as long: they send nothing twice, prefer senders of the same
host, and share the sending evenly.
"""

from math import gcd
from typing import NamedTuple


class Wires(NamedTuple):
    """The links of devices. A message takes the latency, and so many seconds for each byte.

    inside_s, inside_byte_s    between devices of one host
    between_s, between_byte_s  between devices of two hosts
    """

    inside_s: float
    inside_byte_s: float
    between_s: float
    between_byte_s: float


class HeldModel(NamedTuple):
    """A model on consecutive devices: dp copies of it, where a cp rank's counts as a dp rank's.

    first        the first device
    layer_bytes  bytes of one layer on a device; embedding and head count as if they were spread over the layers
    shares       dp ranks of which each has an equal share of a layer: 1 where each has the whole slice
    """

    first: int
    dp: int
    tp: int
    pp: int
    layer_bytes: float
    shares: int = 1


class Heads(NamedTuple):
    """The devices that hold the samples of a call: dp of them, `distance` devices apart, from `first` on."""

    first: int
    distance: int
    dp: int


def kept_slices(source: HeldModel, destination: HeldModel) -> tuple[float, float]:
    """How much of the smaller of its two slices of a layer a device has in both: (least of any device, mean)."""
    least, mean, period = 1.0, 0.0, source.tp * destination.tp // gcd(source.tp, destination.tp)
    for number in range(period):
        before = (number + destination.first - source.first) % source.tp
        after = number % destination.tp
        # Slice t of tp reaches from t / tp to (t + 1) / tp of a layer; both are counted in 1 / (source.tp x
        # destination.tp) of it.
        start = max(before * destination.tp, after * source.tp)
        stop = min((before + 1) * destination.tp, (after + 1) * source.tp)
        kept = max(0, stop - start) / min(source.tp, destination.tp)
        least, mean = min(least, kept), mean + kept / period
    return least, mean


def reallocation(
    layers: int, source: HeldModel, destination: HeldModel, per_host: int, wires: Wires
) -> tuple[float, float]:
    """(seconds, bytes sent) of the move of a model of so many layers from one placement to another.

    per_host  devices of a host

    A device lacks the layers that its host does not have, which come from other hosts, and its slices of others.
    Neighbouring devices of one host, one stage of the destination and one of the source lack equally many layers, so
    the devices are taken in such runs.
    """
    width_a, width_b = source.dp * source.tp, destination.dp * destination.tp
    size_a, size_b = width_a * source.pp, width_b * destination.pp
    least, mean = kept_slices(source, destination)
    # Shares that two devices have of a layer have as much in common as if their elements were drawn at random.
    slice_a, slice_b = source.layer_bytes * source.shares, destination.layer_bytes * destination.shares
    smaller_bytes = min(slice_a, slice_b) / (source.shares * destination.shares)
    busiest_s, total_s, total_bytes, far = 0.0, 0.0, 0.0, 0.0
    device, end = destination.first, destination.first + size_b
    while device < end:
        stage, host = (device - destination.first) // width_b, device // per_host * per_host
        low, high = stage * layers // destination.pp, (stage + 1) * layers // destination.pp
        following = min(host + per_host, destination.first + (stage + 1) * width_b)
        # near: layers that the source has on this host; kept: layers that it has on these devices
        near, kept = 0.0, 0
        first, last = max(source.first, host), min(source.first + size_a, host + per_host) - 1
        if first <= last:
            begin = (first - source.first) // width_a * layers // source.pp
            after = ((last - source.first) // width_a + 1) * layers // source.pp
            near = 1.0 * max(0, min(high, after) - max(low, begin))
            if source.shares > 1:  # on this host are the shares of these devices alone
                near *= (last - first + 1) / size_a
        if source.first <= device < source.first + size_a:
            at = (device - source.first) // width_a
            kept = min(high, (at + 1) * layers // source.pp) - max(low, at * layers // source.pp)
            kept = max(0, kept)
            following = min(following, source.first + (at + 1) * width_a)
        elif device < source.first:
            following = min(following, source.first)
        far = max(far, high - low - near)
        far_bytes = (high - low - near) * destination.layer_bytes
        near_bytes = near * destination.layer_bytes
        crossing_s = far_bytes * wires.between_byte_s
        busiest_s = max(
            busiest_s, crossing_s + (near_bytes - kept * smaller_bytes * least) * wires.inside_byte_s
        )
        mean_bytes = near_bytes - kept * smaller_bytes * mean
        total_s += (following - device) * (crossing_s + mean_bytes * wires.inside_byte_s)
        total_bytes += (following - device) * (far_bytes + mean_bytes)
        device = following
    if busiest_s <= 0.0:
        return 0.0, 0.0
    # Messages come from the stages and slices of the source that make up one of the destination.
    n_messages = -(-source.pp // destination.pp) * -(-source.tp // destination.tp) * source.shares
    latency_s = n_messages * (wires.between_s if far else wires.inside_s)
    return latency_s + max(busiest_s, total_s / size_a), total_bytes


def redistribution(
    source: Heads, destination: Heads, size_bytes: float, per_host: int, wires: Wires
) -> tuple[float, float]:
    """(seconds, bytes sent) of the move of samples, size_bytes in all, from some heads to others.

    per_host  devices of a host

    Each head has an equal share. Where one side has a single head that is among those of the other side, it keeps
    what both give it. Between several heads and several others hardly any sample stays: they are dealt otherwise.
    """
    alone, others = (source, destination) if source.dp == 1 else (destination, source)
    place, stays = alone.first - others.first, 0.0
    if alone.dp == 1 and place % others.distance == 0 and 0 <= place // others.distance < others.dp:
        stays = 1 / others.dp
    moved_bytes = size_bytes * (1 - stays)
    if moved_bytes <= 0.0:
        return 0.0, 0.0
    last_a = source.first + (source.dp - 1) * source.distance
    last_b = destination.first + (destination.dp - 1) * destination.distance
    one_host = min(source.first, destination.first) // per_host == max(last_a, last_b) // per_host
    latency_s = wires.inside_s if one_host else wires.between_s
    byte_s = wires.inside_byte_s if one_host else wires.between_byte_s
    # The side with fewer heads is the busier one: each exchanges a message with so many of the other side.
    fewer = min(source.dp, destination.dp)
    n_messages = -(-max(source.dp, destination.dp) // fewer) - (1 if stays > 0.0 else 0)
    return n_messages * latency_s + moved_bytes / fewer * byte_s, moved_bytes
