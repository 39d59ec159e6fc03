"""Rewards that are built in: `function: builtin:NAME`. docs/how-to/rewards.md says how they are used.

Each is a function of TRL's form, or a class whose objects are called so. It checks its arguments, the columns it
needs and the packages it uses before it judges, so that a run finds what is wrong by calling it without answers, or
by making the object. All its faults are RewardErrors.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from importlib.util import find_spec
from typing import Any, NamedTuple

import regex

from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError, shortened
from prefect_rlhf.rlhf_tasks.user_code.llm_judge import judge
from prefect_rlhf.rlhf_tasks.user_code.sandbox import SANDBOXES, ProgramLimits, refuse_sandbox, runs_through

__all__ = [
    "exact_match",
    "format",
    "judge",
    "length",
    "math_verify",
    "numeric_answer",
    "reasoning_gym",
    "unit_tests",
]

TRUTHS = ("answer", "solution", "ground_truth", "label", "labels", "reward_model")
"""Columns that may hold the right answer; of each row the first that it has counts. `reward_model`: verl's, its
`ground_truth`."""
PATTERN_S = 1.0  # that a pattern may take on one answer

RowColumns = Mapping[str, Sequence[Any]]
TESTS = ("tests", "test", "test_list", "unit_tests", "reward_model")
_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


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

    The number is the last one, or, where the answer has \boxed{...}, "####", "answer is" or "Answer:", the one after
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


def unit_tests(
    completions: Sequence[Any],
    column: str | None = None,
    sandbox: str = "bwrap",
    limit_s: float = 10.0,
    memory_bytes: int = 1 << 30,
    at_once: int = 2,
    **columns: Any,
) -> list[float]:
    """1 where the code in an answer passes all tests of its row, else 0.

    The code is the answer's last block between ``` and ```, or else the whole answer. Tests are Python, as text or a
    list of texts, run after the code: they pass if none raises.
    sandbox       bwrap: without files of the user, network and environment; process: only limits, for trusted models
    limit_s       seconds that one answer may take, memory_bytes: that it may use
    at_once       answers that are run at the same time
    """
    tests = column_of("unit_tests", columns, column, known=TESTS)
    if sandbox not in SANDBOXES:
        raise RewardError(
            f"reward builtin:unit_tests: sandbox={sandbox!r} is not one of {', '.join(SANDBOXES)}."
        )
    limits = ProgramLimits(
        number("unit_tests", "limit_s", limit_s, 0.1),
        int(number("unit_tests", "memory_bytes", memory_bytes, 1 << 26)),
    )
    threads = int(number("unit_tests", "at_once", at_once, 1))
    refuse_sandbox(sandbox)

    def passes(pair: tuple[str, Any]) -> float:
        return float(runs_through([code_of(pair[0]), *pair[1]], sandbox, limits))

    pairs = [
        (text, _listed(value, place))
        for place, (text, value) in enumerate(zip(texts(completions), tests, strict=True))
    ]
    with ThreadPoolExecutor(threads, "unit_tests") as pool:
        return list(pool.map(passes, pairs))


def format(completions: Sequence[Any], pattern: str = "", whole: bool = True, **columns: Any) -> list[float]:
    """1 where an answer matches a regular expression, else 0.

    whole  the whole answer must match, apart from spaces around it; else a part of it
    """
    if not pattern:
        raise RewardError("reward builtin:format: give the regular expression in kwargs: {pattern: ...}.")
    looked_for = compiled("format", "pattern", pattern)
    if whole:
        looked_for = compiled("format", "pattern", rf"\A\s*(?:{pattern})\s*\Z")
    matches = (matches_in("format", looked_for, text, place) for place, text in enumerate(texts(completions)))
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


def _extracted(reward: str, completions: Sequence[Any], extract: str | None) -> Iterator[str | None]:
    """What each answer says: its text, or what a pattern's last match says."""
    said = texts(completions)
    if extract is None:
        return iter(said)
    pattern = compiled(reward, "extract", extract)
    group = min(pattern.groups, 1)
    matches = (matches_in(reward, pattern, text, place) for place, text in enumerate(said))
    return (each[-1].group(group) if each else None for each in matches)


def _require(reward: str, module: str, package: str) -> None:
    if find_spec(module) is None:
        raise RewardError(
            f"reward builtin:{reward}: needs the package {package}, which is not installed. Run: pip install "
            f"{package}"
        )


def code_of(answer: str) -> str:
    """The code in an answer."""
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else answer


