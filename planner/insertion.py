"""The nodes that make an assignment legal: fetch, transfers, reallocations, releases and saves, with what
they wait for.

Which ones there are is said by planner.skeleton; here they get their devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.graph import DataflowGraph
from planner.skeleton import Skeleton, Slot, skeleton
from rlhf_tasks.spec import (
    CallAssignment,
    CallNode,
    DataSide,
    FetchNode,
    ModelFunctionCall,
    PlanNode,
    ReallocateNode,
    ReleaseNode,
    RolePlacements,
    SaveNode,
    TransferNode,
)


@dataclass(frozen=True)
class Draft:
    """Nodes without edges, by name, and the skeleton that has the edges."""

    nodes: Mapping[str, PlanNode]
    skeleton: Skeleton

    @property
    def after(self) -> Mapping[str, set[str]]:
        return self.skeleton.after

    @property
    def across(self) -> Mapping[str, set[str]]:
        return self.skeleton.across


def draft(graph: DataflowGraph, assignments: Mapping[str, CallAssignment]) -> Draft:
    """All nodes of one iteration with their data and version edges."""
    made = skeleton(
        graph,
        where={call.name: where(call, assignments[call.name]) for call in graph.calls},
        placement={call.name: assignments[call.name].placement for call in graph.calls},
    )
    return Draft({name: _node(slot, graph, assignments) for name, slot in made.slots.items()}, made)


def role_placements(
    graph: DataflowGraph, assignments: Mapping[str, CallAssignment]
) -> dict[str, RolePlacements]:
    """Where each role lives: a trained one at its training placement, then wherever its copies are built."""
    found = {}
    for role in graph.roles:
        trainer = graph.trainer(role)
        calls = [call for call in graph.calls if call.role == role]
        if trainer is not None:
            calls.insert(0, trainer)
        placements = dict.fromkeys(assignments[call.name].placement for call in calls)
        found[role] = RolePlacements(trained=trainer is not None, placements=tuple(placements))
    return found


def data_side(call: ModelFunctionCall, assignment: CallAssignment) -> DataSide:
    """How a call wants its samples."""
    return DataSide(
        placement=assignment.placement, balance=assignment.balance, mini_batches=call.mini_batches
    )


@dataclass(frozen=True)
class Where:
    """What decides whether two calls have every sample on the same rank."""

    heads: tuple[int, ...]
    dealing: tuple[str, ...]


def where(call: ModelFunctionCall, assignment: CallAssignment) -> Where:
    """Where a call's samples lie (docs/interfaces.md, "who gets which sample").

    With one dp rank all samples are on its head. Dealt by count, the mini-batches matter only if dp does not
    divide them. Dealt by tokens, sides are alike if their mini-batches are and one key gives the lengths.
    """
    heads, dp = assignment.placement.heads, assignment.placement.strategy.dp
    if dp == 1:
        return Where(heads, ())
    if assignment.balance == "tokens":
        return Where(heads, ("tokens", str(call.mini_batches), call.inputs[0]))
    if call.n_seqs % (dp * call.mini_batches) == 0:
        return Where(heads, ("count",))
    return Where(heads, ("count", str(call.mini_batches)))


def _node(slot: Slot, graph: DataflowGraph, assignments: Mapping[str, CallAssignment]) -> PlanNode:
    call, here, there = graph.call(slot.call), assignments[slot.call], assignments[slot.source]
    match slot.kind:
        case "fetch":
            return FetchNode(
                name=slot.name, call=call.name, placement=here.placement, keys=slot.keys, balance=here.balance
            )
        case "call":
            return CallNode(name=slot.name, call=call, assignment=here)
        case "transfer":
            return TransferNode(
                name=slot.name,
                consumer=call.name,
                source=data_side(graph.call(slot.source), there),
                destination=data_side(call, here),
                keys=slot.keys,
            )
        case "reallocate":
            return ReallocateNode(
                name=slot.name, role=call.role, source=there.placement, destination=here.placement
            )
        case "release":
            return ReleaseNode(name=slot.name, role=call.role, placement=here.placement)
        case "save":
            return SaveNode(name=slot.name, role=call.role, placement=here.placement)
