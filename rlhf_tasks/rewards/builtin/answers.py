"""Whether an answer is right: by its text, by its number, by mathematics, by reasoning-gym's scorers."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

from rlhf_tasks.rewards.builtin.judged import (
    column_of,
    compiled,
    found,
    mapping,
    number,
    texts,
)
from rlhf_tasks.rewards.builtin.numbers import number_in
from rlhf_tasks.rewards.forms import RewardError, shortened


def exact_match(
    completions: Sequence[Any],
    column: str | None = None,
    extract: str | None = None,
    ignore_case: bool = False,
    **columns: Any,
) -> list[float]:
    """1 where the answer's text is the right one, else 0; spaces around it do not count.

    extract  a pattern: what its last match (its first group, if it has one) says is the answer; without a match: 0
    """
    rights = column_of("exact_match", columns, column)
    judged = _extracted("exact_match", completions, extract)
    fold = str.casefold if ignore_case else str

    def same(said: str | None, right: Any) -> bool:
        return said is not None and right is not None and fold(said.strip()) == fold(str(right).strip())

    return [float(same(said, right)) for said, right in zip(judged, rights, strict=True)]


def numeric_answer(
    completions: Sequence[Any],
    column: str | None = None,
    extract: str | None = None,
    tolerance: float = 0.0,
    **columns: Any,
) -> list[float]:
    r"""1 where the answer's number equals the right one, else 0.

    The number is the last one, or, where the answer has \boxed{...}, "####", "answer is" or "Answer:", the one behind
    the last of these. It is read whole (1,200, -3/4, \frac{3}{4}, 1.5e3, 10^3, 50%, $5, 5 km): a formula that is
    no number, such as 2\sqrt{3}, is never right.
    tolerance  relative difference that is allowed
    """
    rights = column_of("numeric_answer", columns, column)
    allowed = Fraction(number("numeric_answer", "tolerance", tolerance))
    values = []
    for place, (said, right) in enumerate(
        zip(_extracted("numeric_answer", completions, extract), rights, strict=True)
    ):
        wanted = number_in(str(right))
        if wanted is None:
            shown = shortened(repr(right), 80)
            raise RewardError(
                f"reward builtin:numeric_answer: the row's right answer {shown} is no number. Judge formulas by "
                "builtin:math_verify.",
                place=place,
            )
        value = None if said is None else number_in(said)
        values.append(float(value is not None and value.equals(wanted, allowed)))
    return values


def math_verify(completions: Sequence[Any], column: str | None = None, **columns: Any) -> list[float]:
    """1 where the answer equals the right one mathematically, by the package math-verify, else 0."""
    rights = column_of("math_verify", columns, column)
    _require("math_verify", "math_verify", "math-verify")
    from math_verify import parse, verify

    values = []
    for place, (text, right) in enumerate(zip(texts(completions), rights, strict=True)):
        wanted = parse(f"${right}$") or parse(str(right))
        if not wanted:
            shown = shortened(repr(right), 80)
            raise RewardError(
                f"reward builtin:math_verify: the row's right answer {shown} cannot be parsed.", place=place
            )
        values.append(float(verify(wanted, parse(text))))
    return values


def reasoning_gym(
    completions: Sequence[Any],
    column: str | None = None,
    extract: str | None = None,
    **columns: Any,
) -> list[float]:
    """reasoning-gym's own score, from 0 to 1, of the task that `metadata.source_dataset` of the row names.

    column  of the metadata: an object, or JSON of one; default: `metadata`, else `extra_info`
    """
    every = column_of("reasoning_gym", columns, column, known=("metadata", "extra_info"))
    rights = column_of("reasoning_gym", columns, None)
    judged = _extracted("reasoning_gym", completions, extract)
    _require("reasoning_gym", "reasoning_gym", "reasoning-gym")
    from reasoning_gym import get_score_answer_fn

    values = []
    for place, (said, right, value) in enumerate(zip(judged, rights, every, strict=True)):
        metadata = mapping("reasoning_gym", value, place)
        task = metadata.get("source_dataset")
        try:
            scorer: Callable[..., float] = get_score_answer_fn(str(task))
        except ValueError:
            raise RewardError(
                f"reward builtin:reasoning_gym: the row's metadata name no task: source_dataset={task!r}.",
                place=place,
            ) from None
        entry = {"question": "", "answer": right, "metadata": dict(metadata)}
        values.append(float(scorer(said, entry)))
    return values


def _extracted(reward: str, completions: Sequence[Any], extract: str | None) -> Iterator[str | None]:
    """What each answer says: its text, or what a pattern's last match says."""
    said = texts(completions)
    if extract is None:
        return iter(said)
    pattern = compiled(reward, "extract", extract)
    group = min(pattern.groups, 1)
    matches = (found(reward, pattern, text, place) for place, text in enumerate(said))
    return (each[-1].group(group) if each else None for each in matches)


def _require(reward: str, module: str, package: str) -> None:
    if find_spec(module) is None:
        raise RewardError(
            f"reward builtin:{reward}: needs the package {package}, which is not installed. Run: pip install "
            f"{package}"
        )
