"""An analytic profile in the form of a measured one: a device's roofline at the points where ranks would measure.

A roofline is the longer of two times, each linear in tokens, context and bytes. A table that interpolates linearly
therefore agrees with it, with these exceptions:
- In the cell where the bound changes from memory traffic to arithmetic, the table gives up to a fifth more.
- For a prefill's head, whose cost depends on tokens / context, it gives up to a third more.
- For a collective among a number of ranks that is not a power of two, it gives up to a sixteenth less.

The other way round, calibration fits a device's efficiencies and overheads to a measured profile. Measurements of one
model on a few ranks thus improve the prices of other models. Dispatch time and process memory are copied.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.devices import DeviceLink, DeviceProfile, described
from prefect_rlhf.planner.pricing.figures import MeasuredProfile
from prefect_rlhf.planner.pricing.rooflines import ROUTING, Roofline, sizes
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Head, ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.work import layer_flops
from prefect_rlhf.rlhf_tasks.profiling.measurements import MOST_S, Exchange, Grid, Pass, Timed, TimedExchange

HEADS: tuple[Head, ...] = ("lm", "scalar")
AMONG_ALL: tuple[Exchange, ...] = ("all_reduce", "all_gather", "reduce_scatter", "share")
BETWEEN_TWO: tuple[Exchange, ...] = ("send", "redistribute")
EXCHANGE_BYTES = (0, 2**22)  # seconds are linear in bytes, so two sizes suffice
FEWEST_PARAMETERS = 1  # an update is linear in its parameters: this count and all parameters suffice
MOVED_VALUES = 1024  # samples x keys of the transfer


def computed_profile(
    device: DeviceProfile, cluster: Cluster, shape: ModelShape, grid: Grid, itemsize: int
) -> MeasuredProfile:
    """The profile that measuring a model would give if the devices of the cluster had exactly `device`'s figures.

    Points cost nothing to compute, so passes have every context of the grid and every power of two in tokens.
    itemsize  bytes of a parameter
    """
    per_host, most_tp = cluster.devices_per_host, shape.most_tp
    degrees = [tp for tp in range(1, per_host + 1) if per_host % tp == 0 and tp <= most_tp]
    return MeasuredProfile(
        device=device.name,
        n_hosts=cluster.n_hosts,
        devices_per_host=per_host,
        model=shape,
        itemsize=itemsize,
        operations=tuple(
            timed
            for tp in degrees
            for timed in _operations(_rooflines(device, shape, itemsize, tp), shape, grid, tp)
        )
        + _moves(device, cluster, shape, itemsize),
        exchanges=tuple(_exchanges(_rooflines(device, shape, itemsize, 1)["lm"], cluster)),
        dispatch_s=device.dispatch_s,
        process_bytes=device.process_bytes,
        computed_from=described(device),
    )


def _moves(device: DeviceProfile, cluster: Cluster, shape: ModelShape, itemsize: int) -> tuple[Timed, ...]:
    """The whole model, and samples, from one device to another; nothing where there is one device."""
    if cluster.n_devices == 1:
        return ()
    crosses, moved = cluster.devices_per_host == 1, sizes(shape, "lm", 1).stage_parameters(1, 0)
    model_s = device.send_s(moved * itemsize, crosses) + shape.layers * device.reallocation_overhead_s
    samples_s = device.send_s(4 * MOVED_VALUES, crosses) + MOVED_VALUES * device.transfer_overhead_s
    return (
        _timed("reallocation", 1, moved, shape.layers, model_s),
        _timed("transfer", 1, MOVED_VALUES, 0, samples_s),
    )


def _rooflines(device: DeviceProfile, shape: ModelShape, itemsize: int, tp: int) -> dict[Head, Roofline]:
    """The roofline with each head, for a tp group on one host."""
    return {head: Roofline(device, sizes(shape, head, tp), head, tp, False, itemsize) for head in HEADS}


def _operations(rooflines: dict[Head, Roofline], shape: ModelShape, grid: Grid, tp: int) -> Iterator[Timed]:
    """Every operation of a model at one tp degree. A head's time includes the embedding, as when ranks measure."""
    lm = rooflines["lm"]
    for kind, tokens, context in _passes(grid):
        yield _timed(f"layer/{kind}", tp, tokens, context, lm.layer_s(kind, tokens, context))
        for head in HEADS if kind in ("forward", "backward") else HEADS[:1]:  # only an lm head generates
            ends_s = rooflines[head].head_s(kind, tokens, context) + lm.embedding_s(kind, tokens)
            yield _timed(f"{head}/{kind}", tp, tokens, context, ends_s)
    for tokens in _tokens(grid):
        yield _timed("embedding/forward", tp, tokens, 0, lm.embedding_s("forward", tokens))
        yield _timed("embedding/backward", tp, tokens, 0, lm.embedding_s("backward", tokens))
    for parameters in (FEWEST_PARAMETERS, sizes(shape, "lm", tp).stage_parameters(1, 0)):
        yield _timed("optimizer", tp, parameters, 0, lm.update_s(parameters, 1))


