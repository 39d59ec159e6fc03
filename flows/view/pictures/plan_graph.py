"""One iteration of a plan: a box for each node, and arrows to the nodes that wait for it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx
import numpy as np

from prefect_rlhf.flows.view.pictures.colours import class_of
from prefect_rlhf.flows.view.pictures.svg import LETTER, WIDTH, Picture, cut, element, hint, shown_text
from prefect_rlhf.planner.text import node_detail, node_devices, short_names
from prefect_rlhf.rlhf_tasks.spec import CallNode, ExecutionPlan, PlanNode

BOXES = 4  # boxes side by side; more would be too narrow for their names
STOP = 0.15  # width of an arrow between boxes, as a fraction of a box's width
ROW = 88.0  # from one row of boxes to the next
BOX = 54.0  # height of a box
GAP = 12.0  # between two boxes
LINE = 15.0  # from a line of a box to the next
Place = tuple[float, float]


def plan_graph(plan: ExecutionPlan) -> Picture:
    """From top to bottom. Arrows that others imply are left out. `↻` in a box names nodes of the previous iteration
    that the node waits for."""
    names = short_names(plan)
    graph = needed_arrows(plan)
    level = _levels(graph)
    places, width = _places(graph, level)
    arrows = []
    for before, after in graph.edges:
        by = [places[stop] for stop in _stops(before, after, level)]
        arrows.append(_arrow([places[before], *by, places[after]]))
    boxes = [_box(places[node.name], width, node, names) for node in plan.nodes]
    label = f"The {len(plan.nodes)} nodes of one iteration of {plan.algorithm}, and what waits for what."
    return Picture(WIDTH, ROW * (1 + max(level.values())), label, "".join([*arrows, *boxes]))


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


def _places(graph: nx.DiGraph, level: Mapping[Any, int]) -> tuple[dict[Any, Place], float]:
    """(node or stop of an arrow -> its centre, width of a box), in pixels.

    Each is placed near its predecessors in the rows above. The fullest row determines the width of a box.
    """
    ways = nx.DiGraph()
    ways.add_nodes_from(graph)
    for before, after in graph.edges:
        nx.add_path(ways, [before, *_stops(before, after, level), after])
    rows: dict[int, list[Any]] = defaultdict(list)
    for item in ways:
        rows[level[item] if item in level else item[2]].append(item)
    places: dict[Any, Place] = {}
    fullest = float(BOXES)

    def wanted(item: Any) -> float:
        above = [places[other][0] for other in ways.predecessors(item)]
        return sum(above) / len(above) if above else WIDTH / 2

    for number in sorted(rows):
        row = sorted(rows[number], key=wanted)
        widths = np.array([1.0 if item in level else STOP for item in row])
        fullest = max(fullest, float(widths.sum()))
        centres = (np.cumsum(widths) - widths / 2) * WIDTH / widths.sum()
        places.update({item: (float(x), ROW * (number + 0.5)) for item, x in zip(row, centres, strict=True)})
    return places, WIDTH / fullest - GAP


def _arrow(stops: Sequence[Place]) -> str:
    """From the bottom of the first box, straight down through its stops, to the top of the last box."""
    x, y = stops[0][0], stops[0][1] + BOX / 2
    way = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y in stops[1:]:
        top = to_y - BOX / 2
        middle = (y + top) / 2
        way.append(f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {top:.1f}")
        x, y = to_x, to_y + BOX / 2
        way.append(f"V{y:.1f}")
    top = stops[-1][1] - BOX / 2
    tip = f"{x - 3.5:.1f},{top - 6:.1f} {x + 3.5:.1f},{top - 6:.1f} {x:.1f},{top:.1f}"
    return element("path", d="".join(way[:-1]), class_="arrow") + element("polygon", points=tip, class_="tip")


def _box(place: Place, width: float, node: PlanNode, names: Mapping[str, str]) -> str:
    x, y = place
    kind = node.call.kind if isinstance(node, CallNode) else node.kind
    name = f"→ {names[node.name].rpartition('→ ')[2]}" if node.kind == "transfer" else names[node.name]
    strategy = f": {node.assignment.placement.strategy}" if isinstance(node, CallNode) else ""
    waits = [f"↻ {names[before]}" for before in node.after_previous]
    lines = [name, f"{node_devices(node)}{strategy}", *([", ".join(waits)] if waits else [])]
    first = y + 4 - LINE * (len(lines) - 1) / 2
    spans = [
        element("tspan", shown_text(cut(line, width - LETTER)), x=x, y=first + LINE * number)
        for number, line in enumerate(lines)
    ]
    box = element(
        "rect", hint(f"{node.name}: {node_detail(node)}"), x=x - width / 2, y=y - BOX / 2, width=width,
        height=BOX, rx=6, class_=class_of(kind),
    )  # fmt: skip
    return box + element("text", *spans, text_anchor="middle")
