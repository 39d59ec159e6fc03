"""The report of one run as a page."""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from prefect_rlhf.flows.view.clocks import Span, without_waits
from prefect_rlhf.flows.view.pictures.bars import second_bars, work_bars
from prefect_rlhf.flows.view.pictures.colours import in_words
from prefect_rlhf.flows.view.pictures.curves import curve_panel, drawn_metrics
from prefect_rlhf.flows.view.pictures.plan_graph import plan_graph
from prefect_rlhf.flows.view.pictures.svg import Picture, element, seconds, short, shown_text
from prefect_rlhf.flows.view.pictures.timeline import timeline
from prefect_rlhf.flows.view.report.contents import Contents, Samples
from prefect_rlhf.flows.view.report.document import (
    document,
    folded,
    header,
    paragraph,
    section,
    table,
    tiles,
)
from prefect_rlhf.flows.view.words import measured_against, plain_text, right_answer
from prefect_rlhf.planner.text import node_detail, node_devices, short_names

LONGEST = 1200  # characters of a prompt or completion
MOST_CURVES = 48  # beside those that have a panel in the UI
MOST_NODES = 120  # of a plan that is drawn
MOST_SAMPLES = 6
TIMES = "time/"  # of nodes: these have a section


def run_page(contents: Contents) -> str:
    """The page of one run."""
    parts = [
        ("curves", "Curves", curves_part(contents)),
        ("time", "Where the time goes", time_part(contents)),
        ("plan", "Plan", plan_part(contents)),
        ("samples", "Samples, early and late", samples_part(contents.samples)),
        ("lineage", "Lineage", lineage_part(contents)),
        ("configuration", "Configuration", folded("Every key", _code(contents.configuration))),
    ]
    shown = [(anchor, heading, body) for anchor, heading, body in parts if body]
    words = f"{contents.algorithm} of {contents.model}. {contents.ended}"
    head = header(contents.run, words, shown)
    sections = [section(*part) for part in shown]
    body = [head, tiles(key_figures(contents)), *sections, footer(contents.versions)]
    return document(f"{contents.run}: {contents.algorithm}", "".join(body))


def footer(versions: str) -> str:
    """What wrote a page."""
    return element("footer", shown_text(f"Written by {versions}. This page loads nothing from elsewhere."))


def key_figures(contents: Contents) -> list[tuple[str, str]]:
    """(what, figure) of a run, for its head and for a comparison."""
    summary = contents.summary
    of = "" if contents.total is None else f" of {contents.total}"
    figures = [("iterations", f"{contents.complete}{of}")]
    for name in ("eval/reward", "eval/loss", "reward", "accuracy", "loss/sft"):
        if (curve := contents.curves.get(name)) is not None and len(curve.values):
            first, last = float(curve.values[0]), float(curve.values[-1])
            figures.append((f"{name}, first → last", f"{short(first)} → {short(last)}"))
    if per_iteration := summary.get("seconds_per_iteration"):
        figures.append(("per iteration", seconds(per_iteration)))
    if whole := summary.get("seconds"):
        figures.append(("on the ranks' clocks", seconds(whole)))
    last = {name: float(curve.values[-1]) for name, curve in contents.curves.items() if len(curve.values)}
    if pace := last.get("throughput/tokens_per_s"):
        figures.append(("generated", f"{short(pace)} tokens/s"))
    if mfu := last.get("mfu"):
        figures.append(("of peak FLOPs (MFU)", f"{100 * mfu:.3g}%"))
    peaks = summary.get("planned_and_measured", {}).get("peak_memory_bytes", {}).values()
    if peaks:
        figures.append(
            ("memory of the fullest rank", f"{max(pair['measured'] for pair in peaks) / 1e9:.3g} GB")
        )
    return figures


# --- curves ---


def curves_part(contents: Contents) -> str:
    """A panel for each metric; those without a panel in the UI are folded."""
    curves = {name: curve for name, curve in contents.curves.items() if len(curve.values)}
    if not curves:
        return paragraph("No iteration is committed, so there are no metrics.")
    first = drawn_metrics(list(curves))
    rest = [name for name in curves if name not in first and not name.startswith(TIMES)]
    panels = [curve_panel(name, [curves[name]]) for name in first]
    others = [curve_panel(name, [curves[name]]) for name in rest[:MOST_CURVES]]
    missing = f" ({len(rest) - MOST_CURVES} more are in metrics.jsonl)" if len(rest) > MOST_CURVES else ""
    return beside(panels) + folded(f"{len(others)} other metrics{missing}", beside(others))


def beside(panels: Sequence[Picture]) -> str:
    """Panels side by side, as many as the page is wide for."""
    return element("div", *(panel.inline() for panel in panels), class_="panels") if panels else ""


# --- time ---


def time_part(contents: Contents) -> str:
    """Seconds of calls, planned beside measured, what ranks' time goes to, and the last iterations."""
    if not contents.spans:
        return ""
    first, last = contents.looked_at
    parts = [paragraph(f"By each rank's clock, in iterations {first + 1} to {last + 1}.", class_="pale-text")]
    if contents.nodes:
        parts.append(_wide(second_bars(contents.nodes, "Seconds of each call")))
        planned = any(bar.planned_s is not None for bar in contents.nodes)
        words = "The bar is the median, the line the middle 80% of the iterations."
        parts.append(paragraph(words + (" A dashed frame is the plan." if planned else "")))
    parts.append(_wide(work_bars(contents.work_s, "What each rank's time goes to")))
    parts.append(_kinds_of_work(contents))
    title = _iterations([span.iteration for span in contents.spans])
    lines = len({span.iteration for span in contents.spans})
    parts += [element("h3", "Timeline"), _wide(timeline(without_waits(contents.spans), title, lines=lines))]
    compared = contents.summary.get("planned_and_measured")
    if compared and compared["iterations"]:
        parts.append(folded("Planned beside measured, with memory", planned_part(compared)))
    return "".join(parts)


