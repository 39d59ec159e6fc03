"""Between plans and choices of options."""

from collections.abc import Mapping, Sequence

from planner.options import Option
from planner.tables import Tables
from rlhf_tasks.spec import CallAssignment, CallNode, ExecutionPlan


def assignments_of(plan: ExecutionPlan) -> dict[str, CallAssignment]:
    """The assignment of every call of a plan."""
    return {node.name: node.assignment for node in plan.nodes if isinstance(node, CallNode)}


def nearest_choice(tables: Tables, assignments: Mapping[str, CallAssignment]) -> list[int]:
    """For every call the option most like its assignment: the same mesh, strategy and offload if there are, then the
    nearest number of micro-batches."""

    def nearest(options: Sequence[Option], given: CallAssignment) -> int:
        devices, strategy = given.placement.devices, given.placement.strategy
        mesh = min(devices), len(devices)
        unlike = [
            (
                (o.first, o.size) != mesh,
                o.strategy != strategy,
                o.offload != given.offload,
                abs(o.micro_batches - given.micro_batches),
            )
            for o in options
        ]
        return unlike.index(min(unlike))

    return [
        nearest(options, assignments[call])
        for call, options in zip(tables.calls, tables.options, strict=True)
    ]