def _passes(grid: Grid) -> Iterator[tuple[Pass, int, int]]:
    """(pass, tokens, context) of every point."""
    for context in sorted({*grid.contexts, *grid.lengths}):
        for tokens in _tokens(grid):
            yield "forward", tokens, context
            yield "backward", tokens, context
        for tokens in sorted({*_tokens(grid), *(rows * context for rows in _up_to(grid.rows[-1]))}):
            yield "prefill", tokens, context
        for rows in _up_to(grid.rows[-1]):
            yield "decode", rows, context


def _tokens(grid: Grid) -> list[int]:
    """Powers of two from 1 (a single decoding sequence) to the largest micro-batch."""
    return _up_to(grid.tokens[-1])


def _up_to(most: int) -> list[int]:
    """Powers of two from 1 to `most`, which is one."""
    return [2**power for power in range(most.bit_length())]


def _timed(operation: str, tp: int, tokens: int, context: int, seconds: float) -> Timed:
    return Timed.model_validate(
        {"operation": operation, "tp": tp, "tokens": tokens, "context": context, "seconds": seconds}
    )


def _exchanges(roofline: Roofline, cluster: Cluster) -> Iterator[TimedExchange]:
    """Every exchange, inside a host and across hosts, among 2, 4, ... and all ranks."""
    for crosses, most in ((False, cluster.devices_per_host), (True, cluster.n_devices)):
        if most < 2 or (crosses and cluster.n_hosts == 1):
            continue
        for ranks in sorted({*(2**power for power in range(1, most.bit_length())), most}):
            kinds = (*AMONG_ALL, *BETWEEN_TWO) if ranks == 2 else AMONG_ALL
            for kind, size_bytes in product(kinds, EXCHANGE_BYTES):
                seconds = roofline.exchange_s(kind, ranks, size_bytes, crosses)
                yield TimedExchange(
                    kind=kind, ranks=ranks, crosses_hosts=crosses, size_bytes=size_bytes, seconds=seconds
                )


LEAST_EFFICIENCY = 1e-4  # a smaller fitted efficiency would be a wrong unit
MOST_FITS = 20  # limit of the fixed-point iteration in `_forward_fit`, which mostly takes three fits


def recalibrated(device: DeviceProfile, measured: MeasuredProfile) -> DeviceProfile:
    """The device with constants fitted to a measured profile. What was not measured keeps its value.

    Operations are fitted at tp=1:
    - matmul efficiency and layer overhead, to the forward passes that arithmetic bounds:
      seconds = overhead + FLOPs / (peak x efficiency);
    - the decoding overhead, to decoding steps;
    - the optimizer overhead, to updates.
    Both links are fitted to messages. If the measured FLOP/s exceed the stated peak, they replace it.
    A mixture of experts says nothing of steps of decoding from CUDA graphs, and its passes have further overheads.
    """
    passes, mixture = list(_layers(device, measured, "forward")), measured.model.experts > 0
    overhead_s, reached = _forward_fit(device, passes)
    if mixture and passes:
        overhead_s /= 1 + ROUTING
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
    steps = [] if mixture else list(_layers(fitted, measured, "decode"))
    return fitted.model_copy(
        update={
            "decode_overhead_s": _unexplained_s(steps, reached, device.decode_overhead_s),
            "optimizer_overhead_s": _optimizer_overhead_s(device, measured),
        }
    )


class _LayerPass(NamedTuple):
    """A pass of a layer: its FLOPs, the seconds of its memory traffic alone, and the seconds measured."""

    flops: float
    traffic_s: float
    seconds: float


