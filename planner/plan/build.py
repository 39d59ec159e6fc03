"""From assignments to an execution plan: checks, inserted nodes, one total order, and the edges between nodes.

planner.plan.template decides which nodes make an assignment legal (fetch, transfers, reallocations, releases,
onloads, offloads, syncs, saves, evaluations) and what they wait for; here they get their devices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from prefect_rlhf.planner.plan.graph import FETCH, DataflowGraph, blocks_of, groups_of
from prefect_rlhf.planner.plan.mesh import Cluster, DeviceMesh, MeshError
from prefect_rlhf.planner.plan.order import (
    OrderRule,
    call_orders,
    fastest_order,
    levels,
    node_order,
    with_trailing,
)
from prefect_rlhf.planner.plan.steady_state import copy_of, with_copies, work_of
from prefect_rlhf.planner.plan.template import PlanTemplate, Slot, plan_template
from prefect_rlhf.planner.plan.workload import fullest_share
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import Balance
from prefect_rlhf.rlhf_tasks.spec import (
    NODE_KINDS,
    CallAssignment,
    CallNode,
    DataSide,
    EvaluateNode,
    ExecutionPlan,
    FetchNode,
    ModelFunctionCall,
    OnloadNode,
    PlanNode,
    ReallocateNode,
    RolePlacements,
    SaveSamplesNode,
    SyncNode,
    TransferNode,
    side_of,
)
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError


@dataclass(frozen=True)
class Draft:
    """Nodes without edges, by name, and the template that has the edges."""

    nodes: Mapping[str, PlanNode]
    template: PlanTemplate


def draft(graph: DataflowGraph, assignments: Mapping[str, CallAssignment]) -> Draft:
    """All nodes of one iteration with their data and version edges."""
    source = assignments[graph.source.name]
    by_tokens = [call for call in graph.calls if assignments[call.name].balance == "tokens"]
    template = plan_template(
        graph,
        where={
            FETCH: where(graph.source, source.placement, "count"),
            **{
                c.name: where(c, assignments[c.name].placement, assignments[c.name].balance)
                for c in graph.calls
            },
        },
        placement={call.name: assignments[call.name].placement for call in graph.calls},
        dealt_by={call.name: call.token_key for call in by_tokens},
        offloaded={call.name for call in graph.calls if _comes_and_goes(call, graph, assignments)},
    )
    return Draft({name: _node(slot, graph, assignments) for name, slot in template.slots.items()}, template)


def _comes_and_goes(
    call: ModelFunctionCall, graph: DataflowGraph, assignments: Mapping[str, CallAssignment]
) -> bool:
    """Whether a role's parameters leave a call's devices while it is idle: if the call is offloaded, and the role is
    frozen or another call may use one of these devices meanwhile."""
    if not assignments[call.name].offload or graph.trainer(call.role) is None:
        return assignments[call.name].offload
    home = set(assignments[call.name].placement.devices)
    return any(home & set(assignments[other].placement.devices) for other in graph.while_idle(call.role))


def role_placements(
    graph: DataflowGraph, assignments: Mapping[str, CallAssignment]
) -> dict[str, RolePlacements]:
    """The placements of each role; a trained role's training placement comes first, then those of its copies. Of a
    role that follows another, the placement where its model runs comes first."""
    found = dict[str, RolePlacements]()
    for role in graph.roles:
        trainer = graph.trainer(role)
        calls = [call for call in graph.calls if call.role == role]
        if (first := trainer or graph.follower(role)) is not None:
            calls.insert(0, first)
        placements = dict.fromkeys(assignments[call.name].placement for call in calls)
        offloaded = dict.fromkeys(a.placement for call in calls if (a := assignments[call.name]).offload)
        found[role] = RolePlacements(
            trained=trainer is not None,
            placements=tuple(placements),
            offloaded=tuple(offloaded),
            follows=graph.follows.get(role, ""),
        )
    return found


def where(
    call: ModelFunctionCall, placement: Placement, balance: Balance
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Where a call's samples lie (docs/architecture.md, "who holds which sample"): heads, and how they are dealt. Two
    calls have every sample on the same rank if and only if these are equal.

    With one dp rank, all samples are on its head. If samples are dealt by count, the number of blocks (mini-batches
    or parts) matters only where dp does not divide a block's groups. If they are dealt by tokens, two calls agree
    when they have the same number of blocks and the same key gives the lengths.
    """
    return placement.heads, dealing(call, placement.strategy.dp, balance)


