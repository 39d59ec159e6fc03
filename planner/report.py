"""A priced plan as data: the JSON of `prefect-rlhf plan`, tables, and the YAML that a run's `plan:` accepts.

Rejected alternatives: for every call, the best plan found with another mesh for it, and why it loses. The other calls
may be placed differently too. If the chosen plan is not optimal, such a plan may even be faster.

At the end, the sources of the figures, and how far a call's price goes beyond what was measured.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from prefect_rlhf.planner.plan.workload import Workload, fullest_share
from prefect_rlhf.planner.pricing.call_formulas import decoded_at_once
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.device_classes import DeviceClasses
from prefect_rlhf.planner.pricing.devices import described
from prefect_rlhf.planner.pricing.figures import Factor, MeasuredProfile
from prefect_rlhf.planner.pricing.plans import PlanPrice, price_plan, shortfall
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.search.annealing import neighbours, polishing, start_state
from prefect_rlhf.planner.search.bounds.cycles import call_cycles
from prefect_rlhf.planner.search.compiled.tables import Tables, assignments_of, nearest_choice
from prefect_rlhf.planner.search.search import ROUNDING, SearchResult
from prefect_rlhf.planner.text import format_devices
from prefect_rlhf.rlhf_tasks.config.cluster import ByHand
from prefect_rlhf.rlhf_tasks.parallel.layout.work import PREFILL_TOKENS
from prefect_rlhf.rlhf_tasks.profiling.measurements import MOST_ROWS, MOST_TOKENS
from prefect_rlhf.rlhf_tasks.spec import (
    CallAssignment,
    CallNode,
    ExecutionPlan,
    ModelFunctionCall,
    ReallocateNode,
    TransferNode,
)

ALTERNATIVES = (
    "for each call the best plan found with it on other devices; the other calls may have moved too"
)
"""The caption of a table of rejected alternatives."""


def result_document(result: SearchResult) -> dict[str, Any]:
    """All figures of a result for JSON: seconds, bytes, and numbers of devices and hosts (`nodes`)."""
    model = result.tables.problem.model
    return {
        "iteration_time_s": result.iteration_time_s,
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "proven_optimal": result.proven_optimal,
        "proof_class": result.proof_class,
        "device_classes": _device_classes(model.classes),
        "source": figures_source(model),
        "assignments": _assignments(result.plan, result.price, model),
        "transfers": _transfers(result.plan, result.price),
        "peak_memory_bytes": {
            str(device): round(peak.total_bytes) for device, peak in sorted(result.price.peaks.items())
        },
        "host_memory_bytes": {
            str(host): {part: round(size) for part, size in parts.items()}
            for host, parts in result.price.hosts.items()
        },
        "corrections": {
            call: {"factor": by.seconds, "added_s": by.added_s}
            for call, by in corrections(result.tables.problem).items()
        },
        "search": {
            "mode": result.mode,
            "seconds": result.seconds,
            "compile_s": result.compile_s,
            "evaluations": result.evaluations,
            "late": result.late,
        },
    }


def corrections(problem: Problem) -> dict[str, Factor]:
    """Call -> the correction of its price by measured figures of earlier runs; calls without figures are left out."""
    ran = {found.call for found in problem.model.history}
    return {call.name: problem.model.correction(call) for call in problem.graph.calls if call.name in ran}


class CallRow(NamedTuple):
    """A call's placement and price.

    device_class   of its devices; `a + b` if there are several
    sharded        whether dp and cp ranks have shares of the weights
    time_s         seconds of the call, dispatch included
    memory_bytes   peak memory of the fullest of its devices
    missing_bytes  what the device that lacks most lacks; 0 if all fit
    """

    call: str
    devices: str
    device_class: str
    dp: int
    tp: int
    pp: int
    cp: int
    sharded: bool
    micro_batches: int
    offload: bool
    time_s: float
    memory_bytes: int
    missing_bytes: int


def call_rows(plan: ExecutionPlan, price: PlanPrice, model: CostModel) -> list[CallRow]:
    """A row for each call, in the plan's order."""

    def missing_bytes(device: int) -> float:
        return price.peaks[device].total_bytes - model.classes.room_bytes(device)

    return [
        CallRow(
            node.name,
            format_devices(node.devices),
            model.classes.name(model.classes_of(node.placement)),
            node.placement.strategy.dp,
            node.placement.strategy.tp,
            node.placement.strategy.pp,
            node.placement.strategy.cp,
            node.placement.strategy.weight_shares > 1,
            node.assignment.micro_batches,
            node.assignment.offload,
            price.duration_s[node.name],
            round(max(price.peaks[device].total_bytes for device in node.devices)),
            max(0, round(max(map(missing_bytes, node.devices)))),
        )
        for node in plan.nodes
        if isinstance(node, CallNode)
    ]


