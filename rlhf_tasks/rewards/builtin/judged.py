"""What built-in rewards read of the answers: texts, the rows' right answers, patterns."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import regex

from rlhf_tasks.rewards.forms import RewardError, shortened

TRUTHS = ("answer", "solution", "ground_truth", "label", "labels", "reward_model")
"""Columns that may hold the right answer; of each row the first that it has counts. `reward_model`: verl's, its
`ground_truth`."""
PATTERN_S = 1.0  # that a pattern may take on one answer

RowColumns = Mapping[str, Sequence[Any]]


def texts(completions: Sequence[Any]) -> list[str]:
    """The answers as text; of a conversation, what its last message says."""
    return [c if isinstance(c, str) else str(c[-1]["content"]) for c in completions]


def column_of(
    reward: str, columns: RowColumns, named: str | None, known: Sequence[str] = TRUTHS
) -> Sequence[Any]:
    """A column: the named one, or of each row the first known one that it has, else None. Raises RewardError where no
    row can have one."""
    names = [name for name in ([named] if named else known) if name in columns]
    if not names:
        theirs = [name for name in columns if name != "completion_ids"]  # which every reward gets
        wanted = f"no column {named!r}" if named else f"none of the columns {', '.join(known)}"
        raise RewardError(
            f"reward builtin:{reward}: the rows have {wanted} (columns: {', '.join(theirs) or 'none'}). Name one by "
            "its argument `column`, or rename one with data.column_map."
        )
    values = zip(*(_truths(name, columns[name]) for name in names), strict=True)
    return [next((value for value in row if value is not None), None) for row in values]


def _truths(name: str, values: Sequence[Any]) -> list[Any]:
    verl = name == "reward_model"
    return [v.get("ground_truth") if verl and isinstance(v, Mapping) else v for v in values]


def mapping(reward: str, value: Any, place: int) -> Mapping[str, Any]:
    """A value of a column that is an object, or JSON of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        raise RewardError(f"reward builtin:{reward}: the row's metadata are no object.", place=place)
    return value


def compiled(reward: str, argument: str, pattern: Any) -> "regex.Pattern[str]":
    """A regular expression; `.` matches line breaks, too. Raises RewardError where it is none."""
    try:
        return regex.compile(pattern, regex.DOTALL)
    except (regex.error, TypeError, RecursionError) as error:
        shown = shortened(repr(pattern), 80)
        raise RewardError(
            f"reward builtin:{reward}: {argument}={shown} is no regular expression ({error})."
        ) from None


def found(reward: str, pattern: "regex.Pattern[str]", text: str, place: int) -> "list[regex.Match[str]]":
    """The matches of a pattern in an answer. Raises RewardError where the search takes longer than PATTERN_S."""
    try:
        return list(pattern.finditer(text, timeout=PATTERN_S))
    except TimeoutError:
        raise RewardError(
            f"reward builtin:{reward}: the pattern {shortened(pattern.pattern, 80)!r} takes more than {PATTERN_S:g} "
            "s on an answer. Write it without nested repetitions.",
            place=place,
        ) from None


def number(reward: str, argument: str, value: object, least: float = 0.0) -> float:
    """A number of at least `least`. Raises RewardError for another value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        shown = shortened(repr(value), 80)
        raise RewardError(
            f"reward builtin:{reward}: {argument} must be a number of at least {least:g}, found {shown}."
        )
    return float(value)
