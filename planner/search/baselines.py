"""Baselines: plans by rule that fit memory.

heuristic  Megatron's advice: tensor parallelism inside a host, pipeline stages across hosts, data parallelism for the
           rest (arXiv:2104.04473). Where a problem limits tp (`max_tp`), stages also divide a host
symmetric  all calls are alike
hybrid     all calls on all devices: training and inference as data-parallel as memory allows, generation with tensor
           parallelism over a host, as in DeepSpeed-Chat's hybrid engine (arXiv:2308.01320, section 4)
disjoint   every model on its own devices, as OpenRLHF places them (arXiv:2405.11143)
colocated  HybridFlow's mapping (arXiv:2409.19256, section 6): the best division of the roles into sets, each set on
           its own devices. A role's generation regroups the devices of its training: its tp and pp divide those, so
           that each device keeps a part of what it has

Of the last two, sets of roles get consecutive meshes, the largest first. One mesh grows at a time, the one that
shortens the iteration most, until the cluster is full. Then two sets exchange devices as long as that helps. They
choose among the search's options, so where a sequence does not fit otherwise its tokens are divided (cp), as verl and
OpenRLHF do. The sources of the first three have no such thing, and they do not either.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from prefect_rlhf.planner.plan.build import PlanError, build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph, blocks_of, groups_of
from prefect_rlhf.planner.plan.mesh import Cluster, meshes_from_start
from prefect_rlhf.planner.plan.workload import fullest_share, least_share
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.plans import (
    MemoryPeak,
    PlanPrice,
    plan_memory,
    price_plan,
    scarcest_device,
    shortfall,
)
from prefect_rlhf.planner.pricing.problem import NO_DEADLINE, Deadline, Problem
from prefect_rlhf.planner.search.compiled.tables import Tables, Value
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.spec import (
    CallAssignment,
    CallNode,
    ExecutionPlan,
    ModelFunctionCall,
    OnloadNode,
    PlanNode,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """A role's limits on the strategy.

    replica_devices  the fewest devices whose memory holds one replica and its state
    max_tp, max_pp   the numbers of the model's query heads and layers; None: no limit
    """

    replica_devices: int = 1
    max_tp: int | None = None
    max_pp: int | None = None

    def allow(self, strategy: ParallelStrategy) -> bool:
        """Whether a strategy is within the limits."""
        return (
            strategy.tp * strategy.pp >= self.replica_devices
            and (self.max_tp is None or strategy.tp <= self.max_tp)
            and (self.max_pp is None or strategy.pp <= self.max_pp)
        )


NO_LIMITS = Limits()

Assignments = Mapping[str, CallAssignment]
Rule = Callable[[DataflowGraph, Cluster, Mapping[str, Limits], int], Assignments]


class Priced(NamedTuple):
    """A plan and its price."""

    plan: ExecutionPlan
    price: PlanPrice

    def fitting(self, model: CostModel) -> "Priced":
        """Itself. Raises PlanError, with device, bytes and remedy, when it does not fit memory."""
        missing = shortfall(self.price, model)
        if missing is not None:
            raise PlanError(missing)
        return self


def heuristic_plan(problem: Problem, deadline: Deadline = NO_DEADLINE) -> Priced:
    """Every call on the whole cluster, with the smallest replica of its role that fits memory.

    It has no larger tp than the problem allows, but knows no pools: `Problem.refuse` says where it leaves them.
    Raises PlanError when nothing fits, and when nothing that was tried before the deadline does.
    """
    return _fit(problem, heuristic, deadline)


def symmetric_plan(problem: Problem, deadline: Deadline = NO_DEADLINE) -> Priced:
    """All calls alike on the whole cluster, with the smallest replica with which everything fits memory.

    Limits and errors are those of `heuristic_plan`.
    """
    return _fit(problem, symmetric, deadline)


def hybrid_plan(problem: Problem, deadline: Deadline = NO_DEADLINE) -> Priced:
    """Every call on the whole cluster with the smallest replica that fits memory, generation with tp over a host.

    Limits and errors are those of `heuristic_plan`.
    """
    return _fit(problem, hybrid, deadline)


def priced_plan(graph: DataflowGraph, model: CostModel, assignments: Assignments) -> Priced:
    """The plan of given assignments, whether it fits memory or not.

    Raises PlanError when they are for another graph or cluster, and when a strategy does not suit its model.
    """
    check_strategies(graph, model, assignments)
    plan = _plan(graph, model, assignments)
    return Priced(plan, price_plan(plan, model))


def check_strategies(graph: DataflowGraph, model: CostModel, assignments: Assignments) -> None:
    """Raises PlanError, which names the call, when a strategy does not suit its model."""
    for call in graph.calls:
        if call.name in assignments:
            try:
                model.call(call, assignments[call.name])
            except ValueError as error:
                raise PlanError(f"Call {call.name!r}: {error}") from None


def _plan(graph: DataflowGraph, model: CostModel, assignments: Assignments) -> ExecutionPlan:
    """The plan of assignments, in the order of calls that is fastest by their seconds."""

    def duration_s(node: PlanNode) -> float:
        seconds = model.call(node.call, node.assignment).seconds if isinstance(node, CallNode) else 0.0
        return seconds + model.classes.dispatch_s

    def copy_s(node: OnloadNode) -> float:
        return model.onload_s(node.role, node.placement)

    return build_plan(graph, assignments, model.cluster, duration_s, copy_s=copy_s)


class _Demand(NamedTuple):
    """What a rule has to satisfy.

    replicas  role -> the fewest devices of a replica
    cuts      call -> factor on its number of micro-batches
    """

    replicas: Mapping[str, int]
    cuts: Mapping[str, int]


def _fit(problem: Problem, rule: Rule, deadline: Deadline) -> Priced:
    """Follow a rule with growing replicas and micro-batches until the plan fits memory.

    While it does not fit, the largest part of the fullest device's memory that can still shrink is reduced: the
    role's replica doubles, or the call's micro-batches double, as long as a dp rank has enough sequences.
    Raises PlanError, with the shortfall of the last plan, when nothing can shrink or the deadline has passed; and
    what the rule raises at first.
    """
    graph, model = problem.graph, problem.model

    def follow(demand: _Demand) -> Assignments:
        return rule(graph, model.cluster, _limits(model, demand.replicas), problem.tp_limit)

    uncut = {call.name: 1 for call in graph.calls}
    demand = _Demand(_least_replicas(graph, model), uncut)
    try:
        assignments = follow(demand)
    except PlanError:  # the weights do not fit: the plan on whole devices says how many bytes lack
        demand = _Demand(dict.fromkeys(graph.roles, 1), uncut)
        assignments = follow(demand)
    while True:
        assignments = {
            name: _cut(graph.call(name), given, demand.cuts[name]) for name, given in assignments.items()
        }
        plan = _plan(graph, model, assignments)
        memory = plan_memory(plan, model)
        missing, peaks = shortfall(memory, model), memory.peaks
        if missing is None:
            return Priced(plan, price_plan(plan, model))
        if deadline.is_past():
            raise PlanError(missing)
        scarcest = scarcest_device(peaks, model)
        fullest = peaks[scarcest]
        if fullest.total_bytes <= model.classes.room_bytes(scarcest):
            raise PlanError(missing)  # a host's memory lacks: no other replica keeps less there
        for larger in _larger_demands(fullest, graph, assignments, demand):
            if deadline.is_past():
                raise PlanError(missing)
            with suppress(PlanError):
                assignments, demand = follow(larger), larger
                break
        else:
            raise PlanError(missing)


def _least_replicas(graph: DataflowGraph, model: CostModel) -> dict[str, int]:
    """Role -> the least power of two of devices among which its weights alone fit: each try of fewer costs a plan."""
    most_bytes = max(model.classes.rooms)
    found = {}
    for role in graph.roles:
        alone = Placement((0,), ParallelStrategy())
        (weights,), (frozen,) = model.parameter_bytes(role, alone), model.frozen_bytes(role, alone)
        found[role] = 1 << max(0, math.ceil((weights + frozen) / most_bytes) - 1).bit_length()
    return found


def _limits(model: CostModel, replicas: Mapping[str, int]) -> dict[str, Limits]:
    shapes = {role: model.models[role].shape for role in replicas}
    return {
        role: Limits(replica_devices, shapes[role].query_heads, shapes[role].layers)
        for role, replica_devices in replicas.items()
    }


def _cut(call: ModelFunctionCall, given: CallAssignment, factor: int) -> CallAssignment:
    """The assignment with `factor` times as many micro-batches, at most as many as a dp rank has sequences."""
    most = fullest_share(call, given.placement.strategy.dp)
    return given.model_copy(update={"micro_batches": min(given.micro_batches * factor, most)})


def _larger_demands(
    peak: MemoryPeak, graph: DataflowGraph, found: Assignments, demand: _Demand
) -> Iterator[_Demand]:
    """Demands that may lower a peak, for its largest part first: twice the micro-batches, then twice the replica.

    Of a generation the replica comes first: fewer sequences at a time take longer.
    """
    for part in sorted(peak.parts, key=lambda name: -peak.parts[name]):
        role = owner = part.split(":")[0]
        cuts, generates = list[_Demand](), False
        if owner not in demand.replicas:
            call, given = graph.call(owner), found[owner]
            role, generates = call.role, call.kind == "generate"
            at_once = 2 * given.micro_batches * (given.placement.strategy.pp if generates else 1)
            if at_once <= least_share(call, given.placement.strategy.dp):
                cuts.append(demand._replace(cuts={**demand.cuts, owner: 2 * demand.cuts[owner]}))
        larger = demand._replace(replicas={**demand.replicas, role: 2 * demand.replicas[role]})
        yield from [larger, *cuts] if generates else [*cuts, larger]


def heuristic(
    graph: DataflowGraph,
    cluster: Cluster,
    limits: Mapping[str, Limits] | None = None,
    max_tp: int | None = None,
) -> dict[str, CallAssignment]:
    """Every call on the whole cluster, with the smallest replica that the limits of its role allow.

    limits  role -> Limits
    max_tp  the largest tp of any call, which stages then make up for; default: the number of devices of a host
    Raises PlanError when no strategy is within the limits.
    """
    limits = limits or {}
    return {
        call.name: _assign(call, cluster, [limits.get(call.role, NO_LIMITS)], max_tp) for call in graph.calls
    }


def symmetric(
    graph: DataflowGraph,
    cluster: Cluster,
    limits: Mapping[str, Limits] | None = None,
    max_tp: int | None = None,
) -> dict[str, CallAssignment]:
    """All calls on the whole cluster under one strategy that is within the limits of every role.

    Raises PlanError when there is none.
    """
    widest = min(graph.calls, key=lambda call: call.n_groups // call.blocks)
    found = _assign(widest, cluster, list((limits or {}).values()), max_tp)
    strategy = found.placement.strategy
    return {
        call.name: found.model_copy(update={"micro_batches": _micro_batches(call, strategy)})
        for call in graph.calls
    }


def hybrid(
    graph: DataflowGraph,
    cluster: Cluster,
    limits: Mapping[str, Limits] | None = None,
    max_tp: int | None = None,
) -> dict[str, CallAssignment]:
    """As `heuristic`, but generation has the largest tp of at most a host that the limits of its role allow.

    Raises PlanError when no strategy is within the limits.
    """
    limits = limits or {}
    return {
        call.name: _assign(
            call, cluster, [limits.get(call.role, NO_LIMITS)], max_tp, wide=call.kind == "generate"
        )
        for call in graph.calls
    }


def _assign(
    call: ModelFunctionCall, cluster: Cluster, limits: list[Limits], max_tp: int | None, wide: bool = False
) -> CallAssignment:
    """The largest mesh from device 0 on that has a strategy within the limits, and the first such strategy.

    wide  the strategies with the largest tp come first
    """
    most_dp = call.n_groups // call.blocks
    most_pp = min((limit.max_pp for limit in limits if limit.max_pp is not None), default=cluster.n_devices)
    for mesh in meshes_from_start(cluster):
        strategies = _strategies(mesh.size, cluster.devices_per_host, max_tp, most_pp)
        for strategy in sorted(strategies, key=lambda one: -one.tp if wide else 0):
            if strategy.dp <= most_dp and all(limit.allow(strategy) for limit in limits):
                return CallAssignment(
                    placement=Placement(mesh.devices, strategy), micro_batches=_micro_batches(call, strategy)
                )
    raise PlanError(
        f"Call {call.name!r}: no strategy on a cluster of {cluster} suits {', '.join(map(str, limits))} "
        f"and {groups_of(call)} in {blocks_of(call)}. Enlarge the cluster or the batch."
    )


def _micro_batches(call: ModelFunctionCall, strategy: ParallelStrategy) -> int:
    """Two micro-batches per stage, as far as a dp rank has sequences; one without a pipeline.

    A generation has one: its groups in flight fill the pipeline already, and all its sequences are decoded at once.
    """
    if strategy.pp == 1 or call.kind == "generate":
        return 1
    return max(1, min(2 * strategy.pp, least_share(call, strategy.dp)))


def _strategies(
    size: int, devices_per_host: int, max_tp: int | None, most_pp: int
) -> Iterator[ParallelStrategy]:
    """Strategies on a mesh, smallest replica first: tp grows up to a host's devices, or to their largest divisor
    within `max_tp`; then pp grows over the rest, up to `most_pp`."""
    host, widest = min(size, devices_per_host), 1
    for tp in range(1, min(host, max_tp or host) + 1):
        if host % tp == 0:
            widest = tp
            yield ParallelStrategy(size // tp, tp, 1)
    rest = size // widest
    for pp in range(2, min(rest, most_pp) + 1):
        if rest % pp == 0:
            yield ParallelStrategy(rest // pp, widest, pp)


MeshSizes = tuple[int, ...]
Rank = tuple[float, float, float]  # excess bytes, seconds per iteration, seconds of all calls

STEP = 1.15  # the least ratio of a mesh's size to the next smaller size that is tried


RoleSets = Sequence[Sequence[str]]


class _SideBySide:
    """The best choices for tuples of mesh sizes, in devices: one size for each of some sets of roles.

    regroups  whether a role's generation may only regroup the devices of its training
    deadline  after it a choice is taken as far as its descent has come
    """

    def __init__(
        self, tables: Tables, sets: RoleSets, regroups: bool = False, deadline: Deadline = NO_DEADLINE
    ) -> None:
        self.tables, self.deadline = tables, deadline
        graph = tables.problem.graph
        self.sets = sets
        self.calls = [[i for i, call in enumerate(graph.calls) if call.role in roles] for roles in sets]
        self.regrouped = list[tuple[int, int]]()  # (generation, training) of a role
        for i, call in enumerate(graph.calls):
            trainer = graph.trainer(call.role) if regroups and call.kind == "generate" else None
            if trainer is not None:
                self.regrouped.append((i, graph.calls.index(trainer)))
        self.sizes = [self._common_sizes(calls) for calls in self.calls]
        self.best: dict[MeshSizes, tuple[Rank, list[int]] | None] = {}
        self.evaluations = 0

    def _common_sizes(self, calls: Sequence[int]) -> list[int]:
        """Sizes of meshes on which all given calls have options, thinned out to ratios of at least STEP."""
        common = set.intersection(*({o.size for o in self.tables.options[call]} for call in calls))
        kept: list[int] = []
        for size in sorted(common):
            if not kept or size >= STEP * kept[-1]:
                kept.append(size)
        return kept

    def smallest(self) -> MeshSizes:
        """The smallest meshes that fit side by side.

        For rising sizes n, each set gets its smallest mesh of at least n devices. Very small meshes may have no
        room, because on large clusters they begin only at a few hosts (planner/pricing/options.py).
        """
        tried = [
            tuple(next((size for size in own if size >= least), own[-1]) for own in self.sizes)
            for least in sorted({size for own in self.sizes for size in own})
        ]
        return next((sizes for sizes in tried if self.rank(sizes)[0] < float("inf")), tried[0])

    def largest(self) -> list[int] | None:
        """The fastest options on the largest meshes of about equal size that fit side by side; None if there are
        none."""
        if not all(self.sizes):
            return None
        for most in sorted({size for own in self.sizes for size in own}, reverse=True):
            sizes = tuple(max((size for size in own if size <= most), default=own[0]) for own in self.sizes)
            if allowed := self._allowed(sizes):
                return self._fastest(allowed)
        return None

    def _fastest(self, allowed: Sequence[Sequence[int]]) -> list[int]:
        """The fastest of each call's allowed options."""
        options = self.tables.options
        return [min(numbers, key=lambda n: options[c][n].seconds) for c, numbers in enumerate(allowed)]

    def rank(self, sizes: MeshSizes) -> Rank:
        """The rank of the best choice on meshes of these sizes, lower is better; infinite if they do not fit side by
        side."""
        if sizes not in self.best:
            self.best[sizes] = self._settle(sizes)
        settled = self.best[sizes]
        return settled[0] if settled else (float("inf"), 0.0, 0.0)

    def _settle(self, sizes: MeshSizes) -> tuple[Rank, list[int]] | None:
        """Coordinate descent: the best option of one call after another, until none improves."""
        allowed = self._allowed(sizes)
        if allowed is None:
            return None
        choice = self._fastest(allowed)
        best = self._rank(choice)
        improved = True
        while improved:
            improved = False
            for call, numbers in enumerate(allowed):
                for number in numbers:
                    if self.deadline.is_past():
                        return best, choice
                    changed = [*choice[:call], number, *choice[call + 1 :]]
                    if number != choice[call] and (rank := self._rank(changed)) < best:
                        choice, best, improved = changed, rank, True
        return best, choice

    def _rank(self, choice: Sequence[int]) -> Rank:
        apart = sum(not self._divides(choice, *pair) for pair in self.regrouped)
        if apart:
            return float("inf"), apart, 0.0
        self.evaluations += 1
        value: Value = self.tables.evaluate(choice)
        seconds = sum(self.tables.options[call][number].seconds for call, number in enumerate(choice))
        return value.excess_bytes, value.time_s, seconds

    def _divides(self, choice: Sequence[int], generation: int, training: int) -> bool:
        """Whether a generation's tp and pp divide those of its role's training."""
        drawn = self.tables.options[generation][choice[generation]].strategy
        trained = self.tables.options[training][choice[training]].strategy
        return not (trained.tp % drawn.tp or trained.pp % drawn.pp)

    def _allowed(self, sizes: MeshSizes) -> list[list[int]] | None:
        """[calls] numbers of each call's options on its set's mesh; None if the meshes do not fit side by side."""
        allowed: list[list[int]] = [[] for _ in self.tables.calls]
        position = 0
        for one in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
            starts = [
                {o.first for o in self.tables.options[call] if o.size == sizes[one] and o.first >= position}
                for call in self.calls[one]
            ]
            first = min(set.intersection(*starts), default=None)
            if first is None:
                return None
            position = first + sizes[one]
            for call in self.calls[one]:
                allowed[call] = [
                    n
                    for n, o in enumerate(self.tables.options[call])
                    if o.first == first and o.size == sizes[one]
                ]
        return allowed if all(allowed) else None

    def grown(self, sizes: MeshSizes) -> Iterator[MeshSizes]:
        """All ways to make one set's mesh a step larger."""
        for one in range(len(sizes)):
            yield from self._stepped(sizes, one, 1)

    def exchanged(self, sizes: MeshSizes) -> Iterator[MeshSizes]:
        """All ways to make one set's mesh a step smaller, and another's a step larger or not."""
        for loser, winner in permutations(range(len(sizes)), 2):
            for smaller in self._stepped(sizes, loser, -1):
                yield smaller
                yield from self._stepped(smaller, winner, 1)

    def _stepped(self, sizes: MeshSizes, one: int, step: int) -> Iterator[MeshSizes]:
        place = self.sizes[one].index(sizes[one]) + step
        if 0 <= place < len(self.sizes[one]):
            yield (*sizes[:one], self.sizes[one][place], *sizes[one + 1 :])

    def best_within(self, deadline: Deadline) -> tuple[Rank, list[int]] | None:
        """The best choice that growing and exchanging find, with its rank; after the deadline, the best so far. None
        where no meshes fit side by side."""
        best = sizes = self.smallest()
        while not deadline.is_past():
            fitting = [grown for grown in self.grown(sizes) if self.rank(grown)[0] < float("inf")]
            if not fitting:
                break
            sizes = min(fitting, key=self.rank)
            best = min(best, sizes, key=self.rank)
        while not deadline.is_past():
            better = min(self.exchanged(best), key=self.rank, default=best)
            if self.rank(better) >= self.rank(best):
                break
            best = better
        return self.best[best]


