"""What a data set's columns are for, seen from some of its rows: which kind of training they suit. Torch-free.

The rows of files name their columns in many ways. `rows.py` reads the expected names; a recognised other name is
renamed by `data.column_map`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from prefect_rlhf.rlhf_tasks.data.dataset import CONVERSATIONS, Row
from prefect_rlhf.rlhf_tasks.data.rows import TRUTHS
from prefect_rlhf.rlhf_tasks.system.reading import DataError, one_line

Kind = Literal["pairs", "labels", "answers", "completions", "prompts"]
PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input")
COMPLETIONS = ("completion", "response", "output")
RIGHT = ("answer", "solution", "ground_truth", "label", "labels", "reward_model")
"""Names of a column, the likeliest first; of right answers those that the built-in rewards read."""
SHOWN_WORK = 200
"""Characters of a right answer, in the median, above which it is a text to be learned rather than compared; unless a
mark stands before its result."""
MARKED = re.compile(r"####|\\boxed\{")
NUMBER = re.compile(r"\s*[-+]?\$?\d[\d,]*(\.\d+)?\s*%?\s*")


@dataclass(frozen=True)
class Columns:
    """What was recognised.

    kind        pairs of answers; answers with labels; prompts with right answers; texts to learn; prompts alone
    column_map  name in the rows -> expected name, of columns that have another one
    right       of prompts with right answers: their column
    is_number   whether all right answers are, or end in, numbers
    """

    kind: Kind
    column_map: Mapping[str, str] = field(default_factory=dict)
    right: str | None = None
    is_number: bool = False


def recognised(name: str, rows: Sequence[Row]) -> Columns:
    """What the columns of some rows are for. Raises DataError, with what there is and what would be recognised.

    name  of the data set, for the sentence
    """
    there = {column for row in rows for column, value in row.items() if value is not None}
    if {"chosen", "rejected"} <= there:
        return Columns("pairs")
    conversation = next((column for column in CONVERSATIONS if column in there), None)
    prompt = _named(PROMPTS, there)
    completion = _named(COMPLETIONS, there - {prompt})
    renamed = {} if prompt in (None, "prompt") else {str(prompt): "prompt"}
    learned = renamed if completion in (None, "completion") else {**renamed, str(completion): "completion"}
    if "label" in there and (conversation or (prompt and completion)) and all(_is_label(row) for row in rows):
        return Columns("labels", {} if conversation else learned)
    right = _named(RIGHT, there - {prompt})
    if prompt and right:
        texts = [truth_of(row[right]) for row in rows if row.get(right) is not None]
        marked = any(MARKED.search(text) for text in texts)
        if marked or (not completion and median(map(len, texts)) <= SHOWN_WORK):
            results = map(_result, texts)
            return Columns("answers", renamed, right, all(NUMBER.fullmatch(result) for result in results))
        if not completion:
            return Columns("completions", {**renamed, right: "completion"} if not conversation else {})
    if conversation or (prompt and completion) or "text" in there:
        return Columns("completions", {} if conversation or not (prompt and completion) else learned)
    if prompt:
        return Columns("prompts", renamed)
    raise DataError(
        f"{name}: its columns ({one_line(', '.join(sorted(there))) or 'none'}) say nothing of what to train. "
        "Recognised are prompt (or question, problem, query) with answer or solution; prompt with completion or "
        "response; messages, conversations or text; chosen with rejected; prompt, completion and label (true or "
        "false). Rename them, or write the configuration by hand with data.column_map."
    )


def truth_of(value: Any) -> str:
    """A right answer as text; of verl's `reward_model` its `ground_truth`."""
    return str(value.get("ground_truth") if isinstance(value, Mapping) else value)


def _named(names: Sequence[str], there: set[Any]) -> str | None:
    """The column with the first of some names, in whatever case."""
    lower = {column.lower(): column for column in sorted(map(str, filter(None, there)), reverse=True)}
    return next((lower[name] for name in names if name in lower), None)


def _is_label(row: Row) -> bool:
    label = row.get("label")
    return isinstance(label, bool) or (isinstance(label, str) and label.strip().lower() in TRUTHS)


def _result(text: str) -> str:
    """What stands behind the last mark of a right answer; all of it where there is none."""
    *_, last = _parts(text)
    return last


def _parts(text: str) -> Iterator[str]:
    yield text
    yield from (part.partition("}")[0] if "boxed" in text else part for part in MARKED.split(text)[1:])
