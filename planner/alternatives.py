"""Why not otherwise: for every call, the best plan found with another mesh for it, and why that plan loses."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.price import PlanPrice, price_plan, shortfall
from planner.problem import Problem
from planner.search import SearchResult
from planner.tables import Tables
from rlhf_tasks.spec import CallAssignment, CallNode, ExecutionPlan, ReallocateNode

TRIED = 12  # meshes per call


@dataclass(frozen=True)
class Alternative:
    """The best plan found in which `call` has another mesh than in the chosen plan.

    assignment  of the call in it
    time_s      its seconds per iteration; loses_s: how much more than the chosen plan
    reason      why it loses, in one phrase
    """

    call: str
    assignment: CallAssignment
    time_s: float
    loses_s: float
    reason: str


def rejected_alternatives(problem: Problem, result: SearchResult) -> tuple[Alternative, ...]:
    """One row per call, in the order of the graph; a call that has options on one mesh only has none."""
    tables = Tables(problem)
    chosen = {node.name: node.assignment for node in result.plan.nodes if isinstance(node, CallNode)}
    start = nearest_choice(tables, chosen)
    rows = []
    for number, name in enumerate(tables.calls):
        choice = _forced_otherwise(tables, start, number, chosen[name])
        if choice is not None:
            rows.append(_row(tables, result, name, choice))
    return tuple(rows)


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


def _forced_otherwise(
    tables: Tables, start: Sequence[int], call: int, given: CallAssignment
) -> list[int] | None:
    """The best choice with another mesh for one call, the others as they are."""
    fastest: dict[tuple[int, int], int] = {}
    options = tables.options[call]
    for number, option in enumerate(options):
        mesh = option.first, option.size
        if mesh != (min(given.placement.devices), len(given.placement.devices)) and (
            mesh not in fastest or option.seconds < options[fastest[mesh]].seconds
        ):
            fastest[mesh] = number
    tried = sorted(fastest.values(), key=lambda n: (options[n].seconds, n))[:TRIED]
    choices = [[*start[:call], number, *start[call + 1 :]] for number in tried]
    return min(choices, key=lambda choice: tables.evaluate(choice)[1::-1], default=None)


def _row(tables: Tables, result: SearchResult, call: str, choice: Sequence[int]) -> Alternative:
    plan = tables.plan(choice)
    price = price_plan(plan, tables.problem.model)
    missing = shortfall(price, tables.problem.model)
    loses_s = price.iteration_time_s - result.iteration_time_s
    reason = missing or _reason(plan, price, result, loses_s)
    return Alternative(call, tables.assignments(choice)[call], price.iteration_time_s, loses_s, reason)


def _reason(plan: ExecutionPlan, price: PlanPrice, result: SearchResult, loses_s: float) -> str:
    """What its critical cycle has more of than the chosen plan's."""
    if loses_s <= 0:
        return "takes as long"
    calls = [name for name in price.steady.cycle if plan.node(name).kind == "call"]
    moved_s = _moving_s(plan, price) - _moving_s(result.plan, result.price)
    if moved_s > loses_s / 2:
        return f"{moved_s:.3g} s more for reallocation on the critical cycle"
    return f"more load on the critical cycle {_joined(calls)}"


def _moving_s(plan: ExecutionPlan, price: PlanPrice) -> float:
    """Seconds that reallocations take on the critical cycle."""
    return sum(price.duration_s[n] for n in price.steady.cycle if isinstance(plan.node(n), ReallocateNode))


def _joined(calls: Iterable[str]) -> str:
    return " -> ".join(calls)