def side_by_side(tables: Tables) -> list[int] | None:
    """A choice with every role on its own devices, about equally many for each; None if there is none.

    It may lack memory. It takes no search, and it is a start for annealing that is far from plans that share devices.
    """
    return _SideBySide(tables, _alone(tables)).largest()


def _alone(tables: Tables) -> RoleSets:
    return [(role,) for role in tables.problem.graph.roles]


def disjoint_choice(tables: Tables, deadline: Deadline = NO_DEADLINE) -> tuple[list[int], int]:
    """(choice, evaluations): every role on its own devices; after the deadline, the best so far.

    Raises PlanError when the cluster has fewer devices than roles need, or memory does not suffice.
    """
    search = _SideBySide(tables, _alone(tables))
    for (role,), sizes in zip(search.sets, search.sizes, strict=True):
        if not sizes:
            raise PlanError(
                f"The calls of {role} fit no mesh of one size on a cluster of {tables.problem.cluster}, as roles on "
                "devices of their own have to. Enlarge the cluster, or let roles share devices."
            )
    ranked = search.best_within(deadline)
    if ranked is None or ranked[0][0] > 0:
        short = f": at best a device lacks {ranked[0][0]:.0f} bytes" if ranked else ""
        raise PlanError(
            f"The roles {', '.join(tables.problem.graph.roles)} do not fit a cluster of {tables.problem.cluster} on "
            f"devices of their own{short}. Enlarge the cluster, or let roles share devices."
        )
    return ranked[1], search.evaluations


