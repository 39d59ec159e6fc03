"""A language model as a judge: `function: builtin:judge`, any OpenAI-compatible server (docs/how-to/rewards.md)."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError, shortened
from prefect_rlhf.rlhf_tasks.user_code.service import Endpoint

WHO = "reward builtin:judge"
GRADED = """Grade the answer to the question below from 0 (useless) to {most:g} (perfect).

Question:
{prompt}

Answer:
{completion}

Reason briefly, then end with a line `Score: N`."""
PAIRED = """Which of two answers to the question below is better?

Question:
{prompt}

Answer A:
{first}

Answer B:
{second}

Reason briefly, then end with [[A]], [[B]], or [[C]] where they are equally good."""
LISTED = """Which of the criteria does the answer to the question below meet?

Question:
{prompt}

Answer:
{completion}

Criteria:
{criteria}

Reply with a JSON object whose keys are the criteria's numbers, and whose values are true or false."""
MOST_OBJECTS = 256  # braces of a reply that are tried
COSTS: tuple[str, ...] = ("requests", "prompt_tokens", "completion_tokens")
VERDICTS = {"A": 1.0, "C": 0.5, "B": 0.0}
_URL = re.compile(r"https?://[^/?#\s@]+(/[^?#\s]*)?")
_PLACE = re.compile(r"\{(\w+)(:g)?\}")
_VERDICT = re.compile(r"\[\[([ABC])\]\]")


class _NoScore(Exception):
    """A reply in which there is no score."""


class judge:
    """A score from 0 to 1 for each answer, by a judge that is asked about each alone.

    url        of the API, such as https://api.example.org/v1; `model` is the judge's name there, `api_key` the key
    template   what the judge is asked: {prompt}, {completion} and {COLUMN} stand for the answer's; default: GRADED
    pattern    its last match (the first group) in the reply is the score, from 0 to `most`, which 1 stands for
    schema     instead of a pattern, a JSON schema of the reply, whose property `score` is the score
    rubric     instead, criterion -> weight: the score is the weight of those that are met, over all positive weights
    against    instead, the column of an answer to compare with: 1, 0.5 or 0 where the model's is better, equally good
               or worse. Both orders are asked, since judges prefer a place.
    tries      requests until a reply has a score
    It logs what its requests cost: judge/requests, judge/prompt_tokens, judge/completion_tokens.
    """

    answers_per_call = 1

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str = "",
        template: str | None = None,
        pattern: str = r"Score:[\s*]*(-?\d+(?:\.\d+)?)",
        most: float = 10.0,
        schema: Mapping[str, Any] | None = None,
        rubric: Mapping[str, float] | None = None,
        against: str | None = None,
        tries: int = 2,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        timeout_s: float = 30.0,
        allow_private: bool = False,
    ) -> None:
        for name, value, kind, what in (
            ("url", url, str, "a text"),
            ("model", model, str, "a text"),
            ("template", template, str | None, "a text"),
            ("pattern", pattern, str, "a text"),
            ("most", most, int | float, "a number"),
            ("schema", schema, Mapping | None, "a mapping"),
            ("rubric", rubric, Mapping | None, "a mapping of criteria to weights"),
            ("against", against, str | None, "a column's name"),
            ("tries", tries, int, "a whole number"),
            ("timeout_s", timeout_s, int | float, "a number"),
        ):
            if not isinstance(value, kind):
                raise RewardError(f"{WHO}: {name}={shortened(repr(value), 80)} is not {what}.")
        if not _URL.fullmatch(url):  # not shown: it may have a password
            raise RewardError(
                f"{WHO}: url is not of the form https://HOST/PATH, without a login and a query."
            )
        if sum(each is not None for each in (schema, rubric, against)) > 1:
            raise RewardError(f"{WHO}: give one of schema, rubric and against.")
        if rubric is not None and not (
            all(type(weight) in (int, float) for weight in rubric.values())
            and any(weight > 0 for weight in rubric.values())
        ):
            raise RewardError(
                f"{WHO}: no criterion of its rubric has a weight above 0, or a weight is no number."
            )
        if most <= 0 or tries < 1:
            raise RewardError(f"{WHO}: most={most:g} and tries={tries} must be above 0.")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise RewardError(f"{WHO}: pattern {shortened(pattern, 80)} is none: {error}.") from None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        address = url.rstrip("/") + "/chat/completions"
        self._endpoint = Endpoint(WHO, address, headers, timeout_s, "timeout_s of its kwargs", allow_private)
        self._endpoint.refuse_headers()
        self._template = template or (PAIRED if against else LISTED if rubric else GRADED)
        named = {match[1] for match in _PLACE.finditer(self._template)}
        ours = {"first", "second"} if against else {"criteria"} if rubric else set[str]()
        if lacks := ours - named:
            raise RewardError(f"{WHO}: its template lacks {{{min(lacks)}}}. Say where it stands.")
        self.columns = sorted(
            named - ours - {"prompt", "completion", "most"} | ({against} if against else set())
        )
        self._rubric, self._schema, self._against = rubric, schema, against
        self._most, self._tries = most, tries
        self._options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        if schema is not None:
            form = {"name": "verdict", "schema": schema, "strict": True}
            self._options["response_format"] = {"type": "json_schema", "json_schema": form}

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Any = None,
        **columns: Sequence[Any],
    ) -> list[float]:
        """The scores of answers. Raises RewardError."""
        spent: dict[str, int] = dict.fromkeys(COSTS, 0)
        values = []
        for place, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            row = {name: column[place] for name, column in columns.items() if isinstance(column, list)}
            values.append(await self._value(prompt, _text(completion), row, spent))
        if log_metric is not None:
            for what, number in spent.items():
                log_metric(f"judge/{what}", number)
        return values

    async def _value(
        self, prompt: Any, completion: str, row: Mapping[str, Any], spent: dict[str, int]
    ) -> float:
        said = {"most": self._most, **row, "prompt": _text(prompt), "completion": completion}
        if self._rubric is not None:
            said["criteria"] = "\n".join(f"{number}. {each}" for number, each in enumerate(self._rubric, 1))
        if self._against is None:
            return await self._score_of(said, spent)
        if row.get(self._against) is None:
            raise RewardError(
                f"{WHO}: the row has no {self._against!r}, which answers are compared with.", place=0
            )
        other = _text(row[self._against])
        ours_first = await self._score_of({**said, "first": completion, "second": other}, spent)
        ours_second = await self._score_of({**said, "first": other, "second": completion}, spent)
        return (ours_first + 1 - ours_second) / 2

    async def _score_of(self, said: Mapping[str, Any], spent: dict[str, int]) -> float:
        """The score of a question, from the first reply that has one."""
        body = {**self._options, "messages": [{"role": "user", "content": _filled(self._template, said)}]}
        reply = ""
        for _ in range(self._tries):
            answer = await self._endpoint.answer(body)
            try:
                reply = str(answer["choices"][0]["message"]["content"] or "")
            except (KeyError, IndexError, TypeError):
                raise RewardError(
                    f"{WHO}: {self._endpoint.url} is no chat API: {shortened(str(answer), 200)}", place=0
                ) from None
            _count(spent, answer.get("usage"))
            try:
                return self._score(reply)
            except _NoScore:
                continue
        raise RewardError(
            f"{WHO}: {self._tries} replies have no score; the last ends with {shortened(repr(reply[-120:]), 150)}.",
            place=0,
        )

    def _score(self, reply: str) -> float:
        """The score that a reply states, from 0 to 1. Raises _NoScore."""
        if self._against is not None:
            verdicts = _VERDICT.findall(reply)
            if not verdicts:
                raise _NoScore
            return VERDICTS[verdicts[-1]]
        if self._rubric is not None:
            names = [str(number) for number in range(1, len(self._rubric) + 1)]
            met = _object(reply, names)
            if any(not isinstance(met.get(name), bool) for name in names):
                raise _NoScore
            weights = list(self._rubric.values())
            total = sum(weight for name, weight in zip(names, weights, strict=True) if met[name])
            return total / sum(weight for weight in weights if weight > 0)
        if self._schema is not None:
            stated = _object(reply, ["score"])["score"]
        else:
            matches = list(self._pattern.finditer(reply))
            stated = matches[-1][1 if self._pattern.groups else 0] if matches else None
        try:
            score = float(stated)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            raise _NoScore from None
        if isinstance(stated, bool) or not 0 <= score <= self._most:
            raise _NoScore
        return score / self._most


