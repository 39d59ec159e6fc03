"""The entry point of the plan search: all modes, and the result with its proof."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from planner.deadline import Deadline, never
from planner.plan.build import PlanError
from planner.plan.call_order import MOST_ORDERS, has_more_orders
from planner.plan.graph import DataflowGraph
from planner.plan.mesh import Cluster
from planner.pricing.options import ALL_CUTS, cut_points, few_hosts
from planner.pricing.plans import PlanPrice, price_plan, shortfall
from planner.pricing.problem import OptionsTakeTooLongError, Problem
from planner.search.annealing import (
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
from planner.search.balance import balanced
from planner.search.baselines import Priced, heuristic_plan, manual_plan, symmetric_plan
from planner.search.bounds.root_bound import call_cycles, front, root_bound
from planner.search.bounds.tree_search import new_walk, walk_on
from planner.search.branch_and_bound import bounds_by_groups, branching, proofs
from planner.search.choices import assignments_of, nearest_choice
from planner.search.compiled.tables import Tables, uncollected
from planner.search.disjoint import disjoint_choice, side_by_side
from rlhf_tasks.spec import CallAssignment, ExecutionPlan

ROUNDING = 1e-9  # relative; a smaller gap counts as zero
BOUNDING = 0.25  # share of the time limit at which the bound by groups ends
ANNEALING = 0.75  # share of the time limit at which annealing ends
TABLES = 0.7  # share of the time limit after which no further options are priced
FIRST = 80  # parts of annealing before any proof, for good plans in the first second


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
    late           not all options could be priced in time: this is the best plan by rule, and nothing was searched
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


class Found(NamedTuple):
    """A mode's result: a plan, a lower bound in seconds, the number of plans priced, and the trace."""

    priced: Priced
    lower_bound_s: float
    evaluations: int = 1
    trace: tuple[TracePoint, ...] = ()


@dataclass(frozen=True)
class Rules:
    """The plans by rule that fit memory, and their points of the trace. They are found before tables are made."""

    plans: tuple[Priced, ...] = ()
    trace: tuple[TracePoint, ...] = ()


