"""Pictures of a run for the UI and the run folder: curves and the device timeline, as PNG bytes."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from flows.clocks import Span

# Colour-blind-safe (Okabe and Ito, 2008), one per family of nodes.
COLOURS = {
    "generate": "#0072B2",
    "inference": "#56B4E9",
    "train_step": "#D55E00",
    "fetch": "#999999",
    "transfer": "#009E73",
    "reallocate": "#CC79A7",
    "release": "#CC79A7",
    "onload": "#CC79A7",
    "offload": "#CC79A7",
    "save": "#E69F00",
}

CALL_KINDS = ("generate", "inference", "train_step")
LETTER_WIDTH = 1 / 200  # of a label, as a share of the timeline's width


def curves(metrics: Sequence[Mapping[str, Any]], panels: Sequence[tuple[str, Sequence[str]]]) -> bytes:
    """Small line charts over iterations, one panel each.

    metrics  one mapping per committed iteration, in order, with `iteration` (0-based); None for a value that
             was not finite, which is left out
    panels   (title, metric names drawn in it); names that no iteration has are left out, and so are panels
             that are left with nothing
    """
    known = {name for row in metrics for name, value in row.items() if value is not None}
    shown = [(title, [n for n in names if n in known]) for title, names in panels]
    shown = [(title, names) for title, names in shown if names]
    figure = Figure(figsize=(4.2 * max(1, len(shown)), 3.1), dpi=110, layout="constrained")
    for index, (title, names) in enumerate(shown):
        axes = figure.add_subplot(1, len(shown), index + 1)
        for name in names:
            points = [(row["iteration"] + 1, row[name]) for row in metrics if row.get(name) is not None]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.6, label=name)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("iteration", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend(fontsize=8)
    return _png(figure)


def timeline(spans: Sequence[Span], title: str, rows: Mapping[int, str] | None = None) -> bytes:
    """Gantt chart of ranks over time; bars are coloured by kind of node, every other iteration is paler, and calls
    are named where the name fits.

    rows: what stands beside a rank's bars; default: its number.
    Nodes shorter than a thousandth of the picture are drawn as a hairline, so that none is invisible.
    """
    if not spans:
        raise ValueError("a timeline needs at least one span")
    start = min(span.started_s for span in spans)
    width = max(span.ended_s for span in spans) - start
    ranks = sorted({span.rank for span in spans})
    figure = Figure(figsize=(12, 1.4 + 0.55 * len(ranks)), dpi=110, layout="constrained")
    axes = figure.add_subplot(1, 1, 1)
    for span in spans:
        shade = 1.0 if span.iteration % 2 == 0 else 0.6
        length = max(span.ended_s - span.started_s, width / 1000)
        row = ranks.index(span.rank)
        colour = COLOURS[span.kind]
        axes.barh(row, length, left=span.started_s - start, height=0.7, color=colour, alpha=shade)
        label = f"{span.node}\nit {span.iteration}"
        if span.kind in CALL_KINDS and length > width * LETTER_WIDTH * max(map(len, label.split("\n"))):
            centre = span.started_s - start + length / 2
            axes.text(centre, row, label, ha="center", va="center", fontsize=6.5, color="black")
    axes.set_yticks(range(len(ranks)), [rows[rank] if rows else f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("seconds", fontsize=9)
    axes.set_title(title, fontsize=11)
    kinds = [kind for kind in COLOURS if any(span.kind == kind for span in spans)]
    handles = [Patch(color=COLOURS[kind]) for kind in kinds]
    figure.legend(handles, kinds, loc="outside lower center", ncols=len(kinds), fontsize=8, frameon=False)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