def _count(spent: dict[str, int], usage: Any) -> None:
    """Add what a request cost."""
    usage = usage if isinstance(usage, Mapping) else {}
    for what in COSTS:
        number = 1 if what == "requests" else usage.get(what)
        spent[what] += number if isinstance(number, int) else 0


def _object(reply: str, keys: Sequence[str]) -> Mapping[str, Any]:
    """The last JSON object in a reply that has these keys. Raises _NoScore."""
    decoder, last, end = json.JSONDecoder(), None, 0
    for match in islice(re.finditer(r"\{", reply), MOST_OBJECTS):
        if match.start() >= end:
            try:
                value, end = decoder.raw_decode(reply, match.start())
            except (ValueError, RecursionError):
                continue
            last = value if set(keys) <= set(value) else last
    if last is None:
        raise _NoScore
    return last


def _filled(template: str, said: Mapping[str, Any]) -> str:
    """A template with values in place of {NAME}; other braces stay. Raises RewardError for a name without a value."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in said:
            raise RewardError(
                f"{WHO}: its template names {match[0]}, but there is only {', '.join(sorted(said))}."
            )
        return f"{said[match[1]]:g}" if match[2] else _text(said[match[1]])

    return _PLACE.sub(value, template)


def _text(value: Any) -> str:
    """A text, or messages as text."""
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        if len(value) == 1 and value[0].get("role") == "assistant":
            return str(value[0].get("content"))
        return "\n".join(f"{each.get('role')}: {each.get('content')}" for each in value)
    return str(value)