def reserve_sentences(classes: DeviceClasses) -> list[str]:
    """What is kept of the memory of a device of each class; nothing for a class that keeps none."""
    reserves = [(profile, profile.reserve(classes.cluster.n_devices)) for profile in classes.profiles]
    return [
        f"Of the {profile.memory_bytes / 1e9:.3g} GB of a {profile.name} tensors do not have {kept}."
        for profile, kept in reserves
        if kept.total_bytes
    ]


def host_sentences(price: PlanPrice, model: CostModel) -> list[str]:
    """What the fullest host keeps in its memory beside its devices'; nothing where no host keeps anything."""
    if not price.hosts:
        return []
    host, parts = max(price.hosts.items(), key=lambda item: sum(item[1].values()))
    room, several = model.classes.host_room_bytes(host), len(price.hosts) > 1
    most = "of unknown size" if math.isinf(room) else f"of {room / 1e9:.3g} GB"
    kept = ", ".join(
        f"{part} {size / 1e9:.3g} GB" for part, size in sorted(parts.items(), key=lambda p: -p[1])
    )
    return [f"Memory of {'the fullest host' if several else f'host {host}'}, {most}, holds at most {kept}."]


def proof_sentence(result: SearchResult) -> str:
    """One sentence: seconds per iteration, the lower bound, and how far above the optimum the plan is at most."""
    compiled = f", after {result.compile_s:.1f} s of compilation" if result.compile_s else ""
    certain = "no bound on its distance from the optimum"
    if result.lower_bound_s > 0:
        above = result.iteration_time_s / result.lower_bound_s - 1
        certain = f"at most {_at_most(above)} above the optimum"
    late = ""
    if result.late:
        searched = (
            "only those with few micro-batches were searched: this is the best plan among them and by rule"
        )
        by_rule = "nothing was searched: this is the best plan by rule"
        late = (
            f" Not all options could be priced in time, so {searched if result.evaluations > 1 else by_rule}. "
            "Raise the time limit."
        )
    return (
        f"{result.iteration_time_s:.4g} s per iteration, lower bound {result.lower_bound_s:.4g} s: {certain} "
        f"({result.mode}, {result.evaluations} plans priced in {result.seconds:.1f} s{compiled}).{late}"
    )


def _at_most(share: float) -> str:
    """A share in percent, rounded up to tenths."""
    # The inner round keeps 5% at 5.0% if floating point makes it slightly more.
    return f"{math.ceil(round(share * 1000, 9)) / 1000:.1%}"


def _above(share: float) -> str:
    return f"+{share:.1%}" if share >= 0.0005 else "less than +0.1%"


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
    return f"more load on the critical cycle {' -> '.join(calls)}"


def _moving_s(plan: ExecutionPlan, price: PlanPrice) -> float:
    """Seconds of the reallocations on the critical cycle."""
    return sum(price.duration_s[n] for n in price.steady.cycle if isinstance(plan.node(n), ReallocateNode))


class AlternativeRow(NamedTuple):
    """A call's best alternative placement, seconds per iteration of that plan, and its comparison with the chosen
    plan."""

    call: str
    devices: str
    dp: int
    tp: int
    pp: int
    time_s: float
    beside_the_plan: str


def alternative_rows(rejected: Sequence[Alternative]) -> list[AlternativeRow]:
    """One row for each alternative."""
    rows = []
    for other in rejected:
        placement = other.assignment.placement
        devices, s = format_devices(placement.devices), placement.strategy
        rows.append(AlternativeRow(other.call, devices, s.dp, s.tp, s.pp, other.time_s, other.reason))
    return rows


class ModeRow(NamedTuple):
    """The plan of a search mode.

    time_s  seconds per iteration, hours: of the whole run; None if there is no plan
    remark  how much that is above the best of all modes, or why there is no plan
    """

    mode: str
    time_s: float | None
    hours: float | None
    remark: str


