"""The entry point of the plan search: all modes, and the result with its proof."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from prefect_rlhf.planner.plan.build import PlanError
from prefect_rlhf.planner.pricing.plans import PlanPrice, price_plan
from prefect_rlhf.planner.pricing.problem import (
    NO_DEADLINE,
    Deadline,
    OptionsTakeTooLongError,
    Problem,
    ProblemError,
    never,
)
from prefect_rlhf.planner.search.annealing import (
    PricedChoice,
    anneal,
    annealing,
    better,
    descend,
    greedy_choice,
    metropolis,
    neighbours,
    nobody,
    polishing,
    start_state,
    uniforms,
)
from prefect_rlhf.planner.search.balance import balanced
from prefect_rlhf.planner.search.baselines import (
    Priced,
    colocated_choice,
    disjoint_choice,
    heuristic_plan,
    hybrid_plan,
    priced_plan,
    side_by_side,
    symmetric_plan,
)
from prefect_rlhf.planner.search.bounds.cycles import call_cycles
from prefect_rlhf.planner.search.branch_and_bound import (
    begin_search,
    bounds_by_groups,
    branching,
    continue_search,
    proof_class,
    search_tree,
)
from prefect_rlhf.planner.search.compiled.tables import (
    Tables,
    assignments_of,
    counterparts,
    nearest_choice,
    uncollected,
)
from prefect_rlhf.rlhf_tasks.spec import CallAssignment, ExecutionPlan

ROUNDING = 1e-9  # relative; a smaller gap counts as zero
BOUNDING = (
    0.25  # share of the time limit at which the bound by groups ends, in modes besides `search` by RULES_S
)
ANNEALING = 0.75  # share of the time limit at which annealing ends
DISJOINT = 0.1  # share of the time limit that the search for roles on devices of their own may take
TABLES = 0.7  # share of the time limit after which no further options are priced
RULES_S = 1.0  # seconds that the plans by rule, and the choice of `balance`, have under any time limit
FIRST_RULE_S = 20.0
"""The same of the first plan by rule. It takes a second at most, unless the machine is busy; without it there may be
no plan at all."""
FIRST = 80  # parts of annealing among few options, for good plans in the first second


class TracePoint(NamedTuple):
    """The state of a search `seconds` after it began: the best plan's seconds per iteration, and the lower bound in
    seconds (0 before there is one)."""

    seconds: float
    time_s: float
    lower_bound_s: float


@dataclass(frozen=True)
class SearchResult:
    """A plan, its price, and its distance from the optimum.

    price          of the plan, node by node
    iteration_time_s  seconds per iteration in the steady state
    lower_bound_s  no plan of the class takes fewer seconds per iteration
    gap            1 - lower bound / the plan's time
    proof_class    the plans for which the lower bound holds, in one sentence
    mode           how the plan was found: a key of MODES
    seconds        duration of the search, without compilation; evaluations: number of plans priced
    compile_s      seconds to compile or load the code, before the clock started
    trace          the best plan and the bound over time
    tables         of the problem
    late           not all options could be priced in time: this is the best plan by rule, or among few options, and
                   there is no bound
    """

    plan: ExecutionPlan
    price: PlanPrice
    iteration_time_s: float
    lower_bound_s: float
    gap: float
    proven_optimal: bool
    proof_class: str
    mode: str
    seconds: float
    compile_s: float
    evaluations: int
    trace: tuple[TracePoint, ...]
    tables: Tables = field(repr=False, compare=False)
    late: bool = False


class Outcome(NamedTuple):
    """A mode's result: a plan, a lower bound in seconds, the number of plans priced, and the trace.

    tables  where the plan is from, if not from those of the request
    late    not all options could be priced in time
    """

    priced: Priced
    lower_bound_s: float
    evaluations: int = 1
    trace: tuple[TracePoint, ...] = ()
    tables: Tables | None = None
    late: bool = False


@dataclass(frozen=True)
class Rules:
    """The plans by rule that fit memory, and their points of the trace. They are found before tables are made."""

    plans: tuple[Priced, ...] = ()
    trace: tuple[TracePoint, ...] = ()


@dataclass(frozen=True)
class Request:
    """The input of a mode.

    rules    empty unless the mode is `search`
    tables   of mode `search` with few numbers of micro-batches, and without a bound
    started  time.monotonic() when the search began, plus the seconds of compilation
    """

    problem: Problem
    rules: Rules
    tables: Tables
    lower_bound_s: float
    time_limit_s: float
    seed: int
    evaluate: Mapping[str, CallAssignment] | None
    started: float
    called_off: Callable[[], bool]


class Progress:
    """The best plan so far, and the trace. The plans by rule count too, so the result is no worse than they are."""

    def __init__(self, request: Request, start: Sequence[int]) -> None:
        self._request, self._tables = request, request.tables
        self.state = start_state(request.tables, start)
        self.lower_bound_s, self._evaluations = request.lower_bound_s, 0
        self._trace = list(request.rules.trace)
        self._trace_up_to(float("inf"))

    def deadline_of(self, share: float = 1.0) -> Deadline:
        """The deadline of steps that may use this share of the time limit."""
        until_s = self._request.started + share * self._request.time_limit_s
        return Deadline(until_s, self._request.called_off)

    def deadline_in(self, share: float) -> Deadline:
        """The deadline of a step that may take this share of the time limit from now on."""
        return Deadline(time.monotonic() + share * self._request.time_limit_s, self._request.called_off)

    def note(self, state: PricedChoice, n_priced: int, lower_bound_s: float = 0.0) -> None:
        """Notes the best state, the number of choices priced since the last call, and a lower bound in seconds."""
        self._evaluations += n_priced
        self.lower_bound_s = max(self.lower_bound_s, lower_bound_s)
        self.state = state
        self._trace_up_to(state.time_s if state.excess_bytes <= 0 else float("inf"))

    def follow(self, parts: Iterable[tuple[PricedChoice, int]]) -> None:
        """Notes the parts of an annealing, until its share of the time has passed."""
        for state, n_priced in parts:
            self.note(better(self.state, state), n_priced)
            if self.deadline_of(ANNEALING).is_past():
                break

    def continue_among(self, tables: Tables) -> None:
        """Takes over the best state into tables of more options."""
        state = start_state(tables, counterparts(self._tables, self.state.choice.tolist(), tables))
        self._tables = tables
        self.note(state, 1)

    def _trace_up_to(self, time_s: float) -> None:
        """Adds a point to the trace: the less of `time_s` and the last point's time, unless both are infinite."""
        best = min([time_s, *(point.time_s for point in self._trace[-1:])])
        if best < float("inf"):
            seconds = time.monotonic() - self._request.started
            self._trace.append(TracePoint(seconds, best, self.lower_bound_s))

    def outcome(self) -> Outcome:
        """The best plan and its price. Raises PlanError when nothing fits memory."""
        candidates = list(self._request.rules.plans)
        if self.state.excess_bytes <= 0 or not candidates:
            candidates.append(priced_choice(self._tables, self.state.choice.tolist()))
        best = min(candidates, key=lambda one: one.price.iteration_time_s)
        return Outcome(best, self.lower_bound_s, self._evaluations, tuple(self._trace), self._tables)


