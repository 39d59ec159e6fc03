"""Pictures of a run for the UI: curves, device timeline and plan, as PNG bytes.

Both versions of the UI show a picture 690 to 890 pixels wide. `WIDTH_IN` is chosen so that small text stays readable.
"""

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from prefect_rlhf.flows.view.clocks import Span
from prefect_rlhf.planner.text import node_devices, short_names
from prefect_rlhf.rlhf_tasks.spec import CallNode, ExecutionPlan, PlanNode

WIDTH_IN = 7.2
DPI = 160

COLOURS = {
    "generate": "#332288",
    "inference": "#88CCEE",
    "train_step": "#CC6677",
    "fetch": "#BBBBBB",
    "transfer": "#117733",
    "reallocate": "#AA4499",
    "release": "#DDCC77",
    "onload": "#44AA99",
    "offload": "#882255",
    "save": "#999933",
    "save_samples": "#EE8866",
    "sync": "#6699CC",
    "evaluate": "#661100",
}
"""A colour for each kind of node that may take long; colour-blind-safe (Tol's muted scheme, and one of the light one,
2021). Others are grey."""
OTHER = "#DDDDDD"
CALL_KINDS = ("generate", "inference", "train_step")

PANELS = (
    *("eval/reward", "eval/loss", "reward", "rewards/*/mean", "rewards/margins", "rewards/accuracies"),
    *("kl", "loss/*", "accuracy"),
)
"""Patterns of the metrics that are drawn, each metric in a separate panel, in this order."""
ENOUGH = 8  # with fewer values, none is an outlier
NOTED = 3  # outliers whose values a note has
MARKED = 60  # a curve of more points has no markers

MOST_ROWS = 32  # rows of a timeline; more would be too small to read
LETTER_IN = 0.062  # width of a letter of a bar's label

BOXES = 4  # boxes side by side in a plan; more would be too narrow for their names
STOP = 0.15  # width of an arrow between boxes, as a fraction of a box's width
ROW_IN = 0.8  # from one row of boxes to the next
BOX_IN = 0.5  # height of a box
LETTER_OF_BOX_IN = 0.058


def drawn_metrics(names: Sequence[str]) -> list[str]:
    """The metrics that have a panel, in the panels' order."""
    return [name for pattern in PANELS for name in names if fnmatchcase(name, pattern)]