def _listed(value: Any, place: int) -> list[str]:
    """The tests of a row: a text, a list, or JSON of a list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):
            value = json.loads(value)
    listed = [value] if isinstance(value, str) else value
    if isinstance(listed, Mapping) or not listed or not all(isinstance(test, str) for test in listed):
        raise RewardError(
            "reward builtin:unit_tests: the row has no tests: a text of Python, or a list of them.",
            place=place,
        )
    return list(listed)


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


def matches_in(reward: str, pattern: "regex.Pattern[str]", text: str, place: int) -> "list[regex.Match[str]]":
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


# --- numbers ------------------------------------------------------------------------------------------------
# An answer's number is read whole, or not at all, so that \frac{3}{4} is never the number 3. A text is cut into
# words. Neighbours that are no plain words (numbers, operators, LaTeX) are a formula, and a formula counts only where
# all of it is one number. What is not known here is no number: `2\sqrt{3}`, `5!`, `7, 8`.

MOST_DIGITS = 4000  # of a number: Python reads no longer ones
MARKS = ("\\boxed{", "####", "answer is", "Answer:")
"""After the last of these that an answer has, its number stands."""
_WHOLE = ("\\boxed{", "####")  # nothing but a number and its unit may stand there

_N = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"  # 1,200.5 and 1,00,000, but not 1,5
_S = r"[-+]?"
_NUMBER = re.compile(rf"(?P<value>{_S}{_N}(?:[eE][-+]?\d{{1,3}})?)")
_RATIO = re.compile(rf"(?P<top>{_S}{_N})/(?P<bottom>{_S}{_N})")
_FRACTION = re.compile(
    rf"(?P<sign>{_S})(?P<whole>\d*)\\[dtc]?frac(?:\{{(?P<top>{_S}{_N})\}}|(?P<t>\d))"
    rf"(?:\{{(?P<bottom>{_S}{_N})\}}|(?P<b>\d))"
)
_MIXED = re.compile(r"(?P<sign>[-+]?)(?P<whole>\d+) (?P<top>\d+)/(?P<bottom>\d+)")
_POWER = re.compile(
    rf"(?P<sign>{_S})(?:(?P<factor>{_N})(?:\\times|\\cdot|×|·|\*))?(?P<base>{_N})(?:\^|\*\*)"
    r"(?:\{(?P<power>[-+]?\d{1,4})\}|(?P<p>[-+]?\d{1,4}))"
)
_EQUAL = re.compile(r"=|≈|\\approx")
_NAME = re.compile(r"[^\W\d](?:_\w+)?|[^A-Za-z\\]*")  # what may stand before `= 5`: a variable, or arithmetic
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])")
_UNIT = re.compile(r"(?<=[\d.%}])(?P<unit>[^\W\d_]{2,})$")
_OTHER_NUMBER = re.compile(
    "(?:hundred(?:th)?|thousand(?:th)?|million|billion|trillion|dozen|half|third|quarter|fourth|fifth|sixth|eighth|"
    "tenth)s?|score|halves|and|or|to|times|plus|minus|over|out|squared|cubed|factorial|pi|sqrt|root|divided|"
    "multiplied|choose|mod|more|less|not"
)
"""Words after a number that make it another one, or one of several."""
_WORD = re.compile(r"\S+")
_PERCENT = ("percent", "per cent", "%")
_REPLACED = [
    (re.compile(pattern), by)
    for pattern, by in (
        ("[\u2212\u2013\ufe63\uff0d]", "-"),
        ("[\u00a0\u2007\u2009\u202f]|\\\\[,;:! ]|~", " "),
        (r"\{,\}", ","),
        (r"\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|\\[()\[\]]", " "),
        (r"\\?\$|[€£¥₹]", ""),
        (r"\^\{?(?:\\circ|°)\}?|°|\\degree(?![A-Za-z])", " degrees "),
        (r"</?[A-Za-z]\w*>", " "),  # of an answer in tags
        (r"\\(?:text|mathrm|mbox)\s*\{\s*[^\W\d_]\s*\}(?:\^\{?[23]\}?)?", ""),  # a unit of one letter
        (
            r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}(?:\^\{?[23]\}?)?",
            r" \1 ",
        ),
        (r"(?<!\\)(?<![^\W\d_])([^\W\d_]{2,})\^\{?[23]\}?", r"\1"),  # cm^2
        (r"\\%|％", "%"),
        (r"(?<!\d)\*+|\*+(?!\d)|`|(?<!\w)__|__(?!\w)", ""),  # of Markdown
        (r"(?<!\s)[^\S\n]{1,9}(?=[.,;:?](?:\s|$))", ""),
    )
]


class Number(NamedTuple):
    """An answer's number. is_percent: it is a percentage, and `value` the number before the sign."""

    value: Fraction
    is_percent: bool = False

    def equals(self, right: "Number", tolerance: Fraction = Fraction(0)) -> bool:
        """Whether this is the right number, but for a relative tolerance. 50% equals 50, and 0.5."""
        values = {self.value, self.value / 100} if self.is_percent > right.is_percent else {self.value}
        rights = {right.value, right.value / 100} if right.is_percent > self.is_percent else {right.value}
        return any(abs(one - other) <= tolerance * abs(other) for one in values for other in rights)


