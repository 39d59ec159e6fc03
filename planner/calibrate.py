"""An analytic profile with the efficiencies and overheads that a measured one shows.

So what was measured on one model and a few ranks helps to price others; links, dispatch and memory of the process
are taken over as they are.
"""

from collections.abc import Iterable
from statistics import median

from planner.measured import MeasuredProfile
from planner.profile import DeviceProfile, Link
from planner.sizes import Sizes, sizes
from rlhf_tasks.measurements import Exchange, TimedExchange
from rlhf_tasks.parallel.flops import layer_flops

LEAST_EFFICIENCY = 1e-4  # a fit below this is no efficiency but an error of unit


def recalibrated(device: DeviceProfile, measured: MeasuredProfile) -> DeviceProfile:
    """The device with constants fitted to a measured profile; what was not measured stays.

    Fitted at tp=1: matmul efficiency and a layer's overhead to its forward passes (seconds = overhead + FLOPs /
    (peak x efficiency)), the decoding overhead to decoding steps of few sequences, the optimizer's overhead, and both
    links to their messages. A peak below what was reached is raised to that.
    """
    local = sizes(measured.model, "lm", 1)
    passes = [
        (layer_flops(o.tokens, o.context / 2, local.layer, local.query), o.seconds)
        for o in measured.operations
        if (o.operation, o.tp) == ("layer/forward", 1)
    ]
    overhead_s, per_flop_s = _line(passes) if passes else (device.layer_overhead_s, 0.0)
    reached = 1 / per_flop_s if per_flop_s > 0 else device.flops_per_s * device.matmul_efficiency
    peak = max(device.flops_per_s, reached)
    fitted = device.model_copy(
        update={
            "flops_per_s": peak,
            "matmul_efficiency": max(reached / peak, LEAST_EFFICIENCY),
            "layer_overhead_s": overhead_s,
            "inside_host": _link(measured.exchanges, "send", False, device),
            "between_hosts": _link(measured.exchanges, "send", True, device),
            "dispatch_s": measured.dispatch_s or device.dispatch_s,
            "process_bytes": measured.process_bytes or device.process_bytes,
            "sources": (*device.sources, f"calibrated by a measured profile of {measured.device}"),
        }
    )
    return fitted.model_copy(
        update={
            "decode_overhead_s": _decode_overhead_s(fitted, measured, local),
            "optimizer_overhead_s": _optimizer_overhead_s(device, measured),
        }
    )


def _line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b x with the least sum of squared relative errors, both at least 0."""
    weighted = [(x, y, 1 / y**2) for x, y in points if y > 0]
    total = sum(w for _, _, w in weighted)
    if not weighted:
        return 0.0, 0.0
    mean_x = sum(w * x for x, _, w in weighted) / total
    mean_y = sum(w * y for _, y, w in weighted) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in weighted)
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in weighted) / spread if spread else 0.0
    intercept = mean_y - slope * mean_x
    if slope <= 0:
        return mean_y, 0.0
    if intercept < 0:
        squares = sum(w * x * x for x, _, w in weighted)
        return 0.0, sum(w * x * y for x, y, w in weighted) / squares
    return intercept, slope


def with_transfer_links(device: DeviceProfile, measured: MeasuredProfile) -> DeviceProfile:
    """The device with links as transfers and reallocations find them.

    The latency holds all that ranks tell each other before they send.
    """
    return device.model_copy(
        update={
            "inside_host": _link(measured.exchanges, "redistribute", False, device),
            "between_hosts": _link(measured.exchanges, "redistribute", True, device),
        }
    )


def _link(exchanges: Iterable[TimedExchange], kind: Exchange, crosses: bool, device: DeviceProfile) -> Link:
    """Latency and bandwidth between two ranks, so that `DeviceProfile.send_s` gives what was measured."""
    timed = [
        (float(e.size_bytes), e.seconds) for e in exchanges if (e.kind, e.crosses_hosts) == (kind, crosses)
    ]
    latency_s, per_byte_s = _line(timed)
    if per_byte_s <= 0:
        return device.link(crosses)
    return Link(bytes_per_s=1 / (per_byte_s * device.link_efficiency), latency_s=latency_s)


def _decode_overhead_s(device: DeviceProfile, measured: MeasuredProfile, local: Sizes) -> float:
    """What a decoding step of a layer takes besides reading weights and cache."""
    rest = []
    for o in measured.operations:
        if (o.operation, o.tp) == ("layer/decode", 1):
            flops = layer_flops(o.tokens, o.context, local.layer, local.query)
            traffic = (local.layer + 2 * o.tokens * o.context * local.kv) * measured.itemsize
            rest.append(max(o.seconds - device.compute_s(flops, traffic), 0.0))
    return median(rest) if rest else device.decode_overhead_s


def _optimizer_overhead_s(device: DeviceProfile, measured: MeasuredProfile) -> float:
    """What an optimizer step takes besides its parameters."""
    points = [
        (float(o.tokens), o.seconds) for o in measured.operations if (o.operation, o.tp) == ("optimizer", 1)
    ]
    return _line(points)[0] if points else device.optimizer_overhead_s