def curves(metrics: Sequence[Mapping[str, Any]]) -> bytes:
    """Line charts over iterations, two to a row, one for each metric of `drawn_metrics`.

    metrics  one mapping per complete iteration, in order, with `iteration` (from 0); None for a value that
             was not finite, which is not drawn
    Raises ValueError when nothing can be drawn.
    """
    known = dict.fromkeys(name for row in metrics for name, value in row.items() if value is not None)
    shown = drawn_metrics(list(known))
    if not shown:
        raise ValueError("no metric of these iterations has a panel")
    rows = -(-len(shown) // 2)
    figure = Figure(figsize=(WIDTH_IN, 2.3 * rows), dpi=DPI, layout="constrained")
    for index, name in enumerate(shown):
        axes = figure.add_subplot(rows, 2, index + 1)
        points = [(row["iteration"] + 1, row[name]) for row in metrics if row.get(name) is not None]
        _draw_curve(axes, *map(np.array, zip(*points, strict=True)))
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("iteration", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.grid(alpha=0.3)
    return _png(figure)


def _draw_curve(axes: Axes, iterations: np.ndarray, values: np.ndarray) -> None:
    """Draw one metric: [points], [points]. Outliers are arrows at the edge, and a note has their values."""
    outside = outliers(values)
    kept = values[~outside]
    low, high = kept.min(), kept.max()
    marker = "o" if len(values) <= MARKED else ""
    axes.plot(iterations, values, color="#0072B2", marker=marker, markersize=3, linewidth=1.5)
    if not outside.any():
        return
    margin = 0.08 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    for beyond, edge, arrow in ((values > high, high + margin, "^"), (values < low, low - margin, "v")):
        if beyond.any():  # the layout would make room for an empty line in the picture's corner
            axes.plot(iterations[beyond], np.full(beyond.sum(), edge), arrow, color="#D55E00", clip_on=False)
    apart = [f"{value:.3g} at {at}" for at, value in zip(iterations[outside], values[outside], strict=True)]
    more = f" and {len(apart) - NOTED} more" if len(apart) > NOTED else ""
    note = f"outside: {', '.join(apart[:NOTED])}{more}"
    axes.text(0.98, 0.94, note, transform=axes.transAxes, ha="right", va="top", fontsize=7.5, color="#D55E00")


def outliers(values: np.ndarray) -> np.ndarray:
    """Which values would flatten the rest of a curve: [n] bool from [n].

    Outliers are at most a tenth of the values, and far outside the range of the middle 80%. If the newest value is
    outside too, none is an outlier: the curve may just have begun to leave its range.
    """
    if len(values) < ENOUGH:
        return np.zeros(len(values), dtype=bool)
    low, high = np.quantile(values, 0.1, method="higher"), np.quantile(values, 0.9, method="lower")
    reach = 2 * (high - low)
    outside = (values < low - reach) | (values > high + reach)
    if reach == 0 or outside[-1] or outside.sum() > max(1, len(values) // 10):
        outside[:] = False
    return outside


def timeline(
    spans: Sequence[Span], title: str, rows: Mapping[int, str] | None = None, lines: int = 1
) -> bytes:
    """Gantt chart of ranks over time.

    Bars are coloured by kind of node. Every other iteration is paler. Calls have labels where there is space.
    Very short nodes are drawn with a thousandth of a line's length, so that none is invisible. Of more than MOST_ROWS
    ranks only the first are drawn. Raises ValueError without a span.

    rows   rank -> label of its row; None: its number
    lines  number of equal pieces into which the time is cut, one below the other
    """
    if not spans:
        raise ValueError("a timeline needs at least one span")
    start = min(span.started_s for span in spans)
    piece_s = (max(span.ended_s for span in spans) - start) / lines or 1.0
    known = sorted({span.rank for span in spans})
    ranks = known[:MOST_ROWS]
    named = [rows[rank] if rows else f"rank {rank}" for rank in ranks]
    height_in = 0.9 + lines * (0.35 + 0.34 * len(ranks))
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    pieces = figure.subplots(lines, 1, squeeze=False)[:, 0]
    for line, axes in enumerate(pieces):
        low, high = line * piece_s, (line + 1) * piece_s
        for span in spans:
            left = span.started_s - start
            right = max(span.ended_s - start, left + piece_s / 1000)
            if span.rank in ranks and left < high and right > low:
                _draw_bar(axes, ranks.index(span.rank), max(left, low), min(right, high), span, piece_s)
        axes.set_xlim(low, high)
        axes.set_ylim(len(ranks) - 0.5, -0.5)
        axes.set_yticks(range(len(ranks)), named, fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
    pieces[-1].set_xlabel("seconds", fontsize=8)
    cut = f", first {len(ranks)} of {len(known)} rows" if len(ranks) < len(known) else ""
    figure.suptitle(title + cut, fontsize=10)
    drawn = {span.kind for span in spans}
    kinds = [*(kind for kind in COLOURS if kind in drawn), *sorted(drawn - COLOURS.keys())]
    handles = [Patch(color=COLOURS.get(kind, OTHER)) for kind in kinds]
    figure.legend(
        handles, kinds, loc="outside lower center", ncols=min(len(kinds), 5), fontsize=8, frameon=False
    )
    return _png(figure)


def _draw_bar(axes: Axes, row: int, left: float, right: float, span: Span, piece_s: float) -> None:
    pale = span.iteration % 2 == 1
    colour = COLOURS.get(span.kind, OTHER)
    axes.barh(row, right - left, left=left, height=0.78, color=colour, alpha=0.6 if pale else 1.0)
    label = f"{span.node}\niteration {span.iteration + 1}"
    letters = max(map(len, label.split("\n")))
    if span.kind in CALL_KINDS and (right - left) / piece_s * (WIDTH_IN - 0.8) > letters * LETTER_IN:
        centre = (left + right) / 2
        ink = "black" if pale else _ink(colour)
        axes.text(centre, row, label, ha="center", va="center", fontsize=6.5, color=ink)


def plan_graph(plan: ExecutionPlan) -> bytes:
    """One iteration of a plan, from top to bottom: a box for each node, and arrows to the nodes that wait for it.

    Arrows that others imply are left out. `↻` in a box names nodes of the previous iteration that the node waits for.
    """
    names = short_names(plan)
    graph = needed_arrows(plan)
    level = _levels(graph)
    places, width = _places(graph, level)
    height = ROW_IN * (1 + max(level.values()))
    figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH_IN)
    axes.set_ylim(height, 0)
    axes.axis("off")
    for before, after in graph.edges:
        by = [places[stop] for stop in _stops(before, after, level)]
        axes.add_patch(_arrow([places[before], *by, places[after]]))
    for node in plan.nodes:
        _draw_box(axes, places[node.name], width, node, names)
    return _png(figure)


def needed_arrows(plan: ExecutionPlan) -> nx.DiGraph:
    """The nodes of a plan, with the edges inside one iteration that no other edges imply.

    Nodes and edges have the plan's order, so that the same plan always gives the same picture.
    """
    edges = [(before, node.name) for node in plan.nodes for before in node.after]
    needed = nx.transitive_reduction(nx.DiGraph(edges))
    graph = nx.DiGraph()
    graph.add_nodes_from(node.name for node in plan.nodes)
    graph.add_edges_from(edge for edge in edges if needed.has_edge(*edge))
    return graph


def _levels(graph: nx.DiGraph) -> dict[Any, int]:
    """Node -> its row, below all nodes that it waits for; at most BOXES nodes per row."""
    level: dict[Any, int] = {}
    for layer in nx.topological_generations(graph):
        first = 1 + max(level.values(), default=-1)
        level.update({name: first + number // BOXES for number, name in enumerate(layer)})
    return level


def _stops(before: str, after: str, level: Mapping[Any, int]) -> list[tuple[str, str, int]]:
    """The stops of an arrow, one in each row between its two boxes."""
    return [(before, after, row) for row in range(level[before] + 1, level[after])]


def _places(graph: nx.DiGraph, level: Mapping[Any, int]) -> tuple[dict[Any, tuple[float, float]], float]:
    """(node or stop of an arrow -> its centre, width of a box), in inches.

    Each is placed near its predecessors in the rows above. The fullest row determines the width of a box.
    """
    ways = nx.DiGraph()
    ways.add_nodes_from(graph)
    for before, after in graph.edges:
        nx.add_path(ways, [before, *_stops(before, after, level), after])
    rows: dict[int, list[Any]] = defaultdict(list)
    for item in ways:
        rows[level[item] if item in level else item[2]].append(item)
    places: dict[Any, tuple[float, float]] = {}
    fullest = float(BOXES)

    def wanted(item: Any) -> float:
        above = [places[other][0] for other in ways.predecessors(item)]
        return sum(above) / len(above) if above else WIDTH_IN / 2

    for number in sorted(rows):
        row = sorted(rows[number], key=wanted)
        widths = np.array([1.0 if item in level else STOP for item in row])
        fullest = max(fullest, widths.sum())
        centres = (np.cumsum(widths) - widths / 2) * WIDTH_IN / widths.sum()
        places.update({item: (x, ROW_IN * (number + 0.5)) for item, x in zip(row, centres, strict=True)})
    return places, WIDTH_IN / fullest - 0.1


def _arrow(stops: Sequence[tuple[float, float]]) -> FancyArrowPatch:
    """An arrow from the bottom of the first box, straight down through its stops, to the top of the last box."""
    points, codes = [(stops[0][0], stops[0][1] + BOX_IN / 2)], [Path.MOVETO]
    for x, y in stops[1:]:
        from_x, from_y = points[-1]
        top = y - BOX_IN / 2
        middle = (from_y + top) / 2
        points += [(from_x, middle), (x, middle), (x, top), (x, top + BOX_IN)]
        codes += [*[Path.CURVE4] * 3, Path.LINETO]
    way = Path(points[:-1], codes[:-1])
    return FancyArrowPatch(
        path=way, arrowstyle="-|>", mutation_scale=7, color="#777777", linewidth=0.9, zorder=1
    )


def _draw_box(
    axes: Axes, place: tuple[float, float], width: float, node: PlanNode, names: Mapping[str, str]
) -> None:
    x, y = place
    kind = node.call.kind if isinstance(node, CallNode) else node.kind
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - BOX_IN / 2), width, BOX_IN, boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=COLOURS.get(kind, OTHER), edgecolor="none", zorder=2,
        )
    )  # fmt: skip
    name = f"→ {names[node.name].rpartition('→ ')[2]}" if node.kind == "transfer" else names[node.name]
    strategy = f": {node.assignment.placement.strategy}" if isinstance(node, CallNode) else ""
    waits = [f"↻ {names[before]}" for before in node.after_previous]
    lines = [name, f"{node_devices(node)}{strategy}", *([", ".join(waits)] if waits else [])]
    most = int(width / LETTER_OF_BOX_IN)
    text = "\n".join(line if len(line) <= most else line[: most - 1] + "…" for line in lines)
    ink = _ink(COLOURS.get(kind, OTHER))
    axes.text(x, y, text, ha="center", va="center", fontsize=7.2, color=ink, zorder=3, linespacing=1.1)


def _ink(colour: str) -> str:
    """Black or white, whichever is more readable on a colour."""
    red, green, blue = to_rgb(colour)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
