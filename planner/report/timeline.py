"""One steady-state iteration as bars: the nodes of each group of devices over time."""

from typing import NamedTuple

from planner.pricing.plans import PlanPrice
from planner.report.text import format_devices
from rlhf_tasks.spec import CallNode, ExecutionPlan


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
