"""A language model as a judge: `function: builtin:judge`, any OpenAI-compatible server, or the run's role `judge`
(docs/how-to/rewards.md)."""

import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from prefect_rlhf.rlhf_tasks.config.models import JUDGE_REPLIES
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
OF_A_SERVICE = ("model", "api_key", "tries", "timeout_s", "allow_private")
_URL = re.compile(r"https?://[^/?#\s@]+(/[^?#\s]*)?")
_PLACE = re.compile(r"\{(\w+)(:g)?\}")
_VERDICT = re.compile(r"\[\[([ABC])\]\]")


class _NoScore(Exception):
    """A reply in which there is no score."""


def _is(value: Any, kind: Any) -> bool:
    """Whether an argument is of a kind, and where it is a number, a finite one."""
    finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, kind) and not isinstance(value, bool) and finite


class judge:
    """A score from 0 to 1 for each answer, by a judge that is asked about each alone.

    url        of the API, such as https://api.example.org/v1; `model` is the judge's name there, `api_key` the key.
               Without it the role `judge` of the run is asked, whose replies are in the column `judge_replies`
    template   what the judge is asked: {prompt}, {completion} and {COLUMN} stand for the answer's; default: GRADED
    pattern    its last match (the first group) in the reply is the score, from 0 to `most`, which 1 stands for
    schema     instead of a pattern, a JSON schema of the reply, whose property `score` is the score
    rubric     instead, criterion -> weight: the score is the weight of those that are met, over all positive weights
    against    instead, the column of an answer to compare with: 1, 0.5 or 0 where the model's is better, equally good
               or worse. Both orders are asked, since judges prefer a place.
    tries      requests to a service until a reply has a score
    unreadable the score where a reply has none; default: the reward fails
    It logs what its requests cost: judge/requests, judge/prompt_tokens, judge/completion_tokens; and with
    `unreadable` judge/unreadable, how many replies had no score.
    """

    answers_per_call: int | None = 1

    def __init__(
        self,
        url: str | None = None,
        model: str | None = None,
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
        unreadable: float | None = None,
    ) -> None:
        settings = dict(locals())
        for name, kind, what in (
            ("url", str | None, "a text"),
            ("model", str if url is not None else str | None, "a text"),
            ("template", str | None, "a text"),
            ("pattern", str, "a text"),
            ("most", int | float, "a number"),
            ("schema", Mapping | None, "a mapping"),
            ("rubric", Mapping | None, "a mapping of criteria to weights"),
            ("against", str | None, "a column's name"),
            ("tries", int, "a whole number"),
            ("max_tokens", int, "a whole number"),
            ("temperature", int | float, "a number"),
            ("timeout_s", int | float, "a number"),
            ("unreadable", int | float | None, "a number"),
        ):
            if not _is(settings[name], kind):
                raise RewardError(f"{WHO}: {name}={shortened(repr(settings[name]), 80)} is not {what}.")
        if sum(each is not None for each in (schema, rubric, against)) > 1:
            raise RewardError(f"{WHO}: give one of schema, rubric and against.")
        if rubric is not None and not (
            all(type(weight) in (int, float) and math.isfinite(weight) for weight in rubric.values())
            and any(weight > 0 for weight in rubric.values())
        ):
            raise RewardError(
                f"{WHO}: no criterion of its rubric has a weight above 0, or a weight is no number."
            )
        for name in ("most", "tries", "max_tokens"):
            if settings[name] <= 0:
                raise RewardError(f"{WHO}: {name}={settings[name]:g} must be above 0.")
        if temperature < 0:
            raise RewardError(f"{WHO}: temperature={temperature:g} is below 0. Choose 0 for greedy replies.")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise RewardError(f"{WHO}: pattern {shortened(pattern, 80)} is none: {error}.") from None
        self._endpoint = self._service(settings)
        if self._endpoint is None:
            self.answers_per_call = None  # its replies are there, and come with the batch
        self._template = template or (PAIRED if against else LISTED if rubric else GRADED)
        named = {match[1] for match in _PLACE.finditer(self._template)}
        ours = {"first", "second"} if against else {"criteria"} if rubric else set[str]()
        if lacks := ours - named:
            raise RewardError(f"{WHO}: its template lacks {{{min(lacks)}}}. Say where it stands.")
        self.columns = sorted(
            named - ours - {"prompt", "completion", "most"} | ({against} if against else set())
        )
        self._rubric, self._schema, self._against = rubric, schema, against
        self._most, self._tries, self._unreadable = most, tries, unreadable
        self.max_tokens, self.temperature = max_tokens, float(temperature)
        self._options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        if schema is not None:
            form = {"name": "verdict", "schema": schema, "strict": True}
            self._options["response_format"] = {"type": "json_schema", "json_schema": form}

    @staticmethod
    def _service(settings: Mapping[str, Any]) -> Endpoint | None:
        """The service that is asked; None where the judge is a role of the run. Raises RewardError."""
        url, api_key = settings["url"], settings["api_key"]
        if url is None:
            defaults = inspect.signature(judge).parameters
            for name in OF_A_SERVICE:
                if settings[name] != defaults[name].default:
                    raise RewardError(
                        f"{WHO}: only a service has {name}, and without url the run's role judge is asked. "
                        "Give url, or leave it out."
                    )
            return None
        if not _URL.fullmatch(url):  # not shown: it may have a password
            raise RewardError(
                f"{WHO}: url is not of the form https://HOST/PATH, without a login and a query."
            )
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        address = url.rstrip("/") + "/chat/completions"
        endpoint = Endpoint(
            WHO, address, headers, settings["timeout_s"], "timeout_s of its kwargs", settings["allow_private"]
        )
        endpoint.refuse_headers()
        return endpoint

    @property
    def asks(self) -> int:
        """Questions about an answer."""
        return 1 if self._against is None else 2

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Any = None,
        **columns: Sequence[Any],
    ) -> list[float]:
        """The scores of answers. Raises RewardError."""
        spent: dict[str, int] = dict.fromkeys(COSTS if self._endpoint is not None else (), 0)
        values = []
        for place, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            row = {name: column[place] for name, column in columns.items() if isinstance(column, list)}
            try:
                scores = await self._scores(prompt, completion, row, spent)
            except RewardError as error:
                error.place = None if error.place is None else place
                raise
            values.append(scores[0] if self._against is None else (scores[0] + 1 - scores[1]) / 2)
        if log_metric is not None:
            for what, number in spent.items():
                log_metric(f"judge/{what}", number)
        return values

    async def _scores(
        self, prompt: Any, completion: Any, row: Mapping[str, Any], spent: dict[str, int]
    ) -> list[float]:
        """The score of each question about an answer. Raises RewardError."""
        questions = self.questions(prompt, completion, row)
        if self._endpoint is not None:
            return [await self._answered(self._endpoint, question, spent) for question in questions]
        if row.get(JUDGE_REPLIES) is None:
            raise RewardError(f"{WHO}: it has no url, and no role of the run has replied. Give one.")
        return [self._said(reply, spent) for reply in row[JUDGE_REPLIES]]

    def questions(self, prompt: Any, completion: Any, row: Mapping[str, Any]) -> list[str]:
        """What the judge is asked about an answer: `asks` texts. Raises RewardError."""
        completion = _text(completion)
        said = {"most": self._most, **row, "prompt": _text(prompt), "completion": completion}
        if self._rubric is not None:
            said["criteria"] = "\n".join(f"{number}. {each}" for number, each in enumerate(self._rubric, 1))
        if self._against is None:
            return [_filled(self._template, said)]
        if row.get(self._against) is None:
            raise RewardError(
                f"{WHO}: the row has no {self._against!r}, which answers are compared with.", place=0
            )
        other = _text(row[self._against])
        return [
            _filled(self._template, {**said, "first": first, "second": second})
            for first, second in ((completion, other), (other, completion))
        ]

    def reads(self, reply: str) -> bool:
        """Whether a reply has a score."""
        try:
            self._score(reply)
        except _NoScore:
            return False
        return True

    def _said(self, reply: str | None, spent: dict[str, int]) -> float:
        """The score in a reply of the run's judge."""
        if reply is None:
            raise RewardError(
                f"{WHO}: with max_tokens={self.max_tokens} of the reply, the question is longer than the context of "
                "models.judge. Shorten the template or sampling.max_completion_length, or choose another judge.",
                place=0,
            )
        try:
            return self._score(reply)
        except _NoScore:
            return self._without(f"the reply has no score; it ends with {_end(reply)}.", spent)

    async def _answered(self, endpoint: Endpoint, question: str, spent: dict[str, int]) -> float:
        """The score of a question, from a service's first reply that has one."""
        body = {**self._options, "messages": [{"role": "user", "content": question}]}
        reply = ""
        for _ in range(self._tries):
            answer = await endpoint.answer(body)
            try:
                reply = str(answer["choices"][0]["message"]["content"] or "")
            except (KeyError, IndexError, TypeError):
                raise RewardError(
                    f"{WHO}: {endpoint.url} is no chat API: {shortened(str(answer), 200)}", place=0
                ) from None
            _count(spent, answer.get("usage"))
            try:
                return self._score(reply)
            except _NoScore:
                continue
        why = f"{self._tries} replies have no score; the last ends with {_end(reply)}."
        return self._without(why, spent)

    def _without(self, why: str, spent: dict[str, int]) -> float:
        """The score where a reply has none, which is counted. Raises RewardError where that is a failure."""
        if self._unreadable is None:
            raise RewardError(f"{WHO}: {why}", place=0)
        spent["unreadable"] = spent.get("unreadable", 0) + 1
        return self._unreadable

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


def _end(reply: str) -> str:
    return shortened(repr(reply[-120:]), 150)


def _text(value: Any) -> str:
    """A text, or messages as text."""
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        if len(value) == 1 and value[0].get("role") == "assistant":
            return str(value[0].get("content"))
        return "\n".join(f"{each.get('role')}: {each.get('content')}" for each in value)
    return str(value)
