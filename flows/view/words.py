"""What the Prefect UI and a run's report say in the same words."""

from collections.abc import Mapping, Sequence
from typing import Any

ANSWERS = ("answer", "ground_truth", "solution", "target", "label")
"""Columns of the data that may have a row's right answer."""


def right_answer(sample: Mapping[str, Any]) -> str | None:
    """The right answer in the columns of a sample's row, where that has one."""
    columns = sample.get("columns") or {}
    return next((str(columns[name]) for name in ANSWERS if columns.get(name) is not None), None)


def plain_text(text: str | Sequence[Mapping[str, Any]], longest: int) -> str:
    """A text, or the messages of a conversation, with at most `longest` characters."""
    if not isinstance(text, str):
        text = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def measured_against(planned: float, measured: float) -> str:
    """A measured figure relative to the planned one, in words; both in the same unit."""
    if planned <= 0:
        return ""
    ratio = measured / planned
    if ratio >= 2:
        return f"{ratio:.3g} times the plan"
    percent = round(100 * abs(ratio - 1))
    if not percent:
        return "as planned"
    return f"{percent}% {'more' if ratio > 1 else 'less'} than planned"