def _iterations(numbers: Sequence[int]) -> str:
    first, last = min(numbers) + 1, max(numbers) + 1
    return f"Iteration {first}" if first == last else f"Iterations {first} to {last}"


def _kinds_of_work(contents: Contents) -> str:
    """A table: what an iteration's seconds go to, as a mean over ranks."""
    first, last = contents.looked_at
    count = (last - first + 1) * len(contents.work_s)
    sums: dict[str, float] = {}
    for work in contents.work_s.values():
        for kind, spent_s in work.items():
            sums[kind] = sums.get(kind, 0.0) + spent_s
    whole = sum(sums.values()) or 1.0
    rows = [
        {
            "kind of work": in_words(kind),
            "per iteration and rank": seconds(spent_s / count),
            "share": f"{100 * spent_s / whole:.1f}%",
        }
        for kind, spent_s in sorted(sums.items(), key=lambda item: -item[1])
        if spent_s > 0
    ]
    return table(rows)


def planned_part(compared: Mapping[str, Any]) -> str:
    """Planned and measured seconds and memory of `flows.run.summary` as a table."""
    times = {"iteration": compared["iteration"], **compared["calls"]}
    rows = [_pair(name, pair, seconds) for name, pair in times.items()]
    memory = {f"memory in {name}": pair for name, pair in compared["call_memory_bytes"].items()}
    memory |= {f"memory of device {n}": pair for n, pair in compared["peak_memory_bytes"].items()}
    rows += [_pair(name, pair, lambda size: f"{size / 1e9:.3g} GB") for name, pair in memory.items()]
    about = f"Planned by a {compared['source']}. {compared.get('note', '')}".rstrip()
    return paragraph(about) + table(rows)


def _pair(what: str, pair: Mapping[str, float], shown: Callable[[float], str]) -> dict[str, str]:
    planned, measured = pair["planned"], pair["measured"]
    words = measured_against(planned, measured)
    return {"what": what, "planned": shown(planned), "measured": shown(measured), "measured is": words}


def _wide(picture: Picture) -> str:
    """A picture that scrolls where the page is too narrow for it."""
    return element("div", picture.inline(), class_="wide", tabindex=0)


# --- plan ---


def plan_part(contents: Contents) -> str:
    """The plan as a graph, its iteration in the planner's seconds, and its nodes as a table."""
    plan = contents.plan
    if plan is None:
        return ""
    parts = []
    if len(plan.nodes) <= MOST_NODES:
        parts.append(_wide(plan_graph(plan)))
        parts.append(
            paragraph("Each box names its devices. ↻ waits for that node of the previous iteration.")
        )
    if contents.lanes:
        spans = [
            Span(number, 0, bar.node, bar.kind, bar.started_s, bar.ended_s)
            for number, bars in enumerate(contents.lanes.values())
            for bar in bars
        ]
        rows = dict(enumerate(contents.lanes))
        parts.append(_wide(timeline(spans, "One iteration as it was planned, by devices", rows)))
    names = short_names(plan)
    nodes = [
        {"node": names[node.name], "devices": node_devices(node), "what": node_detail(node)}
        for node in plan.nodes[:MOST_NODES]
    ]
    more = f", the first {MOST_NODES}" if len(plan.nodes) > MOST_NODES else ""
    parts.append(folded(f"Its {len(plan.nodes)} nodes{more}", table(nodes)))
    return "".join(parts)


# --- samples ---


def samples_part(samples: Sequence[Samples]) -> str:
    """Samples of an early and of a late iteration, side by side."""
    if not samples or not any(some.rows for some in samples):
        return ""
    heads = [element("h3", f"Iteration {some.iteration + 1}") for some in samples]
    columns = [[sample_card(row) for row in some.rows[:MOST_SAMPLES]] for some in samples]
    cells = [cell for row in zip_longest(*columns, fillvalue="") for cell in row]
    return element("div", *heads, *cells, class_="pairs" if len(samples) > 1 else None)


def sample_card(row: Mapping[str, Any]) -> str:
    """One sample: its scores, prompt, completion and right answer."""
    figures = {
        "score": row.get("score"),
        **(row.get("rewards") or {}),
        "reward model": row.get("reward_model"),
    }
    words = ", ".join(f"{name} {short(value)}" for name, value in figures.items() if value is not None)
    ended = ", cut at its length" if row.get("truncated") else ""
    right = right_answer(row)
    parts = [
        element("div", shown_text(f"{words}{ended}"), class_="pale-text"),
        element("pre", _text(row.get("prompt", "")), class_="asked"),
        element("pre", _text(row.get("completion", "")) or "(nothing)"),
    ]
    if right is not None:
        parts.append(element("div", f"right answer: {_text(right)}", class_="pale-text"))
    return element("div", *parts, class_="sample")


def _text(text: str | Sequence[Mapping[str, Any]]) -> str:
    return shown_text(plain_text(text, LONGEST))


# --- lineage and configuration ---


def lineage_part(contents: Contents) -> str:
    """Where the run came from: a table under each heading."""
    return "".join(
        element("h3", shown_text(heading)) + table(rows) for heading, rows in contents.lineage.items() if rows
    )


def _code(text: str) -> str:
    return element("pre", shown_text(text), class_="code") if text else ""
