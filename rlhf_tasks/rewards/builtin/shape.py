"""The shape of an answer: its format, its length."""

from collections.abc import Sequence
from typing import Any

from rlhf_tasks.rewards.builtin.judged import compiled, found, number, texts
from rlhf_tasks.rewards.forms import RewardError


def format(completions: Sequence[Any], pattern: str = "", whole: bool = True, **columns: Any) -> list[float]:
    """1 where an answer matches a regular expression, else 0.

    whole  the whole answer must match, apart from spaces around it; else a part of it
    """
    if not pattern:
        raise RewardError("reward builtin:format: give the regular expression in kwargs: {pattern: ...}.")
    looked_for = compiled("format", "pattern", pattern)
    if whole:
        looked_for = compiled("format", "pattern", rf"\A\s*(?:{pattern})\s*\Z")
    matches = (found("format", looked_for, text, place) for place, text in enumerate(texts(completions)))
    return [float(bool(each)) for each in matches]


def length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    target: int | None = None,
    least: int = 0,
    most: int | None = None,
    within: int = 1,
    **columns: Any,
) -> list[float]:
    """0 where an answer has from `least` to `most` tokens (or `target`), falling to -1 `within` beside.

    With most = L - within it is DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13) of answers up to L tokens.
    """
    if target is None and most is None and least == 0:
        raise RewardError("reward builtin:length: give target, least or most in kwargs: {most: ...}.")
    low = number("length", "least" if target is None else "target", least if target is None else target)
    high = float("inf") if most is None else number("length", "most", most, low)
    high = high if target is None else low
    slope = number("length", "within", within, 1)
    counts = [len(ids) for ids in completion_ids]
    return [-min(max(low - count, count - high, 0.0) / slope, 1.0) for count in counts]
