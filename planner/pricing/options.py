"""All options of every call: device mesh, strategy and micro-batches, with seconds and bytes.

The search proves optimality within this class of options:
- Meshes: aligned parts of a host, or whole consecutive hosts. On at most 16 hosts, all of them. On more hosts, those
  that begin and end at sixteenths of the cluster; within the first sixteenth, the first 1, 2, 4, ... hosts and the
  same number of hosts after them; and the aligned parts of the first host.
- Strategies: dp x cp x tp x pp = size of the mesh. tp divides the number of devices of a host or is a multiple of
  it, and is at most the problem's limit and what the model's heads allow. pp is at most the number of layers. dp is
  at most the number of groups of a mini-batch or part. cp is 1; for long sequences (LONG_TOKENS), where no state
  passes from token to token and the call does not generate, also a power of 2 that divides a tp rank's query heads
  inside a host.
- Micro-batches: 1, 2, 4, ..., pp times these, and the number of sequences of a dp rank; at most the latter. The few
  with which a search begins are 2 pp (1 and 2 without a pipeline) and the number of sequences of a dp rank. Of a
  generation 1, 2, 4, 8 or 16: the fewest with which it fits memory.
- Parts of a call: all have its option.
- Pools: of a call in one, only the meshes inside it.
- vLLM: of a generation by it, only what its tensor parallelism can divide: whole heads, on one host.
- Device classes: a mesh may hold several; planner/pricing/device_classes.py says how it is priced. A tp group of a
  mixture of experts has one.
- Sharded weights: of a call that is no generation, under strategies with one stage and several copies of the weights.
  Where no whole weights under the strategy fit alone with all of the call's memory resident; and of all calls, if
  the fastest options of all calls do not fit on one device together. Where these do, a plan of them fits, so nothing
  is refused that sharded weights would make fit. The few with which a search begins lack the latter: good plans come
  sooner without them.
- Offload: for a frozen role with a single call, parameters are resident, or in host memory between their uses; for a
  train_step both the optimizer's state and the parameters are resident, or the one is in host memory, and the others
  between their uses if another call may run meanwhile on these devices.

Left out are:
- options that do not fit the memory of their devices even alone;
- options that are neither faster nor smaller than another one on the same mesh under the same strategy. They differ
  in nothing else, so no plan gets worse;
- all offloaded options, if the largest options of all calls fit on one device together, and where some devices'
  memory is their host's. Offloading only costs time, so it gains nothing then.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from operator import add, sub
from typing import Any, NamedTuple

from prefect_rlhf.planner.plan.graph import blocks_of, groups_of
from prefect_rlhf.planner.plan.mesh import Cluster, DeviceMesh, meshes
from prefect_rlhf.planner.plan.workload import least_share
from prefect_rlhf.planner.pricing.device_classes import DeviceClasses
from prefect_rlhf.planner.pricing.plans import active_part, copied_bytes, kept_samples_bytes, remedy
from prefect_rlhf.planner.pricing.problem import (
    NO_DEADLINE,
    Deadline,
    OptionsTakeTooLongError,
    Problem,
    ProblemError,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.spec import CallAssignment, ModelFunctionCall

GENERATION_CUTS = (1, 2, 4, 8, 16)
"""Micro-batches of a generation: its cache takes down to a sixteenth of what all sequences at once need."""

ALL_CUTS = 16
"""On clusters of at most this many hosts, every host is a cut point."""


# Options at one placement follow one another, and on large clusters a placement takes a millisecond to make.
@lru_cache(maxsize=8)
def _placement(first: int, strategy: ParallelStrategy) -> Placement:
    """The placement on the mesh that begins at device `first`."""
    return Placement(tuple(range(first, first + strategy.size)), strategy)


class Option(NamedTuple):
    """One way to run a call.

    first, size    its device mesh: devices first .. first + size - 1
    strategy       degrees whose product is size
    seconds        the call's duration: of all its parts together, without their dispatch
    resident       [stages] bytes that a device holds all the time for a train_step: trained parameters, their
                   gradients and optimizer, without what is offloaded; or for the call that runs the model of a role
                   that follows another: parameters and master weights; for a generation samples for later
                   iterations; 0 for other calls
    frozen         [stages] bytes of frozen weights that it holds all the time, once for all calls that share them
                   (RoleModel.weights): those of a frozen role unless they are offloaded, and those below adapters
    copy           [stages] bytes of a read-only copy of the trained parameters, or of the parameters while onloaded
    active         [stages] bytes beyond these while the call runs, or the evaluation that follows a train_step
    host           [stages] bytes that a device keeps in its host's memory: what is offloaded, copies for commits;
                   without parameters that train
    offload        as in its assignment
    onloaded       of an offloaded one: whether an onload brings the role's parameters and an offload frees them.
                   Those of a train_step stay, as if resident, where no other call runs meanwhile on its devices
    """

    first: int
    size: int
    strategy: ParallelStrategy
    micro_batches: int
    seconds: float
    resident: tuple[float, ...]
    frozen: tuple[float, ...]
    copy: tuple[float, ...]
    active: tuple[float, ...]
    host: tuple[float, ...]
    offload: bool = False
    onloaded: bool = False

    @property
    def assignment(self) -> CallAssignment:
        return CallAssignment(
            placement=_placement(self.first, self.strategy),
            micro_batches=self.micro_batches,
            offload=self.offload,
        )

    @property
    def active_bytes(self) -> float:
        """The most bytes that a device needs beyond parameters while the call runs."""
        return max(self.active)

    @property
    def held(self) -> list[float]:
        """[stages] bytes beyond `active` that a device certainly needs."""
        stages = zip(self.resident, self.frozen, self.copy, strict=True)
        return [r + f + c if self.onloaded else max(r + f, c) for r, f, c in stages]


def cut_points(n_hosts: int) -> tuple[int, ...]:
    """The hosts at which large meshes may begin and end: every host up to 16 hosts, else every sixteenth of them."""
    parts = min(n_hosts, ALL_CUTS)
    return tuple(i * n_hosts // parts for i in range(parts + 1))


def few_hosts(n_hosts: int) -> tuple[int, ...]:
    """Sizes, in hosts, of the small meshes at the start of a cluster: 1, 2, 4, ... up to half its first sixteenth."""
    half = cut_points(n_hosts)[1] // 2
    return tuple(2**i for i in range(half.bit_length()))


def candidate_meshes(cluster: Cluster) -> Iterator[DeviceMesh]:
    """The meshes of the class that the module describes, smallest first."""
    if cluster.n_hosts <= ALL_CUTS:
        yield from meshes(cluster)
        return
    cuts, per_host = cut_points(cluster.n_hosts), cluster.devices_per_host
    for size in (size for size in range(1, per_host + 1) if per_host % size == 0):
        yield from (DeviceMesh(cluster, first, size) for first in range(0, per_host, size))
    ranges = {(b - a, a) for a in cuts for b in cuts if a < b}
    for n in few_hosts(cluster.n_hosts):
        ranges |= {(n, 0), (n, n)}
    yield from (DeviceMesh(cluster, a * per_host, n * per_host) for n, a in sorted(ranges - {(1, 0)}))


LONG_TOKENS = 16_384
"""Tokens of a sequence with its prompt from which on the search divides sequences over ranks. Shorter ones fit a
device's memory, and there are more of them than devices: more choices would only slow the search."""