def dealing(call: ModelFunctionCall, dp: int, balance: Balance) -> tuple[str, ...]:
    """What decides, apart from the heads, which dp rank has a sample: (), ("count",), ("count", blocks) or
    ("tokens", blocks, key). Blocks are mini-batches, or parts."""
    if dp == 1:
        return ()
    if balance == "tokens":
        return ("tokens", str(call.blocks), call.token_key)
    if call.n_groups % (dp * call.blocks) == 0:
        return ("count",)
    return ("count", str(call.blocks))


def _source_side(slot: Slot, graph: DataflowGraph, assignments: Mapping[str, CallAssignment]) -> DataSide:
    """How a transfer's samples are dealt at their source; fetched rows are dealt by count."""
    if slot.source == FETCH:
        source = graph.source
        return side_of(source, assignments[source.name].model_copy(update={"balance": "count"}), slot.part)
    return side_of(graph.call(slot.source), assignments[slot.source], slot.part)


def _node(slot: Slot, graph: DataflowGraph, assignments: Mapping[str, CallAssignment]) -> PlanNode:
    call, here = graph.call(slot.call), assignments[slot.call]
    match slot.kind:
        case "fetch":
            return FetchNode(
                name=slot.name,
                call=call.name,
                placement=here.placement,
                keys=slot.keys,
                mini_batches=call.blocks,
                group_size=call.group_size,
                lead=call.lead,
            )
        case "call":
            return CallNode(name=slot.name, call=call, assignment=here, part=slot.part, lead=call.lead)
        case "transfer":
            return TransferNode(
                name=slot.name,
                consumer=call.name,
                source=_source_side(slot, graph, assignments),
                destination=side_of(call, here, slot.part),
                keys=slot.keys,
                part=slot.part,
                lead=call.lead,
            )
        case "reallocate":
            return ReallocateNode(
                name=slot.name,
                role=call.role,
                source=assignments[slot.source].placement,
                destination=here.placement,
            )
        case "sync":
            return SyncNode(
                name=slot.name,
                role=call.role,
                leader=graph.follows[call.role],
                source=assignments[slot.source].placement,
                destination=here.placement,
            )
        case "save_samples":
            return SaveSamplesNode(name=slot.name, call=call.name, placement=here.placement, lead=call.lead)
        case "evaluate" | "evaluate_first":
            at_start = slot.kind == "evaluate_first"
            return EvaluateNode(name=slot.name, role=call.role, placement=here.placement, at_start=at_start)
        case kind:
            return NODE_KINDS[kind](name=slot.name, role=call.role, placement=here.placement)


class PlanError(ConfigError):
    """The assignments make no plan; the message names the values at fault and what to change."""


_WORK_S = {"generate": 8.0, "inference": 1.0, "train_step": 3.0}
"""Rough seconds of a call on one device, used only to compare orders of nodes; ratios as in RLHF practice."""

_MOVE_S = 0.02
"""Rough seconds of any other node, for the same purpose."""


def rough_duration_s(node: PlanNode) -> float:
    """Rough seconds of a node, for ordering nodes where there is no profile."""
    if isinstance(node, CallNode):
        return _WORK_S[node.call.kind] / len(node.devices)
    return _MOVE_S


def rough_copy_s(_: OnloadNode) -> float:
    """Rough seconds of the copy that an onload starts."""
    return 0.1


