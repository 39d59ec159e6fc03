"""An analytic profile with the efficiencies and overheads that a measured one shows.

So what was measured on one model and a few ranks helps to price others; links, dispatch and memory of the process
are taken over as they are.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from planner.pricing.device_share import sizes
from planner.pricing.devices import DeviceProfile, Link
from planner.pricing.measured import MeasuredProfile
from planner.pricing.rooflines import Roofline
from rlhf_tasks.parallel.layout.flops import layer_flops
from rlhf_tasks.profiling.measurements import Exchange, Pass, TimedExchange

LEAST_EFFICIENCY = 1e-4  # a fit below this is no efficiency but an error of unit
MOST_FITS = 20  # until a fit and the points that it is of agree, which mostly takes three


def recalibrated(device: DeviceProfile, measured: MeasuredProfile) -> DeviceProfile:
    """The device with constants fitted to a measured profile; what was not measured stays.

    Fitted at tp=1: matmul efficiency and a layer's overhead to those forward passes that memory traffic does not
    bound (seconds = overhead + FLOPs / (peak x efficiency)), the decoding overhead to decoding steps, the optimizer's
    overhead, and both links to their messages. A peak below what was reached is raised to that.
    """
    overhead_s, reached = _forward_fit(device, list(_layers(device, measured, "forward")))
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
            "sources": (*device.sources, f"calibrated by a {measured.title}"),
        }
    )
    steps = list(_layers(fitted, measured, "decode"))
    return fitted.model_copy(
        update={
            "decode_overhead_s": _unexplained_s(steps, reached, device.decode_overhead_s),
            "optimizer_overhead_s": _optimizer_overhead_s(device, measured),
        }
    )


class _Timed(NamedTuple):
    """A pass of a layer: its arithmetic, the seconds of its memory traffic, and those that it took."""

    flops: float
    traffic_s: float
    seconds: float


def _layers(device: DeviceProfile, measured: MeasuredProfile, kind: Pass) -> Iterator[_Timed]:
    """The passes of a kind at tp=1, with traffic as a device's memory bears it."""
    local = sizes(measured.model, "lm", 1)
    free: dict[str, Any] = {"flops_per_s": math.inf, "layer_overhead_s": 0.0, "decode_overhead_s": 0.0}
    memory = Roofline(device.model_copy(update=free), local, "lm", 1, False, measured.itemsize)
    for o in measured.operations:
        if (o.operation, o.tp) == (f"layer/{kind}", 1):
            attended = o.context if kind == "decode" else o.context / 2
            flops = layer_flops(o.tokens, attended, local.layer, local.query)
            yield _Timed(flops, memory.layer_s(kind, o.tokens, o.context), o.seconds)


def _forward_fit(device: DeviceProfile, passes: Sequence[_Timed]) -> tuple[float, float]:
    """(overhead in seconds, FLOP/s) of those passes that arithmetic bounds, as a fit to these says itself.

    Where it bounds none, it does not show: the device's FLOP/s stay, and the overhead is what they do not explain.
    """
    bound, overhead_s, per_flop_s = passes, 0.0, 0.0
    for _ in range(MOST_FITS):
        overhead_s, per_flop_s = _line((one.flops, one.seconds) for one in bound)
        before, bound = bound, [one for one in passes if one.flops * per_flop_s > one.traffic_s]
        if bound == before:
            break
    if per_flop_s > 0:
        return overhead_s, 1 / per_flop_s
    reached = device.flops_per_s * device.matmul_efficiency
    return _unexplained_s(passes, reached, device.layer_overhead_s), reached


def _unexplained_s(passes: Sequence[_Timed], flops_per_s: float, default: float) -> float:
    """What a pass takes besides arithmetic and memory traffic, in the median; a default where there is no pass."""
    rest = [max(one.seconds - max(one.flops / flops_per_s, one.traffic_s), 0.0) for one in passes]
    return median(rest) if rest else default


def _line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b x with the least sum of squared relative errors, both at least 0."""
    weighted = [(x, y, 1 / y**2) for x, y in points if y > 0]
    total = sum(w for _, _, w in weighted)
    if not weighted:
        return 0.0, 0.0
    mean_x = sum(w * x for x, _, w in weighted) / total
    mean_y = sum(w * y for _, y, w in weighted) / total
    if len({x for x, _, _ in weighted}) == 1:
        return mean_y, 0.0
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in weighted)
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in weighted) / spread
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


def _optimizer_overhead_s(device: DeviceProfile, measured: MeasuredProfile) -> float:
    """What an optimizer step takes besides its parameters."""
    points = [
        (float(o.tokens), o.seconds) for o in measured.operations if (o.operation, o.tp) == ("optimizer", 1)
    ]
    return _line(points)[0] if points else device.optimizer_overhead_s