def _layers(device: DeviceProfile, measured: MeasuredProfile, kind: Pass) -> Iterator[_LayerPass]:
    """The measured passes of a kind at tp=1, with the traffic time that the device's memory bandwidth implies."""
    local = sizes(measured.model, "lm", 1)
    # Without arithmetic and overheads, the roofline gives memory traffic alone.
    overheads = dict.fromkeys(("layer_overhead_s", "decode_overhead_s", "expert_overhead_s"), 0.0)
    free: dict[str, Any] = {"flops_per_s": math.inf, **overheads}
    memory = Roofline(device.model_copy(update=free), local, "lm", 1, False, measured.itemsize)
    for o in measured.operations:
        if (o.operation, o.tp) == (f"layer/{kind}", 1):
            attended = o.context if kind == "decode" else o.context / 2
            flops = layer_flops(o.tokens, attended, local.active, local.scored, local.state)
            seconds = max(o.seconds - device.expert_overhead_s * local.busy(o.tokens), 0.0)
            yield _LayerPass(flops, memory.layer_s(kind, o.tokens, o.context), seconds)


def _forward_fit(device: DeviceProfile, passes: Sequence[_LayerPass]) -> tuple[float, float]:
    """(overhead in seconds, FLOP/s) fitted to the passes that arithmetic bounds.

    Which passes these are depends on the fit, so fit and selection alternate until the selection stays the same.
    If arithmetic bounds no pass, the device keeps its FLOP/s, and the overhead is the median of the remaining time.
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


def _unexplained_s(passes: Sequence[_LayerPass], flops_per_s: float, default: float) -> float:
    """Median seconds of a pass beyond the longer of arithmetic and memory traffic; `default` without passes."""
    rest = [max(one.seconds - max(one.flops / flops_per_s, one.traffic_s), 0.0) for one in passes]
    return median(rest) if rest else default


def _line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b x by least squares of relative errors; neither is negative."""
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


def with_measured_moves(device: DeviceProfile, measured: MeasuredProfile) -> DeviceProfile:
    """The device with figures fitted to measured redistributions, transfers and reallocations, for pricing moves.

    The links' latency includes what ranks tell each other before they send. What a reallocation takes beyond its
    message counts per layer of the model; what a transfer of many samples and keys takes, per sample and key.
    """
    moving = device.model_copy(
        update={
            "inside_host": _link(measured.exchanges, "redistribute", False, device),
            "between_hosts": _link(measured.exchanges, "redistribute", True, device),
        }
    )
    crosses = measured.devices_per_host == 1

    def beyond(o: Timed, size_bytes: int) -> float:
        return max(o.seconds - moving.send_s(size_bytes, crosses), 0.0)

    per_layer = [
        beyond(o, o.tokens * measured.itemsize) / o.context
        for o in measured.operations
        if o.operation == "reallocation"
    ]
    per_value = [beyond(o, 4 * o.tokens) / o.tokens for o in measured.operations if o.operation == "transfer"]
    if per_layer:
        moving = moving.model_copy(update={"reallocation_overhead_s": median(per_layer)})
    if per_value:
        moving = moving.model_copy(update={"transfer_overhead_s": median(per_value)})
    return moving


def _link(
    exchanges: Iterable[TimedExchange], kind: Exchange, crosses: bool, device: DeviceProfile
) -> DeviceLink:
    """Latency and bandwidth between two ranks, chosen so that `DeviceProfile.send_s` gives what was measured.

    Without usable measurements, the device's own link.
    """
    timed = [
        (float(e.size_bytes), e.seconds) for e in exchanges if (e.kind, e.crosses_hosts) == (kind, crosses)
    ]
    latency_s, per_byte_s = _line(timed)
    if per_byte_s <= 0:
        return device.link(crosses)
    bytes_per_s = 1 / (per_byte_s * device.link_efficiency)
    return DeviceLink(bytes_per_s=min(max(bytes_per_s, 1.0), 1e30), latency_s=min(latency_s, MOST_S))


def _optimizer_overhead_s(device: DeviceProfile, measured: MeasuredProfile) -> float:
    """Seconds of an optimizer step that do not depend on the number of parameters."""
    points = [
        (float(o.tokens), o.seconds) for o in measured.operations if (o.operation, o.tp) == ("optimizer", 1)
    ]
    return _line(points)[0] if points else device.optimizer_overhead_s
