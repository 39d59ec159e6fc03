r"""The number that an answer gives: read whole, or not at all, so that \frac{3}{4} is never the number 3.

A text is cut into words. Neighbours that are no plain words (numbers, operators, LaTeX) are a formula, and a formula
counts only where all of it is one number. What is not known here is no number: `2\sqrt{3}`, `5!`, `7, 8`.
"""

import re
from fractions import Fraction
from typing import NamedTuple

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
"""Words behind a number that make it another one, or one of several."""
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
    """The number behind the last mark of an answer, else its last one; None where there is none.

    What follows may be a unit, or behind `answer is` and `Answer:` a sentence.
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
        found, end = _formula(line, anywhere=True)
        while found is not None:
            last, behind = found, end
            found, end = _formula(line, end, anywhere=True)
            if found is None:
                return _read(last, line[behind:])
    return None


def _plain(text: str) -> str:
    """A text without what has no part in a number's value."""
    for pattern, by in _REPLACED:
        text = pattern.sub(by, text)
    return _THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text)


def _formula(line: str, start: int = 0, anywhere: bool = False) -> tuple[str | None, int]:
    """(the next formula of a line that has a digit, where it ends); None where the line has none from `start` on.

    anywhere  it may stand behind other words; else the line begins with it
    Punctuation behind a word ends its formula.
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
    found = " ".join(words)
    return (found if any(c.isdecimal() for c in found) else None), end


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
    if found := _MIXED.fullmatch(text):
        return _signed(found["sign"], _fraction(found["whole"]), _over(found["top"], found["bottom"]))
    if re.search(r"[\d.,)}] [\d.(]", text):  # two numbers side by side
        return None
    text = text.replace(" ", "")
    if found := _NUMBER.fullmatch(text):
        return _fraction(found["value"])
    if found := _RATIO.fullmatch(text):
        return _over(found["top"], found["bottom"])
    if found := _FRACTION.fullmatch(text):
        part = _over(found["top"] or found["t"], found["bottom"] or found["b"])
        return _signed(found["sign"], _fraction(found["whole"] or "0"), part)
    if found := _POWER.fullmatch(text):
        return _signed(found["sign"], Fraction(0), _power(found))
    return None


def _power(found: "re.Match[str]") -> Fraction | None:
    base, power = _fraction(found["base"]), int(found["power"] or found["p"])
    if abs(power) * len(found["base"]) > MOST_DIGITS or (base == 0 and power < 0):
        return None
    return _fraction(found["factor"] or "1") * base**power


def _signed(sign: str, whole: Fraction, part: Fraction | None) -> Fraction | None:
    if part is None:
        return None
    return -(whole + part) if sign == "-" else whole + part


def _over(top: str, bottom: str) -> Fraction | None:
    divisor = _fraction(bottom)
    return _fraction(top) / divisor if divisor else None


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip("."))
