"""What all pictures are made of: elements with escaped text, scales with round ticks, numbers for people."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from prefect_rlhf.flows.view.pictures.colours import STYLE
from prefect_rlhf.rlhf_tasks.system.reading import printable

WIDTH = 860.0
"""Pixels of a picture that fills a page."""
LETTER = 6.1  # width of an average letter of 11 px


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of `width` x `height` pixels.

    label  what it shows, for a reader who does not see it
    body   its elements as SVG
    data   attributes for the page's script, e.g. the points of a curve
    """

    width: float
    height: float
    label: str
    body: str
    data: tuple[tuple[str, str], ...] = ()

    def inline(self) -> str:
        """The element for a page that has STYLE."""
        data = {f"data-{name}": value for name, value in self.data}
        return element("svg", self.body, **self._frame(), **data)

    def alone(self) -> str:
        """A file of its own, with a background."""
        style = f"<style>{STYLE}</style>"
        back = element("rect", width="100%", height="100%", class_="back")
        sizes = {"xmlns": "http://www.w3.org/2000/svg", "width": self.width, "height": self.height}
        return element("svg", style, back, self.body, **sizes, **self._frame())

    def at(self, x: float, y: float) -> str:
        """The picture as a part of a larger one."""
        return element("svg", self.body, x=x, y=y, width=self.width, height=self.height)

    def _frame(self) -> dict[str, Any]:
        box = f"0 0 {_number(self.width)} {_number(self.height)}"
        return {"viewBox": box, "class_": "picture", "role": "img", "aria_label": self.label}


def element(tag: str, *inside: str, **attributes: Any) -> str:
    """An element. Attributes: `class_` is class, other underscores are hyphens; None is left out.

    inside  elements, or text that `shown_text` has escaped
    """
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{named}>{''.join(inside)}</{tag}>" if inside else f"<{tag}{named}/>"


def _attribute(value: Any) -> str:
    return _number(value) if isinstance(value, int | float) else shown_text(str(value))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def shown_text(text: str) -> str:
    """A text of anybody's as it stands in SVG and HTML: shown literally, without control characters."""
    return escape(printable(text))


def text(x: float, y: float, content: str, **attributes: Any) -> str:
    """A line of text with its baseline's start (or what `text_anchor` says) at (x, y)."""
    return element("text", shown_text(content), x=x, y=y, **attributes)


def hint(content: str) -> str:
    """What a mouse over the element around it shows."""
    return element("title", shown_text(content))


def cut(content: str, width: float, letter: float = LETTER) -> str:
    """A text cut to a width in pixels."""
    most = max(int(width / letter), 1)
    return content if len(content) <= most else f"{content[: most - 1]}…"


def short(value: float) -> str:
    """A number with three digits: 0.442, 12.3, 1234, 1.2e-05 as 1.2e-5."""
    if value and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def seconds(value_s: float) -> str:
    """Seconds with their unit: 12 ms, 1.23 s, 3 min 20 s, 2 h 5 min."""
    if value_s < 0.1:
        return f"{1000 * value_s:.2g} ms" if value_s < 0.00995 else f"{1000 * value_s:.0f} ms"
    if value_s < 99.5:
        return f"{value_s:.3g} s"
    minutes, rest_s = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest_s} s"


def ticks(low: float, high: float, most: int = 5, whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, about `most` of them; whole: without fractions."""
    if not high > low:
        return [low]
    rough = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [0.0 + step * number for number in range(first, last + 1)]


def path(points: Sequence[tuple[float, float]], **attributes: Any) -> str:
    """A line through points."""
    way = "".join(
        f"{'L' if number else 'M'}{_number(x)} {_number(y)}" for number, (x, y) in enumerate(points)
    )
    return element("path", d=way, **attributes)