def build_plan(
    graph: DataflowGraph,
    assignments: Mapping[str, CallAssignment],
    cluster: Cluster,
    duration_s: Callable[[PlanNode], float] = rough_duration_s,
    call_order: Sequence[str] | None = None,
    copy_s: Callable[[OnloadNode], float] = rough_copy_s,
) -> ExecutionPlan:
    """The execution plan of a graph under assignments (call -> placement, micro-batches, balance, order).

    duration_s  seconds of a node; decides only the order where none is given
    call_order  all calls in a topological order of the graph; planner.plan.order then places the inserted
                nodes. None: the order that the assignments give, or, where they give none, the fastest one
                by `duration_s` and `copy_s`
    copy_s      seconds of the copy that an onload starts

    Raises PlanError when an assignment is missing or names an unknown call; when its devices are not a device
    mesh of the cluster; when it has more dp ranks than a mini-batch or part has groups, or more micro-batches than a
    dp rank has of these sequences; when it offloads a call of a trained role other than its train_step; and when the
    order does not name every call once or contradicts the graph.
    """
    _check(graph, assignments, cluster)
    if call_order is None:
        call_order = _own_order(assignments)
    if call_order is not None:
        _check_order(graph, call_order)
        place = {name: i for i, name in enumerate(call_order)}
        assignments = {
            name: given.model_copy(update={"order": place[name]}) for name, given in assignments.items()
        }
    made = draft(graph, assignments)
    orders = [call_order] if call_order is not None else call_orders(graph)
    rule = OrderRule(levels(graph), [node_order(graph, order) for order in orders])
    names, places = list(made.template.slots), with_trailing(made.template, rule.places(made.template))
    legal = [[names[int(i)] for i in row.argsort()] for row in places]
    order = legal[_fastest(made, legal, duration_s, copy_s) if len(legal) > 1 else 0]
    edges = _edges(made, order)
    nodes = tuple(
        made.nodes[name].model_copy(update={"after": edges[name][0], "after_previous": edges[name][1]})
        for name in order
    )
    return ExecutionPlan(
        algorithm=graph.name,
        n_devices=cluster.n_devices,
        devices_per_host=cluster.devices_per_host,
        n_seqs=graph.n_seqs,
        roles=role_placements(graph, assignments),
        nodes=nodes,
    )


def _check(graph: DataflowGraph, assignments: Mapping[str, CallAssignment], cluster: Cluster) -> None:
    names = [call.name for call in graph.calls]
    unknown = sorted(set(assignments) - set(names))
    if unknown:
        raise PlanError(
            f"The plan names {', '.join(unknown)}; the calls of {graph.name} are {', '.join(names)}."
        )
    missing = [name for name in names if name not in assignments]
    if missing:
        raise PlanError(
            f"The plan says nothing about {', '.join(missing)}. Give each call of {graph.name} a place."
        )
    for call in graph.calls:
        placement = assignments[call.name].placement
        try:
            DeviceMesh.of(cluster, placement.devices)
        except MeshError as error:
            raise PlanError(f"Call {call.name!r}: {error}") from None
        if call.kind == "generate" and placement.strategy.shard == "parameters":
            raise PlanError(
                f"Call {call.name!r}: a generation reads all weights for each token, so they cannot be sharded. "
                "Leave out sharded, or choose a larger tp."
            )
        _check_counts(call, assignments[call.name])
    _check_offloads(graph, assignments)


def _check_counts(call: ModelFunctionCall, given: CallAssignment) -> None:
    """Raises PlanError unless every dp rank gets a group of every mini-batch or part, and the fullest dp rank gets a
    sequence for each of its micro-batches."""
    dp = given.placement.strategy.dp
    if call.n_groups < dp * call.blocks:
        raise PlanError(
            f"Call {call.name!r}: a batch of {groups_of(call)} is smaller than dp={dp} x "
            f"{blocks_of(call)} = {dp * call.blocks}. "
            "Enlarge the batch or choose a smaller dp."
        )
    if call.segment_tokens and given.balance == "tokens":
        raise PlanError(
            f"Call {call.name!r}: balance: tokens deals every batch anew, but with sampling.segment_tokens="
            f"{call.segment_tokens} unfinished sequences stay where they are. Choose balance: count."
        )
    most = fullest_share(call, dp)
    if given.micro_batches > most:
        batch = "part" if call.chunks > 1 else "batch" if call.mini_batches == 1 else "mini-batch"
        raise PlanError(
            f"Call {call.name!r}: micro_batches={given.micro_batches}, but with dp={dp} a dp rank gets at most "
            f"{most} of a {batch}'s sequences, and a micro-batch holds at least one. "
            f"Choose at most {most} micro-batches, a smaller dp or a larger batch."
        )


