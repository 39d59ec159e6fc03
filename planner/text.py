"""Graphs and plans as text: tables, short names of nodes, Mermaid flowcharts, an iteration as bars."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.pricing.plans import PlanPrice
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.spec import (
    CallNode,
    ExecutionPlan,
    FetchNode,
    PlanNode,
    ReallocateNode,
    SyncNode,
    TransferNode,
)
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError


def algorithm_graph(name: str) -> DataflowGraph:
    """The dataflow graph of an algorithm at a nominal size, with all models that it may have, for drawing.

    Raises ConfigError for an unknown algorithm, naming the registered ones; and when the graph depends on a field of
    the configuration that has no default.
    """
    record = algorithm(name)
    try:
        calls = record.calls(record.nominal())
    except AttributeError as fault:
        raise ConfigError(
            f"the graph of {name!r} cannot be drawn without a configuration: {fault}."
        ) from None
    return DataflowGraph(calls, record.dataset_keys, name=name)


def dataflow_mermaid(graph: DataflowGraph) -> str:
    """A Mermaid flowchart of a dataflow graph: data edges with their keys, version edges dotted."""
    lines = ["flowchart TD", '    dataset[("data set")]']
    for call in graph.calls:
        lines.append(f'    {call.name}["{call.name}<br/>{call.role}: {call.kind}"]')
        from_dataset = [key for key in call.inputs if key in graph.dataset_keys]
        if from_dataset:
            lines.append(f"    dataset -->|{_keys(from_dataset)}| {call.name}")
    for a, b, edge in graph.digraph.edges(data=True):
        if edge["keys"]:
            lines.append(f"    {a} -->|{_keys(edge['keys'])}| {b}")
    lines += [
        f"    {edge.writer} -.->|{edge.role}, next iteration| {edge.reader}"
        for edge in graph.across
        if edge.writer != edge.reader
    ]
    return "\n".join(lines) + "\n"


def dataflow_table(graph: DataflowGraph) -> str:
    """The calls of a dataflow graph as a text table."""
    rows = [
        (call.name, call.role, call.kind, ", ".join(call.inputs), ", ".join(call.outputs) or "-")
        for call in graph.calls
    ]
    return text_table(("call", "role", "kind", "inputs", "outputs"), rows)


def short_names(plan: ExecutionPlan) -> dict[str, str]:
    """Node -> a short name; no two are equal.

    A call keeps its name. A transfer is named after its destination, a node that moves parameters after the role.
    """
    short = {node.name: _short_name(node) for node in plan.nodes}
    taken = Counter(short.values())
    return {
        name: brief if taken[brief] == 1 else name.removeprefix("transfer_").replace("_to_", " → ")
        for name, brief in short.items()
    }


def _short_name(node: PlanNode) -> str:
    match node:
        case TransferNode():
            return f"→ {node.name.rpartition('_to_')[2]}"
        case CallNode() | FetchNode():
            return node.name
        case _:
            return f"{node.kind}_{node.role}"


def plan_table(plan: ExecutionPlan) -> str:
    """The nodes of a plan in their total order as a text table."""
    rows = [
        (str(number), node.name, node.kind, node_devices(node), node_detail(node))
        for number, node in enumerate(plan.nodes)
    ]
    return text_table(("", "node", "kind", "devices", "what"), rows)


def format_devices(devices: Sequence[int]) -> str:
    """Device numbers with runs abbreviated, as in `0-3,8`."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def node_devices(node: PlanNode) -> str:
    """The devices of a node; of one that moves something, source → destination."""
    return " → ".join(format_devices(placement.devices) for placement in node.placements)