def number_in(text: str) -> Number | None:
    """The number after the last mark of an answer, else its last one; None where there is none.

    What follows may be a unit, or after `answer is` and `Answer:` a sentence.
    """
    at, mark = max((text.rfind(mark), mark) for mark in MARKS)
    if at < 0:
        return _last(text)
    behind = text[at + len(mark) :]
    if mark == "\\boxed{":
        behind = _closed(behind)
    line = _plain(behind).lstrip(" \n\t:=").partition("\n")[0]
    formula, end = _formula(line, anywhere=mark not in _WHOLE)
    if formula is None or (mark in _WHOLE and re.search(r"[\d\\^=*+]", line[end:])):
        return None
    before = line[: max(0, end - len(formula))].casefold().split()
    if before and (_formula(line, end, anywhere=True)[0] or any(map(_OTHER_NUMBER.fullmatch, before))):
        return None  # a sentence of several numbers, or one that says `not`
    return _read(formula, line[end:])


def _closed(text: str) -> str:
    """The text up to the bracket that closes it; "" where none does."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return ""


def _last(text: str) -> Number | None:
    for line in reversed(_plain(text).split("\n")):
        line = re.sub(r"^\s*[-+•]\s+", "", line)  # of a list's entry
        formula, end = _formula(line, anywhere=True)
        while formula is not None:
            last, after = formula, end
            formula, end = _formula(line, end, anywhere=True)
            if formula is None:
                return _read(last, line[after:])
    return None


def _plain(text: str) -> str:
    """A text without what has no part in a number's value."""
    for pattern, by in _REPLACED:
        text = pattern.sub(by, text)
    return _THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)


def _formula(line: str, start: int = 0, anywhere: bool = False) -> tuple[str | None, int]:
    """(the next formula of a line that has a digit, where it ends); None where the line has none from `start` on.

    anywhere  it may stand after other words; else the line begins with it
    Punctuation after a word ends its formula.
    """
    words: list[str] = []
    end = start
    for word in _WORD.finditer(line, start):
        bare = word[0].rstrip(".,;:?") or word[0]
        if _is_formula(bare):
            words.append(bare)
            end = word.start() + len(bare)
            if bare == word[0]:
                continue
        if any(c.isdecimal() for each in words for c in each):
            break
        if not anywhere:
            return None, end
        words = []
    formula = " ".join(words)
    return (formula if any(c.isdecimal() for c in formula) else None), end


def _is_formula(word: str) -> bool:
    letters = word.strip("()[]{}\"'")
    if len(letters) == 1 and letters.isalpha():
        return letters not in "aAI"
    return any(c.isdecimal() or c == "\\" for c in word) or not any(c.isalpha() for c in word)


def _read(formula: str, rest: str) -> Number | None:
    """The number that a formula is. rest: what follows it, perhaps a unit"""
    following = _WORD.search(rest.lstrip(",;:?") if rest[:1] != "." else "")
    word = following[0].strip(".,;:!?()").casefold() if following else ""
    if _OTHER_NUMBER.fullmatch(word) or any(c.isdecimal() for c in word):
        return None
    *before, text = _EQUAL.split(formula)
    if not all(_NAME.fullmatch(part.replace(" ", "")) for part in before):
        return None
    text = text.strip().strip("\"'")
    while text[:1] + text[-1:] in ("()", "[]", "{}"):
        text = text[1:-1].strip()
    is_percent = text.endswith("%") or any(rest.strip().casefold().startswith(p) for p in _PERCENT)
    text = text.removesuffix("%").rstrip()
    unit = _UNIT.search(text)
    if unit is not None and not _OTHER_NUMBER.fullmatch(unit["unit"].casefold()):
        text = text[: unit.start()]
    value = _value(text)
    return None if value is None else Number(value, is_percent)


def _value(text: str) -> Fraction | None:
    if len(text) > MOST_DIGITS:
        return None
    if match := _MIXED.fullmatch(text):
        return _signed(match["sign"], _fraction(match["whole"]), _over(match["top"], match["bottom"]))
    if re.search(r"[\d.,)}] [\d.(]", text):  # two numbers side by side
        return None
    text = text.replace(" ", "")
    if match := _NUMBER.fullmatch(text):
        return _fraction(match["value"])
    if match := _RATIO.fullmatch(text):
        return _over(match["top"], match["bottom"])
    if match := _FRACTION.fullmatch(text):
        part = _over(match["top"] or match["t"], match["bottom"] or match["b"])
        return _signed(match["sign"], _fraction(match["whole"] or "0"), part)
    if match := _POWER.fullmatch(text):
        return _signed(match["sign"], Fraction(0), _power(match))
    return None


def _power(match: "re.Match[str]") -> Fraction | None:
    base, power = _fraction(match["base"]), int(match["power"] or match["p"])
    if abs(power) * len(match["base"]) > MOST_DIGITS or (base == 0 and power < 0):
        return None
    return _fraction(match["factor"] or "1") * base**power


def _signed(sign: str, whole: Fraction, part: Fraction | None) -> Fraction | None:
    if part is None:
        return None
    return -(whole + part) if sign == "-" else whole + part


def _over(top: str, bottom: str) -> Fraction | None:
    divisor = _fraction(bottom)
    return _fraction(top) / divisor if divisor else None


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip("."))