def colocated_choice(tables: Tables, deadline: Deadline = NO_DEADLINE) -> tuple[list[int], int]:
    """(choice, evaluations) of HybridFlow's mapping: every division of the roles into sets is tried, each set on its
    own devices, and the best one found is taken; after the deadline, the best so far. The division into one set comes
    first.

    Raises PlanError when memory suffices for none of those that were tried.
    """
    best: tuple[Rank, list[int]] | None = None
    evaluations = 0
    for sets in divisions(tables.problem.graph.roles):
        search = _SideBySide(tables, sets, regroups=True, deadline=deadline)
        ranked = search.best_within(deadline) if all(search.sizes) else None
        evaluations += search.evaluations
        if ranked is not None and ranked[0][0] <= 0 and (best is None or ranked[0] < best[0]):
            best = ranked
        if deadline.is_past():
            break
    if best is None and deadline.is_past():
        raise PlanError(
            f"Of the divisions of the roles {', '.join(tables.problem.graph.roles)} into sets on devices of their "
            f"own, none of those tried in time fits a cluster of {tables.problem.cluster}. Raise the time limit, "
            "enlarge the cluster, or choose another mode."
        )
    if best is None:
        raise PlanError(
            f"No division of the roles {', '.join(tables.problem.graph.roles)} into sets on devices of their own "
            f"fits a cluster of {tables.problem.cluster}, where generation only regroups the devices of training. "
            "Enlarge the cluster, or choose another mode."
        )
    return best[1], evaluations


def divisions(roles: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """All divisions of some roles into sets, those of fewer sets first."""

    def divided(rest: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
        if not rest:
            yield []
            return
        for sets in divided(rest[1:]):
            for place, members in enumerate(sets):
                yield [*sets[:place], (rest[0], *members), *sets[place + 1 :]]
            yield [(rest[0],), *sets]

    yield from sorted(divided(roles), key=len)
