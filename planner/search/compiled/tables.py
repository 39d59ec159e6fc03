"""The tables of a plan search: all options of all calls, and the price of a choice among them."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from planner.deadline import NO_DEADLINE, Deadline
from planner.plan.build import build_plan
from planner.plan.order import call_orders
from planner.pricing.options import Option, all_options
from planner.pricing.problem import Problem
from planner.search.compiled.arrays import make_arrays
from planner.search.compiled.evaluator import value
from rlhf_tasks.spec import CallAssignment, ExecutionPlan


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
    have no other options than these meshes and strategies; `few`: options have few numbers of micro-batches;
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
