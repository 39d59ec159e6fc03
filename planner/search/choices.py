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


def counterparts(few: Tables, choice: Sequence[int], tables: Tables) -> list[int]:
    """The numbers, in tables of all options, of a choice among few: for each call the option with the same mesh and
    strategy that is no slower and needs no more memory; offloaded as it was, if it may be."""

    def counterpart(option: Option, options: Sequence[Option]) -> int:
        return min(
            (
                i
                for i, other in enumerate(options)
                if other[:3] == option[:3]
                and other.seconds <= option.seconds
                and all(a <= b for a, b in zip(other.active, option.active, strict=True))
            ),
            key=lambda i: (options[i].offload != option.offload, options[i].seconds),
        )

    return [
        counterpart(own[number], options)
        for own, number, options in zip(few.options, choice, tables.options, strict=True)
    ]
