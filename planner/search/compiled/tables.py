"""The tables of a plan search: all options of all calls, the price of a choice, and the choices like a plan."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.order import call_orders
from prefect_rlhf.planner.pricing.options import Option, all_options
from prefect_rlhf.planner.pricing.problem import NO_DEADLINE, Deadline, Problem
from prefect_rlhf.planner.search.compiled.arrays import make_arrays
from prefect_rlhf.planner.search.compiled.evaluator import value
from prefect_rlhf.rlhf_tasks.spec import CallAssignment, ExecutionPlan


class Value(NamedTuple):
    """The price of a choice under its best order of calls.

    time_s        steady-state seconds per iteration
    excess_bytes  bytes of memory that the fullest device or host lacks; the plan fits if it is 0
    order         index of the order in Tables.orders: that of least excess; among these, of least time; among these,
                  the first
    """

    time_s: float
    excess_bytes: float
    order: int


class Tables:
    """Options of every call and the price of every choice.

    A choice is one option number for each call, in the order of `calls`: [calls] integers.

    calls    names of the calls, in the graph's order
    options  [calls] options of each call
    orders   the orders of calls that are tried (planner.plan.order)
    arrays   the same for compiled code, where planner.search.compiled.evaluator.value prices a choice

    Arguments: `deadline`, by which all of this must be made; `among`, call -> assignment, several times: calls then
    have no other options than these meshes and strategies; `few`: only the few options with which a search begins;
    `before`: other tables of the problem, of which the patterns of plans are taken where they are the same.

    Raises ProblemError when a call has no option that fits, OptionsTakeTooLongError when the deadline passes first.
    """

    def __init__(
        self,
        problem: Problem,
        deadline: Deadline = NO_DEADLINE,
        among: Sequence[Mapping[str, CallAssignment]] = (),
        few: bool = False,
        before: "Tables | None" = None,
    ) -> None:
        placements = {
            call.name: {given[call.name].placement for given in among} for call in problem.graph.calls
        }
        self.problem = problem
        self.calls: tuple[str, ...] = tuple(call.name for call in problem.graph.calls)
        self.options: tuple[tuple[Option, ...], ...] = all_options(
            problem, deadline, placements if among else None, few
        )
        self.orders = before.orders if before else call_orders(problem.graph)
        self.arrays = make_arrays(
            problem, self.options, self.orders, before.arrays if before else None, deadline
        )

    def evaluate(self, choice: Sequence[int]) -> Value:
        """The price of a choice under the best order of calls."""
        return Value(*value(self.arrays, np.asarray(choice, np.int64), np.inf))

    def assignments(self, choice: Sequence[int]) -> dict[str, CallAssignment]:
        """Call -> its assignment under a choice."""
        return {
            name: options[number].assignment
            for name, options, number in zip(self.calls, self.options, choice, strict=True)
        }

    def plan(self, choice: Sequence[int]) -> ExecutionPlan:
        """The execution plan of a choice, under the order that `evaluate` found best."""
        return self.plan_in(choice, self.evaluate(choice).order)

    def plan_in(self, choice: Sequence[int], order: int) -> ExecutionPlan:
        """The execution plan of a choice under order number `order`."""
        return build_plan(
            self.problem.graph,
            self.assignments(choice),
            self.problem.cluster,
            call_order=self.orders[order],
        )


@contextmanager
def uncollected() -> Iterator[None]:
    """Pauses garbage collection: scanning tens of thousands of new long-lived objects takes as long as making them.

    If it is off already, it stays off.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()


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
        alike = [
            i
            for i, other in enumerate(options)
            if other[:3] == option[:3]
            and other.seconds <= option.seconds
            and all(a <= b for a, b in zip(other.active, option.active, strict=True))
        ]
        return min(alike, key=lambda i: (options[i].offload != option.offload, options[i].seconds))

    return [
        counterpart(own[number], options)
        for own, number, options in zip(few.options, choice, tables.options, strict=True)
    ]
