"""A priced plan as data: the JSON of `prefect-rlhf plan`, tables, and the YAML that a run's `plan:` accepts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from planner.pricing.calls import CostModel
from planner.pricing.device_classes import DeviceClasses
from planner.pricing.figures import Factor
from planner.pricing.plans import PlanPrice
from planner.pricing.problem import Problem
from planner.pricing.provenance import figures_source
from planner.report.alternatives import Alternative
from planner.report.text import format_devices
from planner.search.search import SearchResult
from rlhf_tasks.spec import CallNode, ExecutionPlan, ReallocateNode, TransferNode

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


def plan_document(plan: ExecutionPlan) -> dict[str, dict[str, Any]]:
    """{call: {devices, dp, tp, pp, micro_batches, balance, offload, order}}: what a run's `plan:` accepts.

    `order` is left out if planner/plan/order.py found the plan's order, because it finds the same again.
    """
    document = {}
    for call, (node, *_) in plan.calls.items():
        given, s = node.assignment, node.placement.strategy
        document[call] = {
            "devices": list(node.placement.devices),
            "dp": s.dp,
            "tp": s.tp,
            "pp": s.pp,
            "micro_batches": given.micro_batches,
            "balance": given.balance,
            "offload": given.offload,
        }
        if given.order is not None:
            document[call]["order"] = given.order
    return document


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
            "nodes": sorted({cluster.host(device) for device in given["devices"]}),
            "device_classes": sorted({classes.profile(device).name for device in given["devices"]}),
            **{key: given[key] for key in ("devices", "dp", "tp", "pp", "micro_batches", "offload")},
            "time_s": sum(price.duration_s[node.name] for node in plan.calls[call]),
        }
        for call, given in plan_document(plan).items()
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
