"""Artifacts of a run in the Prefect UI: plan, curves, timeline, completions, progress.

Pictures are images in markdown, SVG files as data URIs, which both versions of the UI draw. Neither draws inline SVG;
only one draws Mermaid, and too small. Texts are in markdown tables, which wrap them and show them as plain text: a
table artifact would load an image whose address a sample contains.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    aupdate_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.runtime import flow_run

from prefect_rlhf.flows.view.clocks import Span, without_waits
from prefect_rlhf.flows.view.pictures.curves import curves, drawn_metrics
from prefect_rlhf.flows.view.pictures.plan_graph import plan_graph
from prefect_rlhf.flows.view.pictures.svg import Picture
from prefect_rlhf.flows.view.pictures.timeline import timeline
from prefect_rlhf.flows.view.words import measured_against, plain_text, right_answer
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.report import (
    ALTERNATIVES,
    Alternative,
    alternative_rows,
    call_rows,
    figures_source,
    mode_rows,
    proof_sentence,
    reserve_sentences,
    told_limits,
)
from prefect_rlhf.planner.search.search import SearchResult
from prefect_rlhf.planner.text import format_devices, node_detail, node_devices, short_names, steady_bars
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan

SECONDS = "s per iteration"
BAR = 20  # characters of a progress bar
PLAIN = re.compile(r"([!-/:-@\[-`{-~])")  # punctuation that could be markdown syntax
LINKED = re.compile(r"([\[\]|\\<>`*])")  # the same in a link's text: the UI shows other escapes as they are
MOST_ROWS = 100  # of the data, in a table
LONGEST = 400  # characters of a sample's prompt or completion that are shown
WORD = re.compile(r"\S{24}(?=\S)")  # a word may be broken after this many characters


class Page(NamedTuple):
    """A markdown artifact: its key, its description (`about`) and its text."""

    key: str
    about: str
    markdown: str


class Link(NamedTuple):
    """A cell of a table that leads to another page of the UI."""

    text: str
    path: str


async def show_page(page: Page, written: UUID | None = None) -> UUID:
    """Write a page, with one request. Returns its id.

    written  its id if it was written before: the new page replaces it
    """
    if written is None:
        made = await acreate_markdown_artifact(page.markdown, key=page.key, description=page.about)
        assert isinstance(made, UUID)
        return made
    async with get_client() as client:
        await client.update_artifact(written, ArtifactUpdate(data=page.markdown, description=page.about))
    return written


def image(picture: Picture, caption: str) -> str:
    """Markdown of a picture as a data URI."""
    encoded = base64.b64encode(picture.alone().encode()).decode()
    return f"![{caption}](data:image/svg+xml;base64,{encoded})"


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A markdown table of rows with equal columns. Columns of numbers are right-aligned; text is shown literally."""
    heads = list(rows[0])
    numeric = [all(isinstance(row[head], int | float | None) for row in rows) for head in heads]
    rule = ["--:" if right else "---" for right in numeric]
    lines = [map(_plain, heads), rule, *([_cell(row[head]) for head in heads] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else ""
        case float():
            return f"{value:.4g}"
        case None:
            return ""
        case Link(text, path):
            shown = LINKED.sub(r"\\\1", text)
            return f"[{shown}]({path})"
        case _:
            return _plain(str(value))


def _plain(text: str) -> str:
    """Text that markdown shows literally and on one line: line breaks as ↵, unprintable characters as U+FFFD."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in text.replace("\n", " ↵ "))
    return PLAIN.sub(r"\\\1", WORD.sub("\\g<0>\u200b", shown))


async def _show_table(key: str, rows: Sequence[Mapping[str, Any]], about: str) -> None:
    await acreate_markdown_artifact(
        f"{_plain(about)}\n\n{markdown_table(rows)}\n", key=key, description=about
    )


async def tag_flow_run(tags: Sequence[str]) -> None:
    """Add tags to the current flow run. Tags that it has already, e.g. from its deployment, are kept."""
    async with get_client() as client:
        own = (await client.read_flow_run(UUID(flow_run.id))).tags
        await client.update_flow_run(UUID(flow_run.id), tags=[*own, *(tag for tag in tags if tag not in own)])


def plan_page(plan: ExecutionPlan) -> Page:
    """The plan as a graph and as a table."""
    names = short_names(plan)
    rows = [
        {"node": names[node.name], "devices": node_devices(node), "what": node_detail(node)}
        for node in plan.nodes
    ]
    markdown = (
        f"# Execution plan of {plan.algorithm} on {plan.n_devices} devices\n\n"
        f"{image(plan_graph(plan), 'one iteration')}\n\n"
        "Each box names its devices. ↻ waits for that node of the previous iteration.\n\n"
        f"{markdown_table(rows)}\n"
    )
    return Page("execution-plan", "Placement of each call.", markdown)


async def show_price(result: SearchResult, model: CostModel, warnings: Sequence[str] = ()) -> None:
    """Show a plan's price: its calls, its proof, the source of its figures, and a timeline of the steady state.

    warnings  sentences about the figures
    """
    calls = call_rows(result.plan, result.price, model)
    divides, shards = any(row.cp > 1 for row in calls), any(row.sharded for row in calls)
    rows = [
        {
            "call": row.call,
            "devices": row.devices,
            **({"class": row.device_class} if len(model.classes.profiles) > 1 else {}),
            "dp": row.dp,
            "tp": row.tp,
            "pp": row.pp,
            **({"cp": row.cp} if divides else {}),
            **({"sharded": row.sharded} if shards else {}),
            "micro-batches": row.micro_batches,
            "offload": row.offload,
            "seconds": row.time_s,
            "memory, GB": row.memory_bytes / 1e9,
            "lacking, GB": row.missing_bytes / 1e9,
        }
        for row in calls
    ]
    await _show_table(
        "plan-calls", rows, "Seconds and memory of each call; memory: peak of its fullest device."
    )
    groups = steady_bars(result.plan, result.price)
    spans = [
        Span(number, 0, bar.node, bar.kind, bar.start_s, bar.end_s)
        for number, group in enumerate(groups)
        for bar in group.bars
    ]
    labels = {number: format_devices(group.devices) for number, group in enumerate(groups)}
    title = f"one iteration on {model.classes}, by devices"
    warned = "".join(f"> **Warning:** {warning}\n\n" for warning in warnings)
    await acreate_markdown_artifact(
        f"# {proof_sentence(result)}\n\n{result.proof_class}\n\nPriced by: {figures_source(model)}."
        f"{''.join(f' {sentence}' for sentence in reserve_sentences(model.classes))}\n\n"
        f"{warned}{image(timeline(spans, title, labels), title)}\n",
        key="plan-timeline",
        description="Predicted seconds per iteration, the proof, and when each device works.",
    )


async def show_alternatives(rejected: Sequence[Alternative]) -> None:
    """Show for each call the best plan with it on other devices, and why that plan was rejected, if it is worse."""
    if not rejected:
        return
    alternatives = alternative_rows(rejected)
    columns = ("call", "devices", "dp", "tp", "pp")
    rows = [{name: getattr(row, name) for name in columns} | {SECONDS: row.time_s} for row in alternatives]
    reasons = "".join(f"- {_plain(row.call)}: {_plain(row.beside_the_plan)}\n" for row in alternatives)
    about = f"Rejected alternatives: {ALTERNATIVES}."
    await acreate_markdown_artifact(
        f"{markdown_table(rows)}\n{reasons}", key="plan-alternatives", description=about
    )


async def show_comparison(
    found: Mapping[str, SearchResult | str], limits_s: Mapping[str, float], iterations: int
) -> None:
    """Show the hours that `iterations` iterations take under each mode's plan.

    limits_s  mode -> seconds that it had for its search
    """
    rows = [
        {"mode": row.mode, SECONDS: row.time_s, "hours": row.hours, "against the best of these": row.remark}
        for row in mode_rows(found, iterations)
    ]
    about = f"{iterations} iterations under the plan of each mode; {told_limits(limits_s)}."
    await _show_table("plan-modes", rows, about)


def curves_page(metrics: Sequence[Mapping[str, float | None]]) -> Page | None:
    """The page of rewards, KL and losses over the complete iterations; None if there is nothing to draw. One
    iteration alone makes no curve: a table."""
    if not any(drawn_metrics(list(row)) for row in metrics):
        return None
    if len(metrics) == 1:
        [row] = metrics
        heading = "# After 1 iteration"
        shown = markdown_table([{"metric": name, "value": row[name]} for name in drawn_metrics(list(row))])
    else:
        heading, shown = f"# After {len(metrics)} iterations", image(curves(metrics), "curves")
    return Page("curves", "Rewards, KL and losses.", f"{heading}\n\n{shown}\n")


def timeline_page(spans: Sequence[Span]) -> Page | None:
    """The page of the last iterations by the ranks' own clocks, about one per line of the picture; None if empty."""
    if not spans:
        return None
    shown = sorted({span.iteration + 1 for span in spans})
    title = f"iterations {shown[0]} to {shown[-1]}"
    markdown = (
        f"# Devices over time\n\n{image(timeline(without_waits(spans), title, lines=len(shown)), title)}\n"
    )
    return Page("device-timeline", "The nodes that each rank ran, by its own clock.", markdown)


def completions_page(samples: Sequence[Mapping[str, Any]]) -> Page | None:
    """The page of some prompts with the policy's completions, each beside the right answer where its row has one:
    first a table of the scores, then the texts. None if there are no samples."""
    if not samples:
        return None
    texts = [
        f"### Sample {number}\n\n> {_shown(sample['prompt'])}\n\n{_answered(sample)}\n"
        for number, sample in enumerate(samples, 1)
    ]
    about = "Samples of the newest iteration: their scores, then each prompt with its completion."
    return Page("completions", about, "\n".join([markdown_table(score_rows(samples)), *texts]))


def _answered(sample: Mapping[str, Any]) -> str:
    """A sample's completion, beside its row's right answer where that has one."""
    completion, right = _shown(sample["completion"]), right_answer(sample)
    if right is None:
        return completion
    return f"| completion | right answer |\n| --- | --- |\n| {completion} | {_shown(right)} |\n"


async def show_scores(scores: Mapping[str, float]) -> None:
    """Show the result of a rollout or an evaluation: the number of its samples, and their mean scores."""
    rows = [{"score": name, "mean": value} for name, value in scores.items() if name != "samples"]
    await _show_table("scores", rows, f"Means over {scores['samples']} samples.")


async def show_result(heading: str, stages: Sequence[Mapping[str, Any]]) -> None:
    """Show a pipeline's result, with a row for each stage."""
    markdown = f"# {_plain(heading)}\n\n{markdown_table(stages)}\n"
    await acreate_markdown_artifact(markdown, key="result", description=heading)


def score_rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each sample: its number, its fields except its texts, and each reward by its name. A column that is
    empty in all of them is left out."""
    rows: list[dict[str, Any]] = []
    for number, sample in enumerate(samples, 1):
        row: dict[str, Any] = {"sample": number}
        for name, value in sample.items():
            if name == "rewards":
                row |= value
            elif name not in ("prompt", "completion", "columns"):
                row[name.replace("_", " ")] = value
        rows.append(row)
    filled = {name for row in rows for name, value in row.items() if value is not None}
    return [{name: value for name, value in row.items() if name in filled} for row in rows]


def _shown(text: str | Sequence[Mapping[str, Any]]) -> str:
    """A text, or the messages of a conversation, as markdown of at most LONGEST characters."""
    return _plain(plain_text(text, LONGEST)) or "(nothing)"


async def show_skipped_rows(skipped: Sequence[tuple[str, str]]) -> None:
    """Show the first rows of the data that were left out, and why."""
    if skipped:
        rows = [{"row": where, "reason": why} for where, why in skipped[:MOST_ROWS]]
        await _show_table("skipped-rows", rows, f"Rows of the data that are left out: {len(skipped)}.")


async def show_planned_and_measured(figures: Mapping[str, Any]) -> None:
    """Show a run's planned and measured seconds and memory; figures: from `flows.run.summary`."""
    rows = [
        _planned_row("iteration", "s", figures["iteration"]),
        *(_planned_row(name, "s", pair) for name, pair in figures["calls"].items()),
        *(_memory_row(f"memory in {name}", pair) for name, pair in figures["call_memory_bytes"].items()),
        *(_memory_row(f"memory of device {n}", pair) for n, pair in figures["peak_memory_bytes"].items()),
    ]
    about = f"Planned by a {figures['source']}. {figures.get('note', '')}".rstrip()
    await _show_table("planned-and-measured", rows, about)


def _memory_row(what: str, pair: Mapping[str, float]) -> dict[str, Any]:
    return _planned_row(what, "MB", {key: value / 1e6 for key, value in pair.items()})


def _planned_row(what: str, unit: str, pair: Mapping[str, float]) -> dict[str, Any]:
    planned, measured = pair["planned"], pair["measured"]
    row = {"what": what, "planned": planned, "measured": measured, "unit": unit}
    return row | {"measured is": measured_against(planned, measured)}


async def start_progress(total: int) -> UUID:
    """Create a progress bar over `total` iterations. Returns its id, for `show_progress`."""
    artifact = await acreate_progress_artifact(0.0, key="progress", description=progress_bar(0, 0, total))
    assert isinstance(artifact, UUID)
    return artifact


async def show_progress(artifact: UUID, complete: int, committed: int, total: int) -> None:
    """Update the bar: `complete` of `total` iterations have ended, `committed` of these cannot be undone."""
    await aupdate_progress_artifact(
        artifact, round(100 * complete / total, 1), description=progress_bar(complete, committed, total)
    )


def progress_bar(complete: int, committed: int, total: int) -> str:
    """A bar of characters, because the UI shows only the number of a progress artifact."""
    full = BAR * complete // total
    return f"{'█' * full}{'░' * (BAR - full)} {complete} of {total} iterations, {committed} committed"
