"""Where the figures that a plan is priced by come from, and where they are stretched beyond what was measured."""

from collections.abc import Iterator
from typing import NamedTuple

from planner.cost import CostModel
from planner.measured import MeasuredProfile
from planner.profile import PRESETS, DeviceProfile
from planner.workload import Workload, fullest_share
from rlhf_tasks.measurements import MOST_ROWS, MOST_TOKENS
from rlhf_tasks.spec import CallAssignment, CallNode, ExecutionPlan, ModelFunctionCall

STRETCH = 2.0  # times what was measured; points are powers of two, so the last slope is near up to it

ROWS_OR_TOKENS = {
    "layer/forward": "tokens of a micro-batch",
    "layer/backward": "tokens of a micro-batch",
    "layer/prefill": "tokens of prompts together",
    "layer/decode": "rows that decode together",
}
"""What `Timed.tokens` are of an operation."""


def figures_source(model: CostModel) -> str:
    """Of each device class a measured profile or its stated figures, and whose prices earlier runs correct."""
    parts = []
    for device, measured in zip(model.classes.profiles, model.measured, strict=True):
        roles = [role for role, own in model.models.items() if own.shape in measured]
        if not roles:
            parts.append(f"{_stated(device)} of {device.name}")
        elif len(roles) == len(model.models):
            parts.append(f"measured profile of {device.name}")
        else:
            others = ", ".join(role for role in model.models if role not in roles)
            told = f"measured profile of {device.name} for {', '.join(roles)}"
            parts.append(f"{told}, its figures recalibrated by that for {others}")
    source = "; ".join(parts)
    if model.ran:
        source += f", corrected by measured figures of {', '.join(sorted({ran.call for ran in model.ran}))}"
    return source


def _stated(device: DeviceProfile) -> str:
    """What a device's figures are; its memory is the machine's own."""
    known = PRESETS.get(device.name)
    if known is None:
        return "stated figures"
    same = device.model_copy(update={"memory_bytes": known.memory_bytes}) == known
    return "preset" if same else "changed preset"


class Asked(NamedTuple):
    """What pricing a call asks of a profile at most: operation, tokens (decoding: rows), context, as in `Timed`."""

    operation: str
    tokens: float
    context: float


class _Beyond(NamedTuple):
    """A call asks for `asked` of `what` of a profile of a device that has `most`."""

    times: float
    call: str
    asked: float
    most: float
    what: str
    device: str


def extrapolation(plan: ExecutionPlan, model: CostModel) -> str | None:
    """One sentence when calls of a plan are priced at more than STRETCH times what their profile measured."""
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
        f"The measured profile of {worst.device} ends at {worst.most:.0f} {worst.what}; {worst.call} is priced at "
        f"{worst.asked:.0f}{more}, by extrapolation. prefect-rlhf profile measures this run's sizes, up to "
        f"{MOST_TOKENS} tokens and {MOST_ROWS} rows."
    )


def _beyond(node: CallNode, model: CostModel) -> Iterator[_Beyond]:
    """How far a call goes in each direction, for the classes of its devices that were measured."""
    shape, tp = model.models[node.call.role].shape, node.placement.strategy.tp
    for number in model.classes_of(node.placement):
        profile = model.measured[number].get(shape)
        if profile is None or tp not in profile.tp_degrees:
            continue
        for asked in asked_of(node.call, node.assignment, model.workload):
            tokens, context = _ends(profile, asked.operation, tp)
            what = ROWS_OR_TOKENS[asked.operation]
            if tokens >= (MOST_ROWS if asked.operation == "layer/decode" else MOST_TOKENS):
                tokens = max(
                    tokens, asked.tokens
                )  # no profile has more: devices are busy, seconds grow linearly
            for value, most, unit in (
                (asked.tokens, tokens, what),
                (asked.context, context, "tokens of a sequence"),
            ):
                yield _Beyond(value / most, node.name, value, most, unit, profile.device)


def _ends(profile: MeasuredProfile, operation: str, tp: int) -> tuple[int, int]:
    """The most tokens and the longest context at which an operation was measured."""
    points = [o for o in profile.operations if (o.operation, o.tp) == (operation, tp)]
    return max(o.tokens for o in points), max(o.context for o in points)


def asked_of(call: ModelFunctionCall, given: CallAssignment, workload: Workload) -> list[Asked]:
    """The largest passes of a layer that planner/cost.py prices a call by."""
    if not call.runs_model:
        return []
    s, length = given.placement.strategy, workload.mean_tokens
    share = fullest_share(call, s.dp)
    if call.kind != "generate":
        tokens = share * length / given.micro_batches
        passes = ["layer/forward"] if call.kind == "inference" else ["layer/forward", "layer/backward"]
        return [Asked(operation, tokens, length) for operation in passes]
    prompt, rows = workload.prompt_tokens, share / min(s.pp, share)
    first, last, _ = workload.new_tokens.spans()[-1]
    return [
        Asked("layer/prefill", rows * prompt, prompt),
        Asked("layer/decode", rows, prompt + (first + last) / 2),
    ]
