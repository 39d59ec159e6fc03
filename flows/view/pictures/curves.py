"""Curves of metrics over iterations, a panel for each metric; of several runs in one panel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from prefect_rlhf.flows.view.pictures.svg import WIDTH, Picture, element, hint, path, short, text, ticks

PANELS = (
    *("eval/reward", "eval/loss", "reward", "rewards/*/mean", "rewards/margins", "rewards/accuracies"),
    *("kl", "loss/*", "accuracy"),
)
"""Patterns of the metrics that are drawn, each metric in a separate panel, in this order."""
ENOUGH = 8  # with fewer values, none is an outlier
NOTED = 3  # outliers whose values a note has
MARKED = 60  # a curve of more points has no markers
MOST_POINTS = 240  # of a curve; more values are drawn as the mean and the range of neighbours

PANEL_WIDTH, PANEL_HEIGHT = WIDTH / 2, 190.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 14.0, 30.0, 34.0  # around the axes
EMPTY = 0.08  # of the axes' height, above and below the curves


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of one run: [points] iterations, counted from 1 (0: before the first), and [points] values.

    run, colour  of several runs in a panel, the name, and the number of the colour
    """

    iterations: np.ndarray
    values: np.ndarray
    run: str = ""
    colour: int = 0

    def thinned(self) -> "tuple[Curve, np.ndarray, np.ndarray]":
        """(at most MOST_POINTS means of neighbours, their lowest values, their highest values)."""
        if len(self.values) <= MOST_POINTS:
            return self, self.values, self.values
        parts = np.array_split(np.arange(len(self.values)), MOST_POINTS)
        thin = replace(
            self,
            iterations=np.array([self.iterations[part[-1]] for part in parts]),
            values=np.array([self.values[part].mean() for part in parts]),
        )
        low, high = (np.array([pick(self.values[part]) for part in parts]) for pick in (np.min, np.max))
        return thin, low, high


def curve_of(metrics: Sequence[Mapping[str, Any]], name: str) -> Curve:
    """A metric of rows with `iteration` (from 0; -1: before the first). None, a value that was not finite, is left
    out."""
    rows = [row for row in metrics if row.get(name) is not None]
    return Curve(np.array([row["iteration"] + 1 for row in rows]), np.array([row[name] for row in rows]))


def drawn_metrics(names: Sequence[str]) -> list[str]:
    """The metrics that have a panel, in the panels' order."""
    return [name for pattern in PANELS for name in names if fnmatchcase(name, pattern)]