def mode_rows(found: Mapping[str, SearchResult | str], iterations: int) -> list[ModeRow]:
    """One row for each mode, from the results of `compare` in flows/run/planning.py."""
    best = min((r.iteration_time_s for r in found.values() if not isinstance(r, str)), default=0.0)
    rows = []
    for mode, result in found.items():
        if isinstance(result, str):
            rows.append(ModeRow(mode, None, None, result))
        else:
            time_s = result.iteration_time_s
            above = "" if time_s == best else _above(time_s / best - 1)
            rows.append(ModeRow(mode, time_s, time_s * iterations / 3600, above))
    return rows


def told_limits(limits_s: Mapping[str, float]) -> str:
    """The time limits, in seconds, of the modes that have one, as text."""
    return "time limits: " + ", ".join(f"{mode} {limit_s:g} s" for mode, limit_s in limits_s.items())


def plan_document(plan: ExecutionPlan) -> dict[str, str]:
    """{call: placement}: what a run's `plan:` accepts.

    A placement has no `order` if planner/plan/order.py found the plan's order, because it finds the same again.
    """
    return {call: str(ByHand.of(node.assignment)) for call, (node, *_) in plan.calls.items()}


def _device_classes(classes: DeviceClasses) -> dict[str, dict[str, Any]]:
    return {
        profile.name: {
            "nodes": [host for host, number in enumerate(classes.of_host) if number == i],
            "memory_bytes": profile.memory_bytes,
            "reserved_bytes": profile.reserve(classes.cluster.n_devices)._asdict(),
        }
        for i, profile in enumerate(classes.profiles)
    }


def _assignments(plan: ExecutionPlan, price: PlanPrice, model: CostModel) -> dict[str, dict[str, Any]]:
    classes, cluster = model.classes, model.cluster
    return {
        call: {
            "nodes": sorted({cluster.host(device) for device in node.devices}),
            "device_classes": sorted({classes.profile(device).name for device in node.devices}),
            "devices": list(node.devices),
            **asdict(node.placement.strategy),
            "micro_batches": node.assignment.micro_batches,
            "offload": node.assignment.offload,
            "time_s": sum(price.duration_s[part.name] for part in parts),
        }
        for call, parts in plan.calls.items()
        for node in parts[:1]
    }


def _transfers(plan: ExecutionPlan, price: PlanPrice) -> list[dict[str, Any]]:
    found = []
    for node in plan.nodes:
        if isinstance(node, TransferNode):
            source, destination, what = node.source.placement, node.destination.placement, list(node.keys)
        elif isinstance(node, ReallocateNode):
            source, destination, what = node.source, node.destination, [f"parameters of {node.role}"]
        else:
            continue
        found.append(
            {
                "name": node.name,
                "what": what,
                "source": list(source.devices),
                "destination": list(destination.devices),
                "bytes": round(price.moved_bytes[node.name]),
                "time_s": price.duration_s[node.name],
            }
        )
    return found


STRETCH = 2.0  # times the largest measured point: points are powers of two, so the last slope still holds

ROWS_OR_TOKENS = {
    "layer/forward": "tokens of a micro-batch",
    "layer/backward": "tokens of a micro-batch",
    "layer/prefill": "tokens of prompts together",
    "layer/decode": "rows that decode together",
}
"""Operation -> what `Timed.tokens` counts."""


def figures_source(model: CostModel) -> str:
    """The source of each device class's figures (a profile, or stated figures), and the calls that earlier runs
    correct."""
    parts = list[str]()
    for device, profiles in zip(model.classes.profiles, model.measured, strict=True):
        roles: dict[str, list[str]] = {}
        others: list[str] = []
        for role, own in model.models.items():
            profile = profiles.get(own.shape)
            (others if profile is None else roles.setdefault(profile.title, [])).append(role)
        if not roles:
            parts.append(described(device))
        elif len(roles) == 1 and not others:
            parts += roles
        else:
            told = " and ".join(f"{source} for {', '.join(of)}" for source, of in roles.items())
            rest = f", device figures calibrated by it for {', '.join(others)}" if others else ""
            parts.append(told + rest)
    source = "; ".join(parts)
    if model.history:
        source += (
            f", corrected by measured figures of {', '.join(sorted({ran.call for ran in model.history}))}"
        )
    return source