def node_detail(node: PlanNode) -> str:
    """The details of a node: strategy, keys or role."""
    match node:
        case CallNode(call=call, assignment=assignment, part=(number, _)):
            detail = f"{call.role}: {assignment.placement.strategy}"
            if assignment.micro_batches > 1:
                detail += f", {assignment.micro_batches} micro-batches"
            detail += ", by tokens" if assignment.balance == "tokens" else ""
            if call.chunks > 1:
                detail += f", part {number + 1} of {call.chunks}"
            return detail + (", offloaded" if assignment.offload else "")
        case FetchNode(keys=keys) | TransferNode(keys=keys):
            return ", ".join(keys)
        case ReallocateNode(role=role, source=source, destination=destination):
            return f"{role}: {source.strategy} → {destination.strategy}"
        case SyncNode(role=role, leader=leader, source=source, destination=destination):
            return f"{leader} into {role}: {source.strategy} → {destination.strategy}"
        case _:
            return node.role


def _keys(keys: Sequence[str]) -> str:
    return "<br/>".join(keys)


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns with a rule under the head."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["─" * width for width in widths]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (head, rule, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


class Bar(NamedTuple):
    """One node from start_s to end_s, in seconds within one period. kind: of the call, or of any other node."""

    node: str
    kind: str
    start_s: float
    end_s: float


class DeviceLane(NamedTuple):
    """Devices that run the same nodes, e.g. `0-3`, and their bars in order of time."""

    devices: tuple[int, ...]
    bars: tuple[Bar, ...]

    @property
    def busy_s(self) -> float:
        """Seconds per period in which the devices work."""
        return sum(bar.end_s - bar.start_s for bar in self.bars)


def steady_bars(plan: ExecutionPlan, price: PlanPrice) -> list[DeviceLane]:
    """The groups of devices and their bars over one period of the steady state.

    A node that ends after the period continues at its beginning, as part of the previous iteration.
    """
    period_s = price.iteration_time_s
    kinds = {n.name: n.call.kind if isinstance(n, CallNode) else n.kind for n in plan.nodes}
    used: dict[int, list[str]] = {device: [] for device in range(plan.n_devices)}
    for node in plan.nodes:
        for device in node.devices:
            used[device].append(node.name)
    members: dict[tuple[str, ...], list[int]] = {}
    for device, names in used.items():
        members.setdefault(tuple(names), []).append(device)
    groups = []
    for names, devices in members.items():
        bars: list[Bar] = []
        for name in names:
            start_s = price.steady.start_s[name] % period_s
            end_s = start_s + price.duration_s[name]
            bars.append(Bar(name, kinds[name], start_s, min(end_s, period_s)))
            if end_s > period_s:
                bars.append(Bar(name, kinds[name], 0.0, end_s - period_s))
        groups.append(DeviceLane(tuple(devices), tuple(sorted(bars, key=lambda bar: bar.start_s))))
    return sorted(groups)


def draw_bars(
    groups: list[DeviceLane], period_s: float, width: int = 100, rows: int = 24
) -> list[list[tuple[str, str]]]:
    """Lines of (text, kind) pieces, `width` characters for one period of `period_s` seconds; kind is "" outside bars.

    Bars shorter than half a character are left out. If there are more than `rows` groups, only the busiest are drawn.
    """
    shown = groups if len(groups) <= rows else sorted(sorted(groups, key=lambda g: -g.busy_s)[:rows])
    labels = [format_devices(group.devices) for group in shown]
    longest = min(max(map(len, labels), default=0), 24)
    lines = []
    for group, label in zip(shown, labels, strict=True):
        line, column = [(f"{label[:longest]:>{longest}} │", "")], 0
        for bar in group.bars:
            first, last = (round(moment / period_s * width) for moment in (bar.start_s, bar.end_s))
            first = max(first, column)
            if last <= first:
                continue
            line.append((" " * (first - column), ""))
            line.append((f"{bar.node[: last - first - 1]:─<{last - first - 1}}┤", bar.kind))
            column = last
        line.append((" " * (width - column) + "│", ""))
        lines.append(line)
    if len(shown) < len(groups):
        lines.append([(f"{'':>{longest}}  ... and {len(groups) - len(shown)} less busy groups", "")])
    lines.append([(f"{'':>{longest}} 0 s{f'{period_s:.3g} s':>{width - 2}}", "")])
    return lines