@uncollected()
def find_plan(
    problem: Problem,
    mode: str,
    time_limit_s: float,
    seed: int = 0,
    evaluate: Mapping[str, CallAssignment] | None = None,
    called_off: Callable[[], bool] = never,
) -> SearchResult:
    """A plan for a problem.

    mode          search (annealing, then branch and bound), mcmc (Metropolis, as in the literature), heuristic,
                  symmetric (all calls alike), hybrid, disjoint (every role on its own devices), colocated, manual:
                  planner/search/baselines.py
    time_limit_s  seconds, compilation excluded; when they have passed, the best plan so far is returned. If not all
                  options could be priced by then, that is the best plan by rule, without a bound. The rules have
                  RULES_S at least, the first FIRST_RULE_S, and end what they have begun: less than a second on
                  131,072 devices
    seed          equal seeds give equal plans if the time limit does not end the search
    evaluate      the assignments that mode manual prices
    called_off    polled; the search ends as soon as it returns true

    If a signal handler raises while compiled code returns, numba ends the process. A program with such handlers must
    search outside the main thread (flows/cluster/shutdown.py `run_in_thread`).

    Raises PlanError when nothing fits memory, with the device, the shortfall in bytes and the fields that would help;
    for an unknown mode; and for mode manual without assignments. Raises ProblemError when a call has no option that
    fits, and for modes disjoint and colocated when their options could not be priced in time.
    """
    if mode not in MODES:
        raise PlanError(f"There is no mode {mode!r}; known are {', '.join(MODES)}.")
    if not time_limit_s > 0:
        raise PlanError(f"A time limit of {time_limit_s} s leaves no time to search. Give a positive number.")
    started = time.monotonic()
    rules, late = _by_rule(problem, started, time_limit_s) if mode == "search" else Rules(), False
    try:
        deadline = Deadline(started + TABLES * time_limit_s, called_off)
        tables, run = Tables(problem, deadline, few=mode == "search"), MODES[mode]
        compile_s = _compile(tables) if mode in SEARCHING else 0.0
        lower_bound_s = 0.0
        if mode != "search":
            bounding_s = min(RULES_S, BOUNDING * time_limit_s) if mode in SEARCHING else 0.0
            lower_bound_s = bound_of(tables, Deadline(time.monotonic() + bounding_s, called_off))
    except OptionsTakeTooLongError:
        late, rules = True, rules if rules.plans else _by_rule(problem, started, time_limit_s)
        given = () if evaluate is None else (evaluate,)
        known = (*(assignments_of(one.plan) for one in rules.plans), *given)
        if not known or mode in PLACING:
            if called_off():
                raise PlanError("The search was called off before there was a plan.") from None
            raise
        tables = Tables(problem, among=known)
        run, compile_s, lower_bound_s = _best_rule if mode in SEARCHING else MODES[mode], 0.0, 0.0
    started += compile_s
    outcome = run(
        Request(problem, rules, tables, lower_bound_s, time_limit_s, seed, evaluate, started, called_off)
    )
    ending = Deadline(max(started + time_limit_s, time.monotonic() + RULES_S), called_off)
    priced = outcome.priced if mode == "manual" else balanced(outcome.priced, problem, ending)
    problem.refuse(priced.plan)
    time_s = priced.price.iteration_time_s
    in_class = outcome.lower_bound_s <= time_s * (1 + ROUNDING)
    lower_bound_s = min(outcome.lower_bound_s, time_s)
    gap = 1 - lower_bound_s / time_s
    return SearchResult(
        plan=priced.plan,
        price=priced.price,
        iteration_time_s=time_s,
        lower_bound_s=lower_bound_s,
        gap=gap,
        proven_optimal=in_class and gap <= ROUNDING,
        proof_class=proof_class(problem),
        mode=mode,
        seconds=time.monotonic() - started,
        compile_s=compile_s,
        evaluations=outcome.evaluations,
        trace=outcome.trace or (TracePoint(time.monotonic() - started, time_s, lower_bound_s),),
        tables=outcome.tables or tables,
        late=late or outcome.late,
    )


