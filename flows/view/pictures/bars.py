"""Horizontal bars: what each rank's time goes to, and planned beside measured seconds."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prefect_rlhf.flows.view.pictures.colours import class_of, in_words
from prefect_rlhf.flows.view.pictures.svg import (
    LETTER,
    WIDTH,
    Picture,
    cut,
    element,
    hint,
    path,
    seconds,
    short,
    text,
    ticks,
)
from prefect_rlhf.flows.view.pictures.timeline import LEGEND, MOST_ROWS, legend, order_of_kind

LEFT, RIGHT, TOP = 190.0, 90.0, 30.0
ROW, BAR = 30.0, 20.0


class Measured(NamedTuple):
    """A bar: measured seconds with their range, and planned ones where they are known."""

    name: str
    kind: str
    median_s: float
    low_s: float
    high_s: float
    planned_s: float | None


def work_bars(work_s: Mapping[int, Mapping[str, float]], title: str) -> Picture:
    """What the time of each rank goes to, in percent of it. Of more than MOST_ROWS ranks the first are drawn.

    work_s  rank -> kind of work -> seconds
    """
    ranks = sorted(work_s)[:MOST_ROWS]
    missing = f", first {len(ranks)} of {len(work_s)} ranks" if len(ranks) < len(work_s) else ""
    parts = [text(LEFT, 18, title + missing, class_="head")]
    kinds = sorted({kind for rank in ranks for kind in work_s[rank]}, key=order_of_kind)
    room = WIDTH - LEFT - 14
    for number, rank in enumerate(ranks):
        y = TOP + ROW * number
        parts.append(text(LEFT - 8, y + ROW / 2 + 4, f"rank {rank}", class_="pale", text_anchor="end"))
        x, whole_s = LEFT, sum(work_s[rank].values()) or 1.0
        for kind in kinds:
            share = work_s[rank].get(kind, 0.0) / whole_s
            if share <= 0:
                continue
            words = f"rank {rank}: {in_words(kind)} {seconds(work_s[rank][kind])}, {100 * share:.1f}%"
            bar = element(
                "rect", hint(words), x=x, y=y + (ROW - BAR) / 2, width=share * room, height=BAR,
                class_=class_of(kind),
            )  # fmt: skip
            label = text(x + share * room / 2, y + ROW / 2 + 4, f"{100 * share:.0f}%", text_anchor="middle")
            parts.append(bar + (label if share * room > 5 * LETTER else ""))
            x += share * room
    swatches, rows = legend(kinds, LEFT)
    bottom = TOP + ROW * len(ranks) + 6
    parts.append(element("g", swatches, transform=f"translate(0 {bottom:.0f})"))
    label = f"{title}{missing}, in percent."
    return Picture(WIDTH, bottom + LEGEND * rows + 6, label, "".join(parts))


def second_bars(bars: Sequence[Measured], title: str) -> Picture:
    """A bar for each node's median seconds with a line over the middle 80%; a dashed frame is what was planned.

    bars  at least one
    """
    most = max(max(bar.high_s, bar.planned_s or 0.0) for bar in bars) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / most
    parts = [text(LEFT, 18, title, class_="head")]
    bottom = TOP + ROW * len(bars)
    for moment in ticks(0.0, most, 6):
        x = LEFT + moment * scale
        parts += [
            path([(x, TOP), (x, bottom)], class_="rule"),
            text(x, bottom + 14, f"{short(moment)} s", class_="pale small", text_anchor="middle"),
        ]
    for number, bar in enumerate(bars):
        parts.append(_measured(bar, TOP + ROW * number, scale))
    return Picture(WIDTH, bottom + 22, f"{title}: median seconds of each call.", "".join(parts))


def _measured(bar: Measured, y: float, scale: float) -> str:
    middle = y + ROW / 2
    planned = "" if bar.planned_s is None else f", planned {seconds(bar.planned_s)}"
    words = (
        f"{bar.name}: {seconds(bar.median_s)}, mostly {seconds(bar.low_s)} to {seconds(bar.high_s)}{planned}"
    )
    parts = [
        text(LEFT - 8, middle + 4, cut(bar.name, LEFT - 14), text_anchor="end"),
        element(
            "rect", hint(words), x=LEFT, y=middle - BAR / 2, width=max(bar.median_s * scale, 1.0), height=BAR,
            rx=2, class_=class_of(bar.kind),
        ),
        path([(LEFT + bar.low_s * scale, middle), (LEFT + bar.high_s * scale, middle)], class_="arrow"),
    ]  # fmt: skip
    if bar.planned_s is not None:
        parts.append(
            element(
                "rect", x=LEFT, y=middle - BAR / 2 - 2.5, width=max(bar.planned_s * scale, 1.0),
                height=BAR + 5, class_="planned",
            )
        )  # fmt: skip
    end = LEFT + max(bar.high_s, bar.planned_s or 0.0, bar.median_s) * scale
    parts.append(text(end + 8, middle + 4, seconds(bar.median_s), class_="pale"))
    return "".join(parts)
