"""Between plans and choices of options."""

from collections.abc import Mapping

from planner.tables import Tables
from rlhf_tasks.spec import CallAssignment, CallNode, ExecutionPlan


def assignments_of(plan: ExecutionPlan) -> dict[str, CallAssignment]:
    """The assignment of every call of a plan."""
    return {node.name: node.assignment for node in plan.nodes if isinstance(node, CallNode)}


def nearest_choice(tables: Tables, assignments: Mapping[str, CallAssignment]) -> list[int]:
    """For every call the option most like its assignment: the same mesh and strategy if there are, then the
    nearest number of micro-batches."""

    def unlike(call: str, number: int) -> tuple[bool, bool, int]:
        option = tables.options[tables.calls.index(call)][number]
        given = assignments[call]
        devices = given.placement.devices
        return (
            (option.first, option.size) != (min(devices), len(devices)),
            option.strategy != given.placement.strategy,
            abs(option.micro_batches - given.micro_batches),
        )

    return [
        min(range(len(options)), key=lambda n, call=call: unlike(call, n))
        for call, options in zip(tables.calls, tables.options, strict=True)
    ]
