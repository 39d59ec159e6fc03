"""Rejected alternatives: for every call, the best plan found with another mesh for it, and why it loses.

The other calls may be placed differently too. If the chosen plan is not optimal, such a plan may even be faster.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.pricing.plans import PlanPrice, price_plan, shortfall
from planner.search.annealing import neighbours, polishing, start_state
from planner.search.bounds.root_bound import call_cycles
from planner.search.choices import assignments_of, nearest_choice
from planner.search.compiled.tables import Tables
from planner.search.search import ROUNDING, SearchResult
from rlhf_tasks.spec import CallAssignment, ExecutionPlan, ReallocateNode

TRIED = 200  # meshes that are tried per call, those with the fastest options


@dataclass(frozen=True)
class Alternative:
    """The best plan found in which `call` has another mesh than in the chosen plan; other calls may differ too.

    assignment  of the call in this plan
    time_s      seconds per iteration of this plan
    loses_s     seconds more than the chosen plan; negative if this plan is faster
    reason      why it loses, or that it does not, in one phrase
    is_better   it fits memory and is faster, so the chosen plan is not optimal
    """

    call: str
    assignment: CallAssignment
    time_s: float
    loses_s: float
    reason: str
    is_better: bool


def rejected_alternatives(result: SearchResult) -> tuple[Alternative, ...]:
    """The alternatives of all calls, in the order of the graph. A call with options on only one mesh has none."""
    tables = result.tables
    start = nearest_choice(tables, assignments_of(result.plan))
    rows = []
    for number, name in enumerate(tables.calls):
        choice = _forced_otherwise(tables, start, number)
        if choice is not None:
            rows.append(_row(tables, result, name, choice))
    return tuple(rows)


def _forced_otherwise(tables: Tables, start: Sequence[int], call: int) -> list[int] | None:
    """The best choice found with another mesh for one call; None if it has none.

    First only that call moves; then a calm annealing may move all calls, without the call's original mesh.
    """
    options = tables.options[call]
    given = options[start[call]]
    fastest: dict[tuple[int, int], int] = {}
    for number in sorted(range(len(options)), key=lambda n: options[n].seconds):
        fastest.setdefault((options[number].first, options[number].size), number)
    fastest.pop((given.first, given.size), None)
    moved = [[*start[:call], number, *start[call + 1 :]] for number in list(fastest.values())[:TRIED]]
    if not moved:
        return None
    states = [start_state(tables, choice) for choice in moved]
    state = min(states, key=lambda state: (state.excess_bytes, state.time_s))
    near = neighbours(tables, (call, given.first, given.size))
    *_, (found, _) = polishing(tables, near, call_cycles(tables.problem.graph), state, 0, call)
    return found.choice.tolist()


def _row(tables: Tables, result: SearchResult, call: str, choice: Sequence[int]) -> Alternative:
    plan = tables.plan(choice)
    price = price_plan(plan, tables.problem.model)
    missing = shortfall(price, tables.problem.model)
    loses_s = price.iteration_time_s - result.iteration_time_s
    is_better = missing is None and loses_s < -ROUNDING * result.iteration_time_s
    reason = missing or _reason(plan, price, result, loses_s)
    assignment = tables.assignments(choice)[call]
    return Alternative(call, assignment, price.iteration_time_s, loses_s, reason, is_better)


def _reason(plan: ExecutionPlan, price: PlanPrice, result: SearchResult, loses_s: float) -> str:
    """Why a plan that fits memory is slower, by its critical cycle; or that it is not slower."""
    if loses_s < -ROUNDING * result.iteration_time_s:
        return f"faster by {-loses_s:.3g} s: the plan is not the best"
    if loses_s <= ROUNDING * result.iteration_time_s:
        return "takes as long"
    calls = [name for name in price.steady.cycle if plan.node(name).kind == "call"]
    moved_s = _moving_s(plan, price) - _moving_s(result.plan, result.price)
    if moved_s > loses_s / 2:
        return f"{moved_s:.3g} s more for reallocation on the critical cycle"
    return f"more load on the critical cycle {_joined(calls)}"


def _moving_s(plan: ExecutionPlan, price: PlanPrice) -> float:
    """Seconds of the reallocations on the critical cycle."""
    return sum(price.duration_s[n] for n in price.steady.cycle if isinstance(plan.node(n), ReallocateNode))


def _joined(calls: Iterable[str]) -> str:
    return " -> ".join(calls)
