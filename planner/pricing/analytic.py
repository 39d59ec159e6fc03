"""An analytic profile in the form of a measured one: a device's roofline at the points where ranks would measure.

A roofline is the longer of two times, each linear in tokens, context and bytes. A table that interpolates linearly
therefore agrees with it, with these exceptions:
- In the cell where the bound changes from memory traffic to arithmetic, the table gives up to a fifth more.
- For a prefill's head, whose cost depends on tokens / context, it gives up to a third more.
- For a collective among a number of ranks that is not a power of two, it gives up to a sixteenth less.
"""

from collections.abc import Iterator
from itertools import product

from planner.plan.mesh import Cluster
from planner.pricing.device_share import sizes
from planner.pricing.devices import DeviceProfile, described
from planner.pricing.measured import MeasuredProfile
from planner.pricing.rooflines import Roofline
from rlhf_tasks.parallel.layout.shape import Head, ModelShape
from rlhf_tasks.profiling.measurements import Exchange, Grid, Pass, Timed, TimedExchange

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
    per_host, most_tp = cluster.devices_per_host, min(shape.query_heads, shape.intermediate, shape.vocab)
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
