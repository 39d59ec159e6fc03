"""What devices do over time: a lane for each, a bar for each node."""

from collections.abc import Mapping, Sequence

from prefect_rlhf.flows.view.clocks import WAITING, Span
from prefect_rlhf.flows.view.pictures.colours import CALL_KINDS, COLOURS, class_of, in_words
from prefect_rlhf.flows.view.pictures.svg import (
    LETTER,
    WIDTH,
    Picture,
    cut,
    element,
    hint,
    seconds,
    short,
    text,
    ticks,
)

MOST_ROWS = 32  # lanes; more would be too small to read
MOST_BARS = 4000  # of a picture; of more, the shortest are left out
LANE, BAR = 30.0, 24.0  # heights of a lane and of a bar in it
LEFT, RIGHT, TOP = 70.0, 10.0, 30.0
AXIS = 30.0  # height of a line's axis
LEGEND = 20.0  # height of a row of the legend


def timeline(
    spans: Sequence[Span], title: str, rows: Mapping[int, str] | None = None, lines: int = 1
) -> Picture:
    """Ranks over time.

    Bars are coloured by kind of node. Every other iteration is paler. Calls have labels where there is space, and
    a mouse shows every bar's name and seconds. Very short nodes are drawn with a thousandth of a line's length, so
    that none is invisible. Of more than MOST_ROWS ranks only the first are drawn. Raises ValueError without a span.

    spans  as `spans_of` or `without_waits` gives them
    rows   rank -> label of its lane; None: its number
    lines  number of equal pieces into which the time is cut, one below the other
    """
    if not spans:
        raise ValueError("a timeline needs at least one span")
    start = min(span.started_s for span in spans)
    piece_s = (max(span.ended_s for span in spans) - start) / lines or 1.0
    known = sorted({span.rank for span in spans})
    lanes = {rank: number for number, rank in enumerate(known[:MOST_ROWS])}
    drawn = sorted(spans, key=lambda span: span.started_s - span.ended_s)[:MOST_BARS]
    drawn = sorted((span for span in drawn if span.rank in lanes), key=lambda span: span.started_s)
    height = len(lanes) * LANE + AXIS
    parts = []
    for line in range(lines):
        top, low = TOP + line * height, line * piece_s
        parts += [_lane(top + LANE * n, rows[r] if rows else f"rank {r}") for r, n in lanes.items()]
        parts += [
            _bar(span, top + LANE * lanes[span.rank], span.started_s - start - low, piece_s) for span in drawn
        ]
        parts.append(_axis(top + LANE * len(lanes), low, piece_s))
    missing = f", first {len(lanes)} of {len(known)} rows" if len(lanes) < len(known) else ""
    head = text(LEFT, 18, title + missing, class_="head")
    swatches, rows_of_legend = legend(sorted({span.kind for span in drawn}, key=order_of_kind))
    bottom = TOP + lines * height
    whole = bottom + LEGEND * rows_of_legend + 6
    body = "".join([head, *parts, element("g", swatches, transform=f"translate(0 {bottom:.0f})")])
    return Picture(WIDTH, whole, f"{title}{missing}: when each device ran which node.", body)


def order_of_kind(kind: str) -> tuple[int, str]:
    """By which kinds stand in legends and bars."""
    return list(COLOURS).index(kind) if kind in COLOURS else len(COLOURS), kind


def _lane(y: float, label: str) -> str:
    back = element(
        "rect", x=LEFT, y=y + (LANE - BAR) / 2, width=WIDTH - LEFT - RIGHT, height=BAR, class_="lane"
    )
    return back + text(LEFT - 8, y + LANE / 2 + 4, cut(label, LEFT - 10), text_anchor="end", class_="pale")


def _bar(span: Span, y: float, begins_s: float, piece_s: float) -> str:
    """The part of a node that falls into a line of `piece_s` seconds; empty where none does."""
    ends_s = max(begins_s + span.ended_s - span.started_s, begins_s + piece_s / 1000)
    left, right = max(begins_s, 0.0), min(ends_s, piece_s)
    if right <= left:
        return ""
    scale = (WIDTH - LEFT - RIGHT) / piece_s
    x, width = LEFT + left * scale, (right - left) * scale
    for_others = "waiting in " if span.kind == WAITING else ""
    words = (
        f"{for_others}{span.node}, iteration {span.iteration + 1}: {seconds(span.ended_s - span.started_s)}"
    )
    shade = " odd" if span.iteration % 2 else ""
    bar = element(
        "rect", hint(words), x=x, y=y + (LANE - BAR) / 2, width=width, height=BAR, rx=2 if width > 8 else None,
        class_=f"{class_of(span.kind)}{shade}",
    )  # fmt: skip
    label = span.node if width > (len(span.node) + 2) * LETTER else ""
    if not label or span.kind not in CALL_KINDS:
        return bar
    return bar + text(x + width / 2, y + LANE / 2 + 4, label, text_anchor="middle")


def _axis(y: float, low_s: float, piece_s: float) -> str:
    scale = (WIDTH - LEFT - RIGHT) / piece_s
    marks = [
        text(
            LEFT + (moment - low_s) * scale,
            y + 14,
            f"{short(moment)} s",
            class_="pale small",
            text_anchor="middle",
        )
        for moment in ticks(low_s, low_s + piece_s, 8)
        if LEFT + (moment - low_s) * scale < WIDTH - 16
    ]
    return "".join(marks)


def legend(kinds: Sequence[str], left: float = LEFT) -> tuple[str, int]:
    """(a swatch with its name for each kind, number of rows)."""
    parts, x, row = [], left, 0
    for kind in kinds:
        name = in_words(kind)
        width = 16 + LETTER * len(name) + 16
        if x + width > WIDTH - RIGHT and x > left:
            x, row = left, row + 1
        y = LEGEND * row
        parts += [
            element("rect", x=x, y=y + 4, width=11, height=11, rx=2, class_=class_of(kind)),
            element("g", text(x + 16, y + 13.5, name)),
        ]
        x += width
    return "".join(parts), row + 1