def strategies(problem: Problem, call: ModelFunctionCall, size: int) -> Iterator[ParallelStrategy]:
    """The strategies of a call on a mesh of `size` devices."""
    shape = problem.model.models[call.role].shape
    per_host = problem.cluster.devices_per_host
    most_tp = min(problem.tp_limit, size, shape.most_tp)
    for tp in range(1, most_tp + 1):
        if size % tp or (per_host % tp and tp % per_host):
            continue
        for pp in range(1, min(shape.layers, size // tp) + 1):
            for cp in _context_degrees(problem, call, tp):
                dp = size // (tp * pp * cp)
                if size == dp * tp * pp * cp and dp <= call.n_groups // call.blocks:
                    yield ParallelStrategy(dp, tp, pp, cp)


def _context_degrees(problem: Problem, call: ModelFunctionCall, tp: int) -> Iterator[int]:
    """The degrees of context parallelism that a call may have: 1, and where sequences are long, powers of 2 that
    divide a tp rank's query heads inside a host."""
    yield 1
    shape, workload, cp = problem.model.models[call.role].shape, problem.model.workload, 2
    if (
        call.kind == "generate"
        or not call.runs_model
        or workload.mean_tokens < LONG_TOKENS
        or shape.keeps_states
    ):
        return
    while shape.query_heads % (tp * cp) == 0 and problem.cluster.devices_per_host % (tp * cp) == 0:
        yield cp
        cp *= 2


def micro_batch_counts(call: ModelFunctionCall, strategy: ParallelStrategy, few: bool = False) -> list[int]:
    """The numbers of micro-batches that a call may have. Those of generation set how many sequences are decoded at a
    time: more need less memory and never less time. Powers of two are close enough.

    few  of training and inference only those that fill a pipeline, and the most
    """
    share = least_share(call, strategy.dp)
    if call.kind == "generate":
        return [count for count in GENERATION_CUTS if count == 1 or count * strategy.pp <= share]
    if few:
        return sorted({min(share, 2 * strategy.pp), share} if strategy.pp > 1 else {1, min(share, 2), share})
    counts, count = {share}, 1
    while count <= share:
        counts |= {count, min(share, count * strategy.pp)}
        count *= 2
    return sorted(counts)


def all_options(
    problem: Problem,
    deadline: Deadline = NO_DEADLINE,
    among: Mapping[str, Collection[Placement]] | None = None,
    few: bool = False,
) -> tuple[tuple[Option, ...], ...]:
    """The options of every call of the graph: of a call that may be offloaded the offloaded ones follow the resident
    ones, in the same order.

    An option that fits its devices' memory only if it is offloaded stands in both places.

    among  call -> placements of which only the meshes and strategies count
    few    with few numbers of micro-batches (`micro_batch_counts`), and sharded weights only where whole ones do not
           fit alone
    Raises ProblemError and OptionsTakeTooLongError as `call_options` does.
    """
    classes = problem.model.classes
    on_hosts = any(device.is_on_host for device in classes.profiles)

    known = dict[Hashable, list[Pair]]()

    def priced(sharded: bool) -> list[tuple[Pair, ...]]:
        return [
            call_options(
                problem,
                call,
                deadline,
                among[call.name] if among else None,
                few,
                not on_hosts and _may_offload(problem, call),
                sharded,
                known,
            )
            for call in problem.graph.calls
        ]

    options = priced(sharded=False)
    fastest = [min((pair.resident for pair in pairs), key=lambda option: option.seconds) for pairs in options]
    if not few and among is None and not _fit_together([[option] for option in fastest], classes):
        options = priced(sharded=True)
    resident = [tuple(pair.resident for pair in pairs) for pairs in options]
    if on_hosts or _fit_together(resident, classes):
        return tuple(resident)
    return tuple(
        (*own, *(pair.offloaded for pair in pairs if pair.offloaded is not None))
        for own, pairs in zip(resident, options, strict=True)
    )


def _may_offload(problem: Problem, call: ModelFunctionCall) -> bool:
    """Whether a call is a train_step, or the only one of a frozen role."""
    graph = problem.graph
    if graph.changes(call.role):
        trainer = graph.trainer(call.role)
        return trainer is not None and trainer.name == call.name
    return sum(other.role == call.role for other in graph.calls) == 1


def _fit_together(options: Sequence[Sequence[Option]], classes: DeviceClasses) -> bool:
    """Whether the largest of some options of every call fit on any one device together, all of their memory resident.

    options  [calls] options as `call_options` gives them as resident ones
    """
    fit_alone = not any(option.offload for own in options for option in own)
    return fit_alone and sum(map(_most_needed, options)) <= min(classes.rooms)


def _most_needed(options: Iterable[Option]) -> float:
    """An upper bound on the bytes of a device for a call alone."""
    # Options on meshes that are alike share the very same tuple of figures; one of each suffices.
    unlike = {id(option.active): option for option in options}.values()
    # The copy of a frozen role is what is frozen, unless it is offloaded; others may come on top.
    return max(
        max(
            max(r, c) + (f if f != c else 0.0)
            for r, f, c in zip(option.resident, option.frozen, option.copy, strict=True)
        )
        + option.active_bytes
        for option in unlike
    )


class Pair(NamedTuple):
    """An option, and the same with what may be offloaded in host memory; None where it may not."""

    resident: Option
    offloaded: Option | None

    def at(self, first: int) -> "Pair":
        """The same on the mesh that begins at device `first`."""
        resident, away = self
        return Pair(Option(first, *resident[1:]), None if away is None else Option(first, *away[1:]))


def call_options(
    problem: Problem,
    call: ModelFunctionCall,
    deadline: Deadline = NO_DEADLINE,
    among: Collection[Placement] | None = None,
    few: bool = False,
    offload: bool = False,
    sharded: bool = False,
    known: dict[Hashable, list[Pair]] | None = None,
) -> tuple[Pair, ...]:
    """All options of a call, sorted by mesh and strategy.

    among    placements of which only the meshes and strategies count
    few      with few numbers of micro-batches (`micro_batch_counts`)
    offload  with offloaded ones; where only the offloaded one fits, it stands for both
    sharded  with sharded weights also where whole ones fit
    known    gets what is priced, for the same arguments with another value of `sharded`
    Raises ProblemError when none fits; it names the smallest shortfall and the fields that would reduce it. Raises
    OptionsTakeTooLongError when the deadline has passed.
    """
    classes, cluster = problem.model.classes, problem.cluster
    places = (
        candidate_meshes(cluster)
        if among is None
        else sorted({DeviceMesh.of(cluster, placement.devices) for placement in among})
    )
    known = {} if known is None else known
    wanted = {placement.strategy for placement in among or ()}
    priced: dict[tuple[Any, ...], list[Pair]] = {}
    shortfalls: list[tuple[float, Option]] = []
    found = list[Pair]()
    for mesh in places:
        if not problem.allows(call.name, mesh.devices):
            continue
        like = mesh.size, classes.layout(mesh.first, mesh.size)
        if like not in priced:
            fitting: list[Pair] = []
            for strategy in strategies(problem, call, mesh.size):
                asked_for = {strategy, *_sharded(call, strategy)} & wanted if wanted else {strategy}
                placement = _placement(mesh.first, strategy)
                routes_alike = problem.model.routes_alike(call.role, placement)
                if not (asked_for and routes_alike and problem.draws(call, placement)):
                    continue
                if deadline.is_past():
                    raise OptionsTakeTooLongError(
                        f"Pricing the options of call {call.name!r} on a cluster of {cluster} takes longer than the "
                        "time limit. Raise it, or choose fewer devices for a host."
                    )
                rooms = _rooms(strategy, mesh.first, classes)
                price = partial(_fitting_pairs, problem, call, mesh.first, rooms, shortfalls, few, offload)
                whole = _once(known, (call.name, like, strategy), price) if strategy in asked_for else []
                fitting += whole
                lacks_whole = sharded or not any(not pair.resident.offload for pair in whole)
                for shares in _sharded(call, strategy):
                    if shares in asked_for or (lacks_whole and not wanted):
                        fitting += _once(known, (call.name, like, shares), price)
            priced[like] = fitting
        found += [pair.at(mesh.first) for pair in priced[like]]
    if not found:
        raise ProblemError(_none_fits(problem, call, shortfalls))
    return tuple(found)


def _once(
    known: dict[Hashable, list[Pair]],
    key: tuple[str, Hashable, ParallelStrategy],
    price: Callable[[ParallelStrategy], list[Pair]],
) -> list[Pair]:
    """The options under a strategy. key: call, meshes that are alike, strategy"""
    if key not in known:
        known[key] = price(key[2])
    return known[key]


def _sharded(call: ModelFunctionCall, strategy: ParallelStrategy) -> list[ParallelStrategy]:
    """The same strategy with sharded weights, if a call may have these."""
    if call.kind == "generate" or strategy.pp > 1 or strategy.copies == 1:
        return []
    return [replace(strategy, shard="parameters")]


def _fitting_pairs(
    problem: Problem,
    call: ModelFunctionCall,
    first: int,
    rooms: Sequence[tuple[int, int]],
    shortfalls: list[tuple[float, Option]],
    few: bool,
    offload: bool,
    strategy: ParallelStrategy,
) -> list[Pair]:
    """The options under a strategy on the mesh that begins at device `first` that fit; none is better than another in
    all. Adds to the shortfalls what each option lacks. rooms: as `_rooms` gives them"""
    counts, fits = micro_batch_counts(call, strategy, few), list[Pair]()
    # Of a generation the fewest micro-batches with which it fits: more would only take longer.
    for tried in [[count] for count in counts] if call.kind == "generate" else [counts]:
        alike = _prices(problem, call, strategy, first, tried)
        lacking = _lacking(alike, rooms)
        shortfalls += zip(lacking, alike, strict=True)
        pairs = [Pair(option, None) for option in alike]
        if offload:
            away = _offloaded(problem, call, alike)
            lacking_away = _lacking(away, rooms)
            shortfalls += zip(lacking_away, away, strict=True)
            pairs = list(map(Pair, alike, away))
            lacking = list(map(min, lacking, lacking_away))
        fits = [pair for lack, pair in zip(lacking, pairs, strict=True) if lack <= 0]
        if fits:
            break
    return [_fitting(pair, rooms) for pair in _pareto(fits)]


def _prices(
    problem: Problem, call: ModelFunctionCall, strategy: ParallelStrategy, first: int, counts: Sequence[int]
) -> list[Option]:
    """The options under a strategy on the mesh that begins at device `first`, for these numbers of micro-batches.

    Meshes with the same layout of device classes have the same prices.
    """
    model = problem.model
    placement = _placement(first, strategy)
    copy = tuple(map(float, model.parameter_bytes(call.role, placement)))
    trainer, follower = problem.graph.trainer(call.role), problem.graph.follower(call.role)
    resident, frozen = (0.0,) * strategy.pp, copy
    besides = host = (0.0,) * strategy.pp
    if follower is not None and follower.name == call.name:
        resident, frozen = model.following_bytes(call.role, placement), resident
        host = copied_bytes(model, call.role, placement, trained=False)
    if trainer is not None:
        frozen = tuple(map(float, model.frozen_bytes(call.role, placement)))
    if trainer is not None and trainer.name == call.name:
        resident = model.training_bytes(call.role, placement)
        host = copied_bytes(model, call.role, placement, trained=True)
        if call.role in problem.graph.evaluated:
            besides = model.evaluation(call.role, placement).active_bytes
    resident = tuple(map(add, resident, kept_samples_bytes(call, strategy, model.workload)))
    return [
        Option(
            first,
            strategy.size,
            strategy,
            count,
            cost.seconds * call.chunks,
            resident,
            frozen,
            copy,
            tuple(map(max, cost.active_bytes, besides)),
            host,
        )
        for count, cost in zip(counts, model.calls(call, placement, counts), strict=True)
    ]


def _offloaded(problem: Problem, call: ModelFunctionCall, alike: Sequence[Option]) -> list[Option]:
    """Options that differ only in micro-batches, with what may be offloaded in host memory."""
    model, one = problem.model, alike[0]
    if not problem.graph.changes(call.role):
        nothing = (0.0,) * len(one.frozen)
        kept = {"frozen": nothing, "host": one.copy, "offload": True, "onloaded": True}
        return [option._replace(**kept) for option in alike]
    placement, onloaded = one.assignment.placement, bool(problem.graph.while_idle(call.role))
    kept = {
        "resident": model.training_bytes(call.role, placement, offload=True, away=onloaded),
        "host": tuple(map(add, one.host, model.state_bytes(call.role, placement, trained=True))),
        "offload": True,
        "onloaded": onloaded,
    }
    costs = model.calls(call, placement, [option.micro_batches for option in alike], offload=True)
    return [
        option._replace(seconds=cost.seconds * call.chunks, **kept)
        for option, cost in zip(alike, costs, strict=True)
    ]


def _fitting(pair: Pair, rooms: Sequence[tuple[int, int]]) -> Pair:
    """The pair; where only its offloaded option fits, that stands in both places."""
    if pair.offloaded is None or _lacking([pair.resident], rooms)[0] <= 0:
        return pair
    return Pair(pair.offloaded, pair.offloaded)


def _rooms(strategy: ParallelStrategy, first: int, classes: DeviceClasses) -> list[tuple[int, int]]:
    """[stages] (bytes of memory, device): the device of each stage that has the least memory.

    first  the first device of the mesh
    """
    width = strategy.copies * strategy.tp
    return [
        min((classes.rooms[number], start + offset) for offset, number in classes.layout(start, width))
        for start in range(first, first + strategy.size, width)
    ]


def _lacking(alike: Sequence[Option], rooms: Sequence[tuple[int, int]]) -> list[float]:
    """[options] bytes that the scarcest device lacks if the call runs alone; negative if it fits.

    alike  options that differ only in micro-batches; rooms: as `_rooms` gives them
    """
    left = [memory_bytes - held for held, (memory_bytes, _) in zip(alike[0].held, rooms, strict=True)]
    return [max(map(sub, option.active, left)) for option in alike]


def _pareto(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs that no other one equals or beats in both seconds and memory of every stage. They differ only in
    micro-batches, so it is the same for offloaded options."""
    kept: list[Pair] = []
    by_seconds = {pair.resident: pair for pair in pairs}
    for option in sorted(by_seconds, key=lambda o: (o.seconds, o.active_bytes, o.micro_batches)):
        if not any(all(a <= b for a, b in zip(k.resident.active, option.active, strict=True)) for k in kept):
            kept.append(by_seconds[option])
    return kept


def _none_fits(problem: Problem, call: ModelFunctionCall, shortfalls: list[tuple[float, Option]]) -> str:
    where = f"a cluster of {problem.cluster}"
    if call.name in problem.pools:
        where = f"its {problem.pools[call.name]} of {where}"
    if not shortfalls:
        return (
            f"Call {call.name!r} has no strategy on {where} with tp up to "
            f"{problem.tp_limit}: {groups_of(call)} in {blocks_of(call)}. "
            "Enlarge the batch or the cluster."
        )
    missing, option = min(shortfalls, key=lambda pair: (pair[0], pair[1].size))
    classes = problem.model.classes
    rooms = _rooms(option.strategy, option.first, classes)
    stages = zip(option.held, option.active, rooms, strict=True)
    needs = ((held + active, room) for held, active, room in stages)
    _, device, needed = max(
        (needed - memory_bytes, device, needed) for needed, (memory_bytes, device) in needs
    )
    name = classes.profile(device).name
    is_state = call.kind == "train_step" and not option.offload
    parameters = f"{call.role}: {'optimizer' if is_state else 'copy'}"
    largest = active_part(call) if option.active_bytes > max(option.held) else parameters
    return (
        f"Call {call.name!r} fits no mesh of {where}: at best, on {option.size} devices with "
        f"{option.strategy} and {option.micro_batches} micro-batches, device {device} ({name}) lacks {missing:.0f} "
        f"of {needed:.0f} bytes. {remedy(largest)}"
    )
