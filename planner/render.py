"""Graphs and plans as text: a table, and Mermaid for markdown."""

from collections.abc import Sequence
from types import SimpleNamespace

from planner.graph import DataflowGraph
from rlhf_tasks.algorithms.graphs import GRAPHS
from rlhf_tasks.spec import (
    CallNode,
    ExecutionPlan,
    FetchNode,
    OffloadNode,
    OnloadNode,
    PlanNode,
    ReallocateNode,
    ReleaseNode,
    SaveNode,
    TransferNode,
)

_SHAPES = {
    "fetch": ("[(", ")]"),
    "call": ("[", "]"),
    "transfer": ("([", "])"),
    "reallocate": ("{{", "}}"),
    "release": (">", "]"),
    "onload": ("[[", "]]"),
    "offload": (">", "]"),
    "save": ("[/", "/]"),
}
"""Mermaid's brackets of a node kind."""


def algorithm_graph(algorithm: str) -> DataflowGraph:
    """The dataflow graph of a registered algorithm at a nominal size, for drawing.

    Raises ValueError naming the registered algorithms.
    """
    if algorithm not in GRAPHS:
        raise ValueError(f"There is no algorithm {algorithm!r}; registered are {', '.join(GRAPHS)}.")
    registered = GRAPHS[algorithm]
    nominal = SimpleNamespace(
        batch_size=1,
        num_mini_batches=1,
        scoring_role="reward",
        records_kept=False,
        truncated_responses="keep",
    )
    return DataflowGraph(registered.calls(nominal), registered.dataset_keys, name=algorithm)


def dataflow_mermaid(graph: DataflowGraph) -> str:
    """Mermaid flowchart of a dataflow graph: data edges with their keys, version edges dotted."""
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
    return _table(("call", "role", "kind", "inputs", "outputs"), rows)


def plan_mermaid(plan: ExecutionPlan) -> str:
    """Mermaid flowchart of one iteration of a plan; edges from the iteration before are dotted."""
    lines = ["flowchart TD"]
    for node in plan.nodes:
        opening, closing = _SHAPES[node.kind]
        lines.append(f'    {node.name}{opening}"{node.name}<br/>{_where(node)}"{closing}')
    for node in plan.nodes:
        lines += [f"    {before} --> {node.name}" for before in node.after]
        lines += [f"    {before} -.-> {node.name}" for before in node.after_previous]
    return "\n".join(lines) + "\n"


def plan_table(plan: ExecutionPlan) -> str:
    """The nodes of a plan in their total order as a text table."""
    rows = [
        (str(number), node.name, node.kind, _where(node), _detail(node))
        for number, node in enumerate(plan.nodes)
    ]
    return _table(("", "node", "kind", "devices", "what"), rows)


def format_devices(devices: Sequence[int]) -> str:
    """Device numbers with runs shortened: `0-3,8`."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _where(node: PlanNode) -> str:
    match node:
        case TransferNode(source=source, destination=destination):
            return _arrow(source.placement.devices, destination.placement.devices)
        case ReallocateNode(source=source, destination=destination):
            return _arrow(source.devices, destination.devices)
        case _:
            return format_devices(node.devices)


def _arrow(source: Sequence[int], destination: Sequence[int]) -> str:
    return f"{format_devices(source)} → {format_devices(destination)}"


def _detail(node: PlanNode) -> str:
    match node:
        case CallNode(call=call, assignment=assignment):
            detail = f"{call.role}: {assignment.placement.strategy}"
            if assignment.micro_batches > 1:
                detail += f", {assignment.micro_batches} micro-batches"
            detail += ", by tokens" if assignment.balance == "tokens" else ""
            return detail + (", offloaded" if assignment.offload else "")
        case FetchNode(keys=keys) | TransferNode(keys=keys):
            return ", ".join(keys)
        case ReallocateNode(role=role, source=source, destination=destination):
            return f"{role}: {source.strategy} → {destination.strategy}"
        case ReleaseNode(role=role) | OnloadNode(role=role) | OffloadNode(role=role) | SaveNode(role=role):
            return role


def _keys(keys: Sequence[str]) -> str:
    return "<br/>".join(keys)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns with a rule under the head."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["─" * width for width in widths]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (head, rule, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"
