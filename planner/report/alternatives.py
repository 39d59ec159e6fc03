"""Why not otherwise: for every call, the best plan found with another mesh for it, and what is to be said of it.

The other calls may have other places in it too. Where the chosen plan is not the best, such a plan may be faster.
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

TRIED = 200  # meshes per call, those of the fastest options


@dataclass(frozen=True)
class Alternative:
    """The best plan found in which `call` has another mesh than in the chosen plan; the others may have, too.

    assignment  of the call in it
    time_s      its seconds per iteration; loses_s: how much more than the chosen plan; negative where it is faster
    reason      why it loses, or that it does not, in one phrase
    is_better   it fits memory and is faster than the chosen plan, which so is not the best
    """

    call: str
    assignment: CallAssignment
    time_s: float
    loses_s: float
    reason: str
    is_better: bool


def rejected_alternatives(result: SearchResult) -> tuple[Alternative, ...]:
    """One row per call, in the order of the graph; a call that has options on one mesh only has none."""
    tables = result.tables
    start = nearest_choice(tables, assignments_of(result.plan))
    rows = []
    for number, name in enumerate(tables.calls):
        choice = _forced_otherwise(tables, start, number)
        if choice is not None:
            rows.append(_row(tables, result, name, choice))
    return tuple(rows)


def _forced_otherwise(tables: Tables, start: Sequence[int], call: int) -> list[int] | None:
    """The best choice found with another mesh for one call: first only that call moves, then all may."""
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
    """Whether it is faster, or what its critical cycle has more of than the chosen plan's."""
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
    """Seconds that reallocations take on the critical cycle."""
    return sum(price.duration_s[n] for n in price.steady.cycle if isinstance(plan.node(n), ReallocateNode))


def _joined(calls: Iterable[str]) -> str:
    return " -> ".join(calls)