def _check_offloads(graph: DataflowGraph, assignments: Mapping[str, CallAssignment]) -> None:
    """Raises PlanError unless what is offloaded are frozen roles and train_steps, and a frozen role's calls on one
    placement agree."""
    seen: dict[tuple[str, Placement], ModelFunctionCall] = {}
    for call in graph.calls:
        given, trainer = assignments[call.name], graph.trainer(call.role)
        if given.offload and call.role in graph.follows:
            raise PlanError(
                f"Call {call.name!r}: offload is for frozen roles, and {call.role!r} follows "
                f"{graph.follows[call.role]!r}. Leave offload out."
            )
        if trainer is not None:
            if given.offload and trainer.name != call.name:
                raise PlanError(
                    f"Call {call.name!r}: offload is for frozen roles and for training, and {call.role!r} is trained "
                    f"by {trainer.name!r}. Leave offload out, or give it to {trainer.name!r}: host memory then keeps "
                    "its optimizer, and its parameters while no call needs them."
                )
            continue
        other = seen.setdefault((call.role, given.placement), call)
        if assignments[other.name].offload != given.offload:
            raise PlanError(
                f"Calls {other.name!r} and {call.name!r} share one copy of {call.role!r} on devices "
                f"{list(given.placement.devices)}, but offload is {assignments[other.name].offload} for one and "
                f"{given.offload} for the other. Give both the same."
            )


def _own_order(assignments: Mapping[str, CallAssignment]) -> list[str] | None:
    """The calls in the order that their assignments give them; None where they give none."""
    places = {name: given.order for name, given in assignments.items() if given.order is not None}
    if not places:
        return None
    without = [name for name in assignments if name not in places]
    if without or len(set(places.values())) < len(places):
        what = (
            f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} none"
            if without
            else "two are equal"
        )
        raise PlanError(
            f"The plan gives calls an order ({', '.join(f'{name}: {place}' for name, place in places.items())}), but "
            f"{what}. Give each call a place of its own, or leave all out."
        )
    return sorted(places, key=lambda name: places[name])


def _check_order(graph: DataflowGraph, call_order: Sequence[str]) -> None:
    """Raises PlanError unless the order names every call once, after the calls that it waits for."""
    names = [call.name for call in graph.calls]
    if sorted(call_order) != sorted(names):
        raise PlanError(
            f"The order {', '.join(call_order)} does not name each call of {graph.name} once: {', '.join(names)}."
        )
    place = {name: i for i, name in enumerate(call_order)}
    for a, b in graph.digraph.edges:
        if place[a] > place[b]:
            raise PlanError(
                f"In the order {', '.join(call_order)}, {b!r} stands before {a!r}, which it needs."
            )


def _fastest(
    made: Draft,
    orders: Sequence[Sequence[str]],
    duration_s: Callable[[PlanNode], float],
    copy_s: Callable[[OnloadNode], float],
) -> int:
    """`fastest_order` of orders of the nodes."""
    copies = {name: copy_s(node) for name, node in made.nodes.items() if isinstance(node, OnloadNode)}
    seconds = {name: duration_s(node) for name, node in made.nodes.items()}
    seconds |= {copy_of(name): taken_s for name, taken_s in copies.items()}
    work = work_of(made.template.after, {name: node.devices for name, node in made.nodes.items()}, copies)
    return fastest_order(
        [with_copies(order, copies) for order in orders], work, made.template.across, seconds
    )


def _edges(made: Draft, order: list[str]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Node -> (after, after_previous): data, version and memory edges without those that others imply.

    A memory edge leads from a release or offload to the next call on its devices. The reduction runs over two
    consecutive iterations, because a path through the next iteration can imply an edge too.
    """
    graph: nx.DiGraph[tuple[int, str]] = nx.DiGraph()
    for t in (0, 1):
        for name in order:
            graph.add_edges_from(((t, before), (t, name)) for before in made.template.after[name])
            graph.add_node((t, name))
        for release, call in _memory_edges(made, order):
            graph.add_edge((t, release), (t, call))
    for name in order:
        graph.add_edges_from(((0, before), (1, name)) for before in made.template.across[name])
    reduced: nx.DiGraph[tuple[int, str]] = nx.transitive_reduction(graph)
    position = {name: i for i, name in enumerate(order)}

    def predecessors(name: str, iteration: int) -> tuple[str, ...]:
        found = [before for t, before in reduced.predecessors((1, name)) if t == iteration]
        return tuple(sorted(found, key=position.__getitem__))

    return {name: (predecessors(name, 1), predecessors(name, 0)) for name in order}


def _memory_edges(made: Draft, order: list[str]) -> Iterator[tuple[str, str]]:
    for i, name in enumerate(order):
        release = made.nodes[name]
        if release.frees is None:
            continue
        for later in order[i + 1 :]:
            node = made.nodes[later]
            if isinstance(node, CallNode) and set(node.devices) & set(release.devices):
                yield name, later
                break
