"""What a run shows in the Prefect UI beside its graph: plan, curves, timeline, completions, progress.

Pictures travel as base64 PNG in markdown, which both versions of the UI draw; inline SVG is drawn by neither.
"""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from flows.clocks import Span
from flows.pictures import curves, timeline
from planner.alternatives import Alternative
from planner.bars import steady_bars
from planner.cost import CostModel
from planner.provenance import figures_source
from planner.render import format_devices, plan_mermaid, plan_table
from planner.report import ALTERNATIVES, alternative_rows, call_rows, mode_rows, proof_sentence, told_limits
from planner.search import SearchResult
from rlhf_tasks.spec import ExecutionPlan

# Panels of the curves, by the names of facts that every algorithm may report; absent ones are not drawn.
PANELS = (
    ("reward", ("reward",)),
    ("KL to the reference", ("kl",)),
    ("loss", ("loss/sft", "loss/reward_model", "loss/policy", "loss/value")),
    ("accuracy", ("accuracy", "rewards/exact/mean")),
)

SHOWN_GROUPS = 32  # of devices that do the same; more rows would be too fine to read


def picture(png: bytes, caption: str) -> str:
    """Markdown of a PNG as a data URI."""
    return f"![{caption}](data:image/png;base64,{base64.b64encode(png).decode()})"


async def tag_flow_run(tags: Sequence[str]) -> None:
    """Add tags to the flow run that this is called in, which may have come from a deployment with its own."""
    async with get_client() as client:
        own = (await client.read_flow_run(UUID(flow_run.id))).tags
        await client.update_flow_run(UUID(flow_run.id), tags=[*own, *(tag for tag in tags if tag not in own)])


async def show_plan(plan: ExecutionPlan) -> None:
    """The plan as a table and as a graph."""
    markdown = (
        f"# Execution plan: {plan.algorithm}\n\n```text\n{plan_table(plan)}\n```\n\n"
        f"```mermaid\n{plan_mermaid(plan)}\n```\n"
    )
    await acreate_markdown_artifact(markdown, key="execution-plan", description="Placement of each call.")


async def show_price(result: SearchResult, model: CostModel, warnings: Sequence[str] = ()) -> None:
    """What a plan costs: a table of its calls, its proof, the source of its figures, and the bars of one steady-state
    iteration. warnings: what is to be said of the figures, a sentence each."""
    rows = [row._asdict() for row in call_rows(result.plan, result.price, model)]
    await acreate_table_artifact(rows, key="plan-calls", description="What each call takes and needs.")
    groups = steady_bars(result.plan, result.price)[:SHOWN_GROUPS]
    spans = [
        Span(number, 0, bar.node, bar.kind, bar.start_s, bar.end_s)
        for number, group in enumerate(groups)
        for bar in group.bars
    ]
    labels = {number: format_devices(group.devices) for number, group in enumerate(groups)}
    title = f"one iteration on {model.classes}, by devices"
    warned = "".join(f"> **Warning:** {warning}\n\n" for warning in warnings)
    await acreate_markdown_artifact(
        f"# {proof_sentence(result)}\n\n{result.proof_class}\n\nPriced by: {figures_source(model)}.\n\n"
        f"{warned}{picture(timeline(spans, title, labels), title)}\n",
        key="plan-timeline",
        description="Predicted seconds per iteration, the proof, and who works when.",
    )


async def show_alternatives(rejected: Sequence[Alternative]) -> None:
    """Each call's best other place, and why it loses, or that it does not."""
    if rejected:
        rows = [row._asdict() for row in alternative_rows(rejected)]
        about = f"Rejected alternatives: {ALTERNATIVES}."
        await acreate_table_artifact(rows, key="plan-alternatives", description=about)


async def show_comparison(
    found: Mapping[str, SearchResult | str], limits_s: Mapping[str, float], iterations: int
) -> None:
    """The hours that some iterations take under each mode's plan. limits_s: seconds that modes had to search."""
    rows = [row._asdict() for row in mode_rows(found, iterations)]
    about = f"{iterations} iterations under the plan of each mode; {told_limits(limits_s)}."
    await acreate_table_artifact(rows, key="plan-modes", description=about)


async def show_curves(metrics: Sequence[Mapping[str, float | None]]) -> None:
    """Reward, KL, losses over the committed iterations."""
    if metrics:
        png = await asyncio.to_thread(curves, metrics, PANELS)  # about a second: the run must go on meanwhile
        await acreate_markdown_artifact(
            f"# After {len(metrics)} iterations\n\n{picture(png, 'curves')}\n",
            key="curves",
            description="Reward, KL and losses.",
        )


async def show_timeline(spans: Sequence[Span]) -> None:
    """The last iterations on the ranks' own clocks."""
    if spans:
        shown = sorted({span.iteration for span in spans})
        title = f"iterations {shown[0]} to {shown[-1]}"
        png = await asyncio.to_thread(timeline, spans, title)
        await acreate_markdown_artifact(
            f"# Devices over time\n\n{picture(png, title)}\n",
            key="device-timeline",
            description="What each rank ran when, by its own clock.",
        )


async def show_completions(samples: Sequence[Mapping[str, Any]]) -> None:
    """A few prompts with what the policy answered and its scores."""
    if samples:
        table = [{name: _short(value) for name, value in sample.items()} for sample in samples]
        await acreate_table_artifact(table, key="completions", description="Samples with their scores.")


async def show_planned_and_measured(figures: Mapping[str, Any]) -> None:
    """A run's time and memory as planned and as measured; figures: of `flows.planned`."""
    rows = [
        _planned_row("iteration, s", figures["iteration"]),
        *(_planned_row(f"{name}, s", pair) for name, pair in figures["calls"].items()),
        *(_memory_row(f"memory in {name}", pair) for name, pair in figures["call_memory_bytes"].items()),
        *(_memory_row(f"memory of device {n}", pair) for n, pair in figures["peak_memory_bytes"].items()),
    ]
    await acreate_table_artifact(
        rows, key="planned-and-measured", description=f"Planned by a {figures['source']}."
    )


def _memory_row(what: str, pair: Mapping[str, float]) -> dict[str, Any]:
    return _planned_row(f"{what}, MB", {key: value / 1e6 for key, value in pair.items()})


def _planned_row(what: str, pair: Mapping[str, float]) -> dict[str, Any]:
    planned, measured = pair["planned"], pair["measured"]
    off = f"{planned / measured - 1:+.0%}" if measured else ""
    return {"what": what, "planned": f"{planned:.4g}", "measured": f"{measured:.4g}", "difference": off}


async def start_progress(total: int) -> UUID:
    """A progress bar over `total` iterations; gives the id for `show_progress`."""
    artifact = await acreate_progress_artifact(
        0.0, key="progress", description=f"Committed of {total} iterations."
    )
    assert isinstance(artifact, UUID)
    return artifact


async def show_progress(artifact: UUID, done: int, total: int) -> None:
    await aupdate_progress_artifact(
        artifact, 100.0 * done / total, description=f"{done} of {total} iterations committed."
    )


def _short(value: Any, longest: int = 400) -> Any:
    text = value if isinstance(value, str) else None
    return value if text is None or len(text) <= longest else text[: longest - 1] + "…"
