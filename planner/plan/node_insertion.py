"""The nodes that make an assignment legal: fetch, transfers, reallocations, releases, onloads, offloads, syncs, saves
and evaluations.

planner.plan.template decides which nodes there are and what they wait for; here they get their devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.plan.graph import FETCH, DataflowGraph
from planner.plan.template import PlanTemplate, Slot, plan_template
from rlhf_tasks.parallel.layout.topology import Placement
from rlhf_tasks.parallel.layout.transfers import Balance
from rlhf_tasks.spec import (
    NODE_KINDS,
    CallAssignment,
    CallNode,
    DataSide,
    EvaluateNode,
    FetchNode,
    ModelFunctionCall,
    PlanNode,
    ReallocateNode,
    RolePlacements,
    SaveSamplesNode,
    SyncNode,
    TransferNode,
    side_of,
)


@dataclass(frozen=True)
class Draft:
    """Nodes without edges, by name, and the template that has the edges."""

    nodes: Mapping[str, PlanNode]
    template: PlanTemplate

    @property
    def after(self) -> Mapping[str, set[str]]:
        return self.template.after

    @property
    def across(self) -> Mapping[str, set[str]]:
        return self.template.across


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


@dataclass(frozen=True)
class Where:
    """Where a call's samples lie. Two calls have every sample on the same rank if and only if these are equal."""

    heads: tuple[int, ...]
    dealing: tuple[str, ...]


def where(call: ModelFunctionCall, placement: Placement, balance: Balance) -> Where:
    """Where a call's samples lie (docs/architecture.md, "who holds which sample").

    With one dp rank, all samples are on its head. If samples are dealt by count, the number of blocks (mini-batches
    or parts) matters only where dp does not divide a block's groups. If they are dealt by tokens, two calls agree
    when they have the same number of blocks and the same key gives the lengths.
    """
    return Where(placement.heads, dealing(call, placement.strategy.dp, balance))


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
