"""Conversion between plans and choices of options."""

from collections.abc import Mapping, Sequence

from planner.pricing.options import Option
from planner.search.compiled.tables import Tables
from rlhf_tasks.spec import CallAssignment, ExecutionPlan


def assignments_of(plan: ExecutionPlan) -> dict[str, CallAssignment]:
    """The assignment of every call of a plan."""
    return {call: nodes[0].assignment for call, nodes in plan.calls.items()}


def nearest_choice(tables: Tables, assignments: Mapping[str, CallAssignment]) -> list[int]:
    """The number of the option most like its assignment, for every call.

    It has the same mesh, strategy and offload, in this order, as far as there are such options; among these, the
    nearest number of micro-batches.
    """

    def nearest(options: Sequence[Option], given: CallAssignment) -> int:
        devices = given.placement.devices
        mesh = min(devices), len(devices)
        kept: Sequence[int] = range(len(options))
        kept = [i for i in kept if options[i][:2] == mesh] or kept
        kept = [i for i in kept if options[i].strategy == given.placement.strategy] or kept
        kept = [i for i in kept if options[i].offload == given.offload] or kept
        return min(kept, key=lambda i: abs(options[i].micro_batches - given.micro_batches))

    return [
        nearest(options, assignments[call])
        for call, options in zip(tables.calls, tables.options, strict=True)
    ]