def not_measured(model: CostModel) -> str:
    """Why measured seconds may be far from a plan's, and what to do; "" where a profile or earlier runs price it."""
    profiles = [profile for of_shape in model.measured for profile in of_shape.values()]
    if model.history or any(profile.computed_from is None for profile in profiles):
        return ""
    return (
        "Its prices are a device's stated figures, which nobody has measured here, so runs may take several times as "
        "long. prefect-rlhf profile --config FILE measures them."
    )


class LargestPoint(NamedTuple):
    """The largest point of an operation that a call's price looks up; as in `Timed` (decoding: rows as tokens)."""

    operation: str
    tokens: float
    context: float


class _Beyond(NamedTuple):
    """A call needs `asked`: `times` the profile's largest point, `most`. what: the unit of both."""

    times: float
    call: str
    asked: float
    most: float
    what: str
    profile: str


def extrapolation(plan: ExecutionPlan, model: CostModel) -> str | None:
    """One sentence if calls of a plan are priced at more than STRETCH times the largest point of their profile."""
    found = [
        one
        for node in plan.nodes
        if isinstance(node, CallNode)
        for one in _beyond(node, model)
        if one.times > STRETCH
    ]
    if not found:
        return None
    worst = max(found)
    others = len({one.call for one in found}) - 1
    more = f" ({others} other call{'s' if others > 1 else ''} beyond it too)" if others else ""
    return (
        f"The {worst.profile} ends at {worst.most:.0f} {worst.what}; {worst.call} is priced at "
        f"{worst.asked:.0f}{more}, by extrapolation. prefect-rlhf profile measures this run's sizes, up to "
        f"{MOST_TOKENS} tokens and {MOST_ROWS} rows."
    )


def _beyond(node: CallNode, model: CostModel) -> Iterator[_Beyond]:
    """How far a call's tokens and context go, compared with the profile of each of its device classes."""
    shape, tp = model.models[node.call.role].shape, node.placement.strategy.tp
    for number in model.classes_of(node.placement):
        profile = model.measured[number].get(shape)
        if profile is None or tp not in profile.tp_degrees:
            continue
        for asked in asked_of(node.call, node.assignment, model.workload.of_role(node.call.role)):
            tokens, context = _ends(profile, asked.operation, tp)
            what = ROWS_OR_TOKENS[asked.operation]
            if tokens >= (MOST_ROWS if asked.operation == "layer/decode" else MOST_TOKENS):
                # The profile has the most tokens that are ever measured: beyond, seconds grow linearly.
                tokens = max(tokens, asked.tokens)
            for value, most, unit in (
                (asked.tokens, tokens, what),
                (asked.context, context, "tokens of a sequence"),
            ):
                yield _Beyond(value / most, node.name, value, most, unit, profile.title)


def _ends(profile: MeasuredProfile, operation: str, tp: int) -> tuple[int, int]:
    """The most tokens and the longest context, in tokens, of an operation in a profile."""
    points = [o for o in profile.operations if (o.operation, o.tp) == (operation, tp)]
    return max(o.tokens for o in points), max(o.context for o in points)


def asked_of(call: ModelFunctionCall, given: CallAssignment, workload: Workload) -> list[LargestPoint]:
    """The largest passes of a layer that a call's formula looks up: tokens and context each."""
    if not call.runs_model:
        return []
    s, length = given.placement.strategy, workload.mean_tokens
    share = fullest_share(call, s.dp)
    if call.kind != "generate":
        tokens = share * length / given.micro_batches
        passes = ["layer/forward"] if call.kind == "inference" else ["layer/forward", "layer/backward"]
        return [LargestPoint(operation, tokens, length) for operation in passes]
    prompt, groups = workload.prompt_tokens, min(s.pp, share)
    rows = -(-decoded_at_once(workload, share, groups, call.group_size, given.micro_batches) // groups)
    prompts = -(-rows // call.group_size)
    first, last, _ = workload.new_tokens.spans()[-1]
    return [
        LargestPoint("layer/prefill", min(prompts * prompt, PREFILL_TOKENS), prompt),
        LargestPoint("layer/decode", rows, prompt + (first + last) / 2),
    ]