@dataclass(frozen=True)
class Request:
    """The input of a mode.

    rules    empty unless the mode is `search`
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
        self._request, self._rules = request, request.rules.plans
        self.state = start_state(request.tables, start)
        self.lower_bound_s, self._evaluations = request.lower_bound_s, 0
        self._trace = list(request.rules.trace)
        self._trace_up_to(float("inf"))

    def deadline_of(self, share: float = 1.0) -> Deadline:
        """The deadline of steps that may use this share of the time limit."""
        until_s = self._request.started + share * self._request.time_limit_s
        return Deadline(until_s, self._request.called_off)

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

    def _trace_up_to(self, time_s: float) -> None:
        """Adds a point to the trace: the less of `time_s` and the last point's time, unless both are infinite."""
        best = min([time_s, *(point.time_s for point in self._trace[-1:])])
        if best < float("inf"):
            seconds = time.monotonic() - self._request.started
            self._trace.append(TracePoint(seconds, best, self.lower_bound_s))

    def found(self) -> Found:
        """The best plan and its price. Raises PlanError when nothing fits memory."""
        candidates = list(self._rules)
        if self.state.excess_bytes <= 0 or not self._rules:
            candidates.append(priced_choice(self._request.tables, self.state.choice.tolist()))
        best = min(candidates, key=lambda one: one.price.iteration_time_s)
        return Found(best, self.lower_bound_s, self._evaluations, tuple(self._trace))


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
                  symmetric (all calls alike), disjoint (every role on its own devices), manual
    time_limit_s  seconds, compilation excluded; when they have passed, the best plan so far is returned. If not all
                  options could be priced by then, that is the best plan by rule, without a bound. Plans by rule may
                  exceed the limit: on 16,384 devices they take some seconds
    seed          equal seeds give equal plans if the time limit does not end the search
    evaluate      the assignments that mode manual prices
    called_off    polled; the search ends as soon as it returns true

    If a signal handler raises while compiled code returns, numba ends the process. A program with such handlers must
    search outside the main thread (flows/cluster/shutdown.py `beside`).

    Raises PlanError when nothing fits memory, with the device, the shortfall in bytes and the fields that would help;
    for an unknown mode; and for mode manual without assignments. Raises ProblemError when a call has no option that
    fits, and for mode disjoint when its options could not be priced in time.
    """
    if mode not in MODES:
        raise PlanError(f"There is no mode {mode!r}; known are {', '.join(MODES)}.")
    if not time_limit_s > 0:
        raise PlanError(f"A time limit of {time_limit_s} s leaves no time to search. Give a positive number.")
    started = time.monotonic()
    rules, late = _by_rule(problem, started) if mode == "search" else Rules(), False
    try:
        tables, asked = Tables(problem, Deadline(started + TABLES * time_limit_s, called_off)), MODES[mode]
        compile_s = _compile(tables) if mode in SEARCHING else 0.0
        lower_bound_s = bound_of(tables)
    except OptionsTakeTooLongError:
        late, rules = True, rules if rules.plans else _by_rule(problem, started)
        given = () if evaluate is None else (evaluate,)
        known = (*(assignments_of(one.plan) for one in rules.plans), *given)
        if not known or mode == "disjoint":
            if called_off():
                raise PlanError("The search was called off before there was a plan.") from None
            raise
        tables = Tables(problem, among=known)
        asked, compile_s, lower_bound_s = _best_rule if mode in SEARCHING else MODES[mode], 0.0, 0.0
    started += compile_s
    found = asked(
        Request(problem, rules, tables, lower_bound_s, time_limit_s, seed, evaluate, started, called_off)
    )
    priced = found.priced if mode == "manual" else balanced(found.priced, problem)
    time_s = priced.price.iteration_time_s
    in_class = found.lower_bound_s <= time_s * (1 + ROUNDING)
    lower_bound_s = min(found.lower_bound_s, time_s)
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
        evaluations=found.evaluations,
        trace=found.trace or (TracePoint(time.monotonic() - started, time_s, lower_bound_s),),
        tables=tables,
        late=late,
    )


def _compile(tables: Tables) -> float:
    """Compiles, or loads, all compiled functions by calling each with almost no work. Returns the seconds."""
    began = time.monotonic()
    start = start_state(tables, greedy_choice(tables))
    cycles, draws = call_cycles(tables.problem.graph), uniforms(0, "compiling", 0, 0)
    bound_of(tables)
    near = neighbours(tables)
    anneal(tables.arrays, near, cycles, start, draws, 1.0, 1.0, True)
    descend(tables.arrays, nobody(tables), cycles, start, 0)
    found = proofs(tables, cycles)
    walk = new_walk(found.relaxation, found.to_options)
    walk.depth[0] = -1
    walk_on(found.relaxation, found.tree, walk, 1.0, 0)
    return time.monotonic() - began


def bound_of(tables: Tables) -> float:
    """The root bound of a problem's options, in seconds per iteration (planner/search/bounds/root_bound.py)."""
    problem = tables.problem
    dispatch_s = problem.model.classes.dispatch_s
    fronts = [
        front([o.seconds + call.chunks * dispatch_s for o in options], [o.size for o in options])
        for call, options in zip(problem.graph.calls, tables.options, strict=True)
    ]
    return root_bound(fronts, call_cycles(problem.graph), problem.cluster.n_devices)


def priced_choice(tables: Tables, choice: Sequence[int]) -> Priced:
    """The plan of a choice ([calls] option numbers) and its price.

    Raises PlanError when it does not fit memory.
    """
    plan = tables.plan(choice)
    price = price_plan(plan, tables.problem.model)
    missing = shortfall(price, tables.problem.model)
    if missing is not None:
        raise PlanError(missing)
    return Priced(plan, price)


def proof_class(problem: Problem) -> str:
    """The plans for which bounds and proofs hold, in one sentence."""
    mixed = "a mesh of several device classes priced by its slowest, "
    return (
        f"Plans on {problem.cluster} whose calls have {_meshes(problem.cluster)}, strategies "
        f"(tp up to {problem.tp_limit}) and micro-batch counts as planner/pricing/options.py lists them, "
        "contiguous stages, "
        f"{mixed if len(problem.model.classes.profiles) > 1 else ''}calls on a device in {_orders(problem.graph)}, "
        "the same in every iteration, inserted nodes placed by rule beside them, frozen models with one call "
        "resident or offloaded, others resident, and at most two iterations in flight; with times and memory as the "
        "cost model gives them."
    )


def _meshes(cluster: Cluster) -> str:
    """The meshes of the class, in words (planner/pricing/options.py `candidate_meshes`)."""
    if cluster.n_hosts <= ALL_CUTS:
        return "all meshes"
    cuts = cut_points(cluster.n_hosts)
    step = cuts[1]
    even = all(cut == i * step for i, cut in enumerate(cuts))
    ends = f"multiples of {step} hosts" if even else f"hosts {', '.join(map(str, cuts))}"
    few = [str(n) for n in few_hosts(cluster.n_hosts)]
    small = f"the first {' or '.join(few)} hosts or the same number after them, " if few else ""
    return f"meshes that begin and end at {ends}, {small}the first host and its aligned parts"