def _compile(tables: Tables) -> float:
    """Compiles, or loads, all compiled functions by calling each with almost no work. Returns the seconds."""
    began = time.monotonic()
    start = start_state(tables, greedy_choice(tables))
    cycles, draws = call_cycles(tables.problem.graph), uniforms(0, "compiling", 0, 0)
    near = neighbours(tables)
    anneal(tables.arrays, near, cycles, start, draws, 1.0, 1.0, True)
    descend(tables.arrays, nobody(tables), cycles, start, 0)
    tree = search_tree(tables, cycles)
    state = begin_search(tree, tree.to_options)
    state.depth[0] = -1
    continue_search(tree, state, 1.0, 0)
    return time.monotonic() - began


def bound_of(tables: Tables, deadline: Deadline = NO_DEADLINE) -> float:
    """The bound by groups of a problem's options, in seconds per iteration.

    deadline  ends the bisection early; if it has passed, nothing is compiled or searched
    """
    tree = search_tree(tables, call_cycles(tables.problem.graph))
    *_, bound_s = bounds_by_groups(tree, tree.relaxation.fastest.sum(), deadline)
    return bound_s


def priced_choice(tables: Tables, choice: Sequence[int]) -> Priced:
    """The plan of a choice ([calls] option numbers) and its price.

    Raises PlanError when it does not fit memory.
    """
    plan, model = tables.plan(choice), tables.problem.model
    return Priced(plan, price_plan(plan, model)).fitting(model)


def _best_rule(request: Request) -> Outcome:
    plans = request.rules.plans
    return Outcome(min(plans, key=lambda one: one.price.iteration_time_s), 0.0, 1, request.rules.trace)


def _by_one(rule: Callable[..., Priced]) -> Callable[[Request], Outcome]:
    """The mode that follows a rule."""
    return lambda request: Outcome(rule(request.problem), request.lower_bound_s)


def _placed(choose: Callable[[Tables, Deadline], tuple[list[int], int]]) -> Callable[[Request], Outcome]:
    """The mode that places sets of roles side by side."""

    def run(request: Request) -> Outcome:
        deadline = Deadline(request.started + request.time_limit_s, request.called_off)
        choice, evaluations = choose(request.tables, deadline)
        return Outcome(priced_choice(request.tables, choice), request.lower_bound_s, evaluations)

    return run


