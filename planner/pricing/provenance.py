"""The sources of the figures that price a plan, and where pricing extrapolates beyond a profile's points."""

from collections.abc import Iterator
from typing import NamedTuple

from planner.plan.workload import Workload, fullest_share
from planner.pricing.calls import CostModel
from planner.pricing.devices import described
from planner.pricing.figures import MeasuredProfile
from rlhf_tasks.parallel.layout.portions import PREFILL_TOKENS, slots_of
from rlhf_tasks.profiling.measurements import MOST_ROWS, MOST_TOKENS
from rlhf_tasks.spec import CallAssignment, CallNode, ExecutionPlan, ModelFunctionCall

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
        for asked in asked_of(node.call, node.assignment, model.workload):
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
    rows = slots_of(-(-share // groups), given.micro_batches)
    prompts = -(-rows // call.group_size)
    first, last, _ = workload.new_tokens.spans()[-1]
    return [
        LargestPoint("layer/prefill", min(prompts * prompt, PREFILL_TOKENS), prompt),
        LargestPoint("layer/decode", rows, prompt + (first + last) / 2),
    ]