def curves(metrics: Sequence[Mapping[str, Any]]) -> Picture:
    """The panels of the metrics of `drawn_metrics`, two to a row.

    metrics  a mapping for each complete iteration, in order, with `iteration` (from 0); None for a value that
             was not finite, which is not drawn
    Raises ValueError when nothing can be drawn.
    """
    known = dict.fromkeys(name for row in metrics for name, value in row.items() if value is not None)
    shown = drawn_metrics(list(known))
    if not shown:
        raise ValueError("no metric of these iterations has a panel")
    panels = [curve_panel(name, [curve_of(metrics, name)]) for name in shown]
    places = [(PANEL_WIDTH * (number % 2), PANEL_HEIGHT * (number // 2)) for number in range(len(panels))]
    body = "".join(panel.at(x, y) for panel, (x, y) in zip(panels, places, strict=True))
    return Picture(WIDTH, PANEL_HEIGHT * -(-len(panels) // 2), f"Curves of {', '.join(shown)}.", body)


def curve_panel(name: str, of_runs: Sequence[Curve]) -> Picture:
    """A metric of one run, or of several, over iterations. Values far outside are arrows at the edge, and a note has
    them.

    of_runs  at least one curve, each with at least one point
    """
    thinned = [(*curve.thinned(), outliers(curve.thinned()[0].values)) for curve in of_runs]
    lows = [low[~outside].min() for _, low, _, outside in thinned]
    highs = [high[~outside].max() for _, _, high, outside in thinned]
    first, last = (pick(curve.iterations) for curve, pick in _ends(of_runs))
    axes = _Axes(float(first), float(last), float(min(lows)), float(max(highs)))
    drawn = [_draw_curve(axes, *parts) for parts in thinned]
    newest = "" if len(of_runs) > 1 else short(float(of_runs[0].values[-1]))
    head = text(LEFT, 17, name, class_="head") + text(
        PANEL_WIDTH - RIGHT, 17, newest, class_="pale", text_anchor="end"
    )
    points = [(curve, curve.run or name) for curve, *_ in thinned]
    data = "|".join(
        ";".join(f"{x},{short(float(y))}" for x, y in zip(curve.iterations, curve.values, strict=True))
        for curve, _ in points
    )
    label = f"{name} over iterations {first} to {last}, {_in_short(of_runs)}."
    scale = f"{axes.left},{axes.right},{axes.first},{axes.last}"
    return Picture(
        PANEL_WIDTH, PANEL_HEIGHT, label, head + axes.drawn() + "".join(drawn),
        (
            ("points", data), ("scale", scale), ("names", "|".join(each.replace("|", "/") for _, each in points)),
            ("runs", "|".join(str(curve.colour) for curve, _ in points)),
        ),
    )  # fmt: skip


def _ends(of_runs: Sequence[Curve]) -> list[tuple[Curve, Any]]:
    by_start = min(of_runs, key=lambda curve: curve.iterations.min())
    by_end = max(of_runs, key=lambda curve: curve.iterations.max())
    return [(by_start, np.min), (by_end, np.max)]


def _in_short(of_runs: Sequence[Curve]) -> str:
    ways = [f"{short(float(curve.values[0]))} to {short(float(curve.values[-1]))}" for curve in of_runs]
    return f"from {', '.join(ways)}"


class _Axes:
    """Axes from `first` to `last` iteration, and from `low` to `high`."""

    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        if high <= low:
            low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
        self.first, self.last, self._whole = first, last, (low, high)
        margin = EMPTY * (high - low)
        self.low, self.high = low - margin, high + margin
        self.left, self.right = LEFT, PANEL_WIDTH - RIGHT
        self.top, self.bottom = TOP, PANEL_HEIGHT - BOTTOM

    def x(self, iteration: float) -> float:
        share = 0.5 if self.last <= self.first else (iteration - self.first) / (self.last - self.first)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.bottom - share * (self.bottom - self.top)

    def drawn(self) -> str:
        """Rules with their numbers, and what the axis below means."""
        parts = []
        for value in ticks(self.low, self.high, 4):
            y = self.y(value)
            parts += [
                path([(self.left, y), (self.right, y)], class_="rule"),
                text(self.left - 6, y + 3.5, short(round(value, 12)), class_="pale small", text_anchor="end"),
            ]
        for iteration in ticks(self.first, self.last, 5, whole=True):
            x = self.x(iteration)
            parts.append(
                text(x, self.bottom + 14, f"{iteration:.0f}", class_="pale small", text_anchor="middle")
            )
        middle = (self.left + self.right) / 2
        parts.append(text(middle, self.bottom + 28, "iteration", class_="pale small", text_anchor="middle"))
        return "".join(parts)


def _draw_curve(axes: _Axes, curve: Curve, low: np.ndarray, high: np.ndarray, outside: np.ndarray) -> str:
    """One run's line, with the range of what was thinned, markers of few points, and arrows with a note."""
    colour = curve.colour
    points = [(axes.x(x), axes.y(y)) for x, y in zip(*_inside(curve, outside), strict=True)]
    parts = []
    if low is not high:
        up = [(axes.x(x), axes.y(y)) for x, y in zip(curve.iterations, high, strict=True)]
        down = [(axes.x(x), axes.y(y)) for x, y in zip(curve.iterations, low, strict=True)]
        parts.append(path([*up, *reversed(down)], class_=f"f{colour} band"))
    parts.append(path(points, class_=f"curve s{colour}"))
    if len(curve.values) <= MARKED:
        parts += [element("circle", cx=x, cy=y, r=2.2, class_=f"f{colour}") for x, y in points]
    return element("g", *parts, _notes(axes, curve, outside), class_=f"run r{colour}")


def _inside(curve: Curve, outside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return curve.iterations[~outside], curve.values[~outside]


def _notes(axes: _Axes, curve: Curve, outside: np.ndarray) -> str:
    """Arrows at the edge for the values that are outside, and a line with the first of them."""
    if not outside.any():
        return ""
    far = list(zip(curve.iterations[outside], curve.values[outside], strict=True))
    parts = []
    for iteration, value in far:
        x, up = axes.x(iteration), value > axes.high
        y, tip = (axes.top, -6) if up else (axes.bottom, 6)
        arrow = f"{x - 4:.1f},{y:.1f} {x + 4:.1f},{y:.1f} {x:.1f},{y + tip:.1f}"
        parts.append(
            element("polygon", hint(f"{short(float(value))} at {iteration}"), points=arrow, class_="note")
        )
    first = ", ".join(f"{short(float(value))} at {iteration}" for iteration, value in far[:NOTED])
    more = f" and {len(far) - NOTED} more" if len(far) > NOTED else ""
    note = text(axes.right, axes.top + 12, f"outside: {first}{more}", class_="note small", text_anchor="end")
    return "".join([*parts, note])


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