def _manual(request: Request) -> Outcome:
    if request.evaluate is None:
        raise PlanError("Mode 'manual' prices given assignments; give one for each call.")
    graph, model = request.problem.graph, request.problem.model
    return Outcome(priced_plan(graph, model, request.evaluate).fitting(model), request.lower_bound_s)


def _search(request: Request) -> Outcome:
    """Mode search: anneal among few options; then, among all, polish, bound by groups, anneal, branch and bound.

    Pricing few options takes a fraction of the time, and annealing finds good plans among them sooner.

    No other mode should find a better plan in this time. So all plans by rule are among the starts, and a search
    without a proof uses all its time: rounds that agree may agree on a plan that no change of one or two calls
    improves, but one of all calls would.
    """
    few, seed, graph = request.tables, request.seed, request.problem.graph
    starts, cycles = _starts(few, request.rules), call_cycles(graph)
    progress, near = Progress(request, starts[0]), neighbours(few)
    parts = annealing(few, near, cycles, starts, seed, "annealing among few")
    progress.follow(islice(parts, FIRST))
    try:
        tables = Tables(request.problem, progress.deadline_of(TABLES), before=few)
    except OptionsTakeTooLongError:
        progress.follow(parts)
        return progress.outcome()._replace(late=True)
    progress.continue_among(tables)
    near, others = neighbours(tables), _starts(tables, request.rules)
    progress.follow(polishing(tables, near, cycles, progress.state, seed, 0))
    with suppress(PlanError):
        choice, evaluations = disjoint_choice(tables, progress.deadline_in(DISJOINT))
        progress.note(better(progress.state, start_state(tables, choice)), evaluations)
        others = [choice, *others]
    parts = annealing(tables, near, cycles, [progress.state.choice.tolist(), *others], seed)
    tree = search_tree(tables, cycles)
    for lower_bound_s in bounds_by_groups(tree, progress.state.time_s, progress.deadline_of(BOUNDING)):
        progress.note(progress.state, 0, lower_bound_s)
    progress.follow(parts)
    state, proved_s, deadline = progress.state, progress.lower_bound_s, progress.deadline_of()
    for step in branching(tables, near, cycles, tree, others, state, proved_s, seed, deadline):
        state, lower_bound_s, n_priced = step
        progress.note(state, n_priced, lower_bound_s)
    return progress.outcome()


def _starts(tables: Tables, rules: Rules) -> list[list[int]]:
    """Different choices to start from: roles side by side, the plans by rule, the fastest option of every call."""
    by_rule = [nearest_choice(tables, assignments_of(rule.plan)) for rule in rules.plans]
    apart = side_by_side(tables)
    return [*([] if apart is None else [apart]), *by_rule, greedy_choice(tables)]


def _mcmc(request: Request) -> Outcome:
    progress = Progress(request, greedy_choice(request.tables))
    near, cycles = neighbours(request.tables), call_cycles(request.problem.graph)
    for state, n_priced in metropolis(request.tables, near, cycles, request.seed):
        progress.note(state, n_priced)
        if progress.deadline_of().is_past():
            break
    return progress.outcome()


def _by_rule(problem: Problem, started: float, time_limit_s: float) -> Rules:
    """The plans by rule that are found in time. started: time.monotonic() when the search began."""
    plans, trace = list[Priced](), list[TracePoint]()
    for rule, least_s in ((heuristic_plan, FIRST_RULE_S), (symmetric_plan, RULES_S)):
        with suppress(PlanError, ProblemError):
            made = rule(problem, Deadline(started + max(least_s, time_limit_s)))
            problem.refuse(made.plan)
            plans.append(made)
            best = min(plan.price.iteration_time_s for plan in plans)
            trace.append(TracePoint(time.monotonic() - started, best, 0.0))
    return Rules(tuple(plans), tuple(trace))


PLACING = ("disjoint", "colocated")
"""Modes that place sets of roles side by side."""

SEARCHING = ("search", "mcmc", *PLACING)
"""Modes that look at many options. Their compiled code is loaded before the clock starts; without time for the
options, they give the best plan by rule."""

MODES: dict[str, Callable[[Request], Outcome]] = {
    "search": _search,
    "mcmc": _mcmc,
    "heuristic": _by_one(heuristic_plan),
    "symmetric": _by_one(symmetric_plan),
    "hybrid": _by_one(hybrid_plan),
    "disjoint": _placed(disjoint_choice),
    "colocated": _placed(colocated_choice),
    "manual": _manual,
}