def _orders(graph: DataflowGraph) -> str:
    """The orders of calls of the class, in words (`call_orders`)."""
    which = f"of the first {MOST_ORDERS} orders" if has_more_orders(graph) else "order"
    parts = f", all {graph.chunks} parts of a call under its one option" if graph.chunks > 1 else ""
    return f"one {which} of the graph{parts}"


def _best_rule(request: Request) -> Found:
    plans = request.rules.plans
    return Found(min(plans, key=lambda one: one.price.iteration_time_s), 0.0, 1, request.rules.trace)


def _heuristic(request: Request) -> Found:
    return Found(heuristic_plan(request.problem.graph, request.problem.model), request.lower_bound_s)


def _symmetric(request: Request) -> Found:
    return Found(symmetric_plan(request.problem.graph, request.problem.model), request.lower_bound_s)


def _disjoint(request: Request) -> Found:
    choice, evaluations = disjoint_choice(request.tables)
    return Found(priced_choice(request.tables, choice), request.lower_bound_s, evaluations)


def _manual(request: Request) -> Found:
    if request.evaluate is None:
        raise PlanError("Mode 'manual' prices given assignments; give one for each call.")
    problem = request.problem
    return Found(manual_plan(problem.graph, problem.model, request.evaluate), request.lower_bound_s)


def _search(request: Request) -> Found:
    """Mode search: polish the starts, anneal a little, bound by groups, anneal on, then branch and bound.

    Where calls are cut into parts, the bounds of groups and branches do not hold: they take a call for one node. What
    is proved then is the root bound.
    """
    tables, seed, starts = request.tables, request.seed, _starts(request)
    progress = Progress(request, starts[0])
    near, cycles = neighbours(tables), call_cycles(request.problem.graph)
    parts = annealing(tables, near, cycles, starts, seed)
    for number, start in enumerate(starts):
        state = start_state(tables, start)
        progress.follow(polishing(tables, near, cycles, state, seed, number))
    progress.follow(islice(parts, FIRST))
    if request.problem.graph.chunks > 1:
        progress.follow(parts)
        return progress.found()
    found = proofs(tables, cycles)
    for lower_bound_s in bounds_by_groups(
        found, request.lower_bound_s, progress.state.time_s, progress.deadline_of(BOUNDING)
    ):
        progress.note(progress.state, 0, lower_bound_s)
    progress.follow(parts)
    state, proved_s, deadline = progress.state, progress.lower_bound_s, progress.deadline_of()
    for step in branching(tables, near, cycles, found, state, proved_s, seed, deadline):
        state, lower_bound_s, n_priced = step
        progress.note(state, n_priced, lower_bound_s)
    return progress.found()


def _starts(request: Request) -> list[list[int]]:
    """Different choices to start from: roles side by side, the plans by rule, the fastest option of every call."""
    tables = request.tables
    by_rule = [nearest_choice(tables, assignments_of(rule.plan)) for rule in request.rules.plans]
    apart = side_by_side(tables)
    return [*([] if apart is None else [apart]), *by_rule, greedy_choice(tables)]


def _mcmc(request: Request) -> Found:
    progress = Progress(request, greedy_choice(request.tables))
    near, cycles = neighbours(request.tables), call_cycles(request.problem.graph)
    for state, n_priced in metropolis(request.tables, near, cycles, request.seed):
        progress.note(state, n_priced)
        if progress.deadline_of().is_past():
            break
    return progress.found()


def _by_rule(problem: Problem, started: float) -> Rules:
    """The plans by rule. started: time.monotonic() when the search began."""
    plans, trace = list[Priced](), list[TracePoint]()
    for rule in (heuristic_plan, symmetric_plan):
        with suppress(PlanError):
            plans.append(rule(problem.graph, problem.model))
            best = min(plan.price.iteration_time_s for plan in plans)
            trace.append(TracePoint(time.monotonic() - started, best, 0.0))
    return Rules(tuple(plans), tuple(trace))


SEARCHING = ("search", "mcmc", "disjoint")
"""Modes that look at many options. Their compiled code is loaded before the clock starts."""

MODES: dict[str, Callable[[Request], Found]] = {
    "search": _search,
    "mcmc": _mcmc,
    "heuristic": _heuristic,
    "symmetric": _symmetric,
    "disjoint": _disjoint,
    "manual": _manual,
}
