"""Python rewards: the forms, told apart by their parameters; how each is called; what each may return.

The user's code runs only in a process of its own (child.py, judge.py).
"""

import importlib
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from prefect_rlhf.rlhf_tasks.config.functions import is_pickled, unpickled
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError, shortened

RewardValue = float | list[float] | None
"""What a reward gives for an answer: a number, or one for each of its tokens (a reward per token or per step). None
means no verdict: it adds 0 to the score and is left out of the mean."""
Values = list[RewardValue]
"""One value per answer."""


def total(value: float | list[float]) -> float:
    """A value for a whole answer."""
    return sum(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Answers:
    """The n answers that rewards judge.

    prompts         n texts, or n lists of messages where the rows are conversations
    completions     n texts of responses, without special tokens
    completion_ids  their token ids
    columns         the rows' further columns: name -> n values, None where a row lacks it
    prompt_texts    the n prompts as text; for a conversation, the text that the model read
    """

    prompts: list[Any]
    completions: list[str]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    prompt_texts: list[str]

    @staticmethod
    def of_columns(
        rows: Sequence[str],
        completions: list[str],
        completion_ids: list[list[int]],
        read: Sequence[str],
        names: Sequence[str] = (),
    ) -> "Answers":
        """Answers made from the sample key `columns`.

        rows   one JSON object per sample, with `prompt` among its entries
        read   the text that the model read before each completion
        names  of all columns of the data: rewards get these, so that what they get of a row does not depend on the
               rows beside it
        """
        parsed = [json.loads(row) for row in rows]
        every = dict.fromkeys([*names, *(name for row in parsed for name in row)])
        columns = {name: [row.get(name) for row in parsed] for name in every if name != "prompt"}
        prompts = [row.get("prompt") for row in parsed]
        texts = [
            prompt if isinstance(prompt, str) else text for prompt, text in zip(prompts, read, strict=True)
        ]
        return Answers(prompts, completions, completion_ids, columns, texts)

    def select(self, places: Sequence[int]) -> "Answers":
        """The answers at these indices."""

        def at_places(values: list[Any]) -> list[Any]:
            return [values[i] for i in places]

        columns = {name: at_places(values) for name, values in self.columns.items()}
        return Answers(
            at_places(self.prompts),
            at_places(self.completions),
            at_places(self.completion_ids),
            columns,
            at_places(self.prompt_texts),
        )

    def __len__(self) -> int:
        return len(self.completions)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The part of TRL's `trainer_state` that rewards use.

    global_step  iterations that are finished
    max_steps    iterations of the whole run
    """

    global_step: int
    max_steps: int
    epoch: float | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list)


Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallForm:
    """One way to call a reward.

    arguments   (answers, state) -> the keyword arguments of the call that judges them
    per_answer  a call judges one answer and returns one value; otherwise it judges several, and returns one for each
    """

    arguments: Callable[[Answers, TrainerState], Arguments]
    per_answer: bool = False


def _trl(answers: Answers, state: TrainerState) -> Arguments:
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(answers.prompts, answers.completions, strict=True)
    ]
    return {
        **answers.columns,
        "prompts": answers.prompts,
        "completions": completions,
        "completion_ids": answers.completion_ids,
        "completions_ids": answers.completion_ids,  # TRL's documentation uses both names
        "trainer_state": state,
    }


def _verl_batch(answers: Answers, state: TrainerState) -> Arguments:
    nothing = [None] * len(answers)
    columns = answers.columns
    models = columns.get("reward_model", nothing)
    truths = zip(models, columns.get("ground_truth", nothing), strict=True)
    return {
        "data_sources": columns.get("data_source", nothing),
        "solution_strs": answers.completions,
        "ground_truths": [m.get("ground_truth") if isinstance(m, dict) else other for m, other in truths],
        "extra_infos": [info or {} for info in columns.get("extra_info", nothing)],
    }


def _verl(answer: Answers, state: TrainerState) -> Arguments:
    return {name.removesuffix("s"): only for name, (only,) in _verl_batch(answer, state).items()}


def _openrlhf(answers: Answers, state: TrainerState) -> Arguments:
    texts = zip(answers.prompt_texts, answers.completions, strict=True)
    label = next((name for name in ("label", "labels", "answer") if name in answers.columns), None)
    return {
        "queries": [prompt + completion for prompt, completion in texts],
        "prompts": answers.prompt_texts,
        "labels": answers.columns[label] if label else [""] * len(answers),
    }


TRL = CallForm(_trl)
SIGNS = (
    # TRL's completions first: a column may have another form's name.
    ({"completions", "completion_ids", "completions_ids"}, TRL),
    ({"solution_str"}, CallForm(_verl, per_answer=True)),
    ({"solution_strs"}, CallForm(_verl_batch)),
    ({"queries"}, CallForm(_openrlhf)),
    ({"prompts"}, TRL),
)
"""(parameter names, form): a function with any of the names has the form. The first match counts."""
BUILTIN = "builtin"
"""`builtin:NAME` is a reward, an environment or a tool of one of these modules:"""
_BUILT_IN = {
    "rewards": "builtin_rewards",
    "environments": "builtin_environments",
    "tools": "tools.builtin",
}
LOGS = ("log_extra", "log_metric")
"""Functions that TRL's form may also take: `log_extra(column, values)`, `log_metric(name, value)`."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a function.

    names      those that can be given by name
    required   those without a default
    takes_any  whether it has **kwargs
    """

    names: Collection[str]
    required: Collection[str]
    takes_any: bool

    @staticmethod
    def of(function: Callable[..., Any]) -> "Parameters":
        """The parameters of a function. Raises ValueError or TypeError where Python cannot inspect it."""
        every = inspect.signature(function).parameters.values()
        single = [p for p in every if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        return Parameters(
            [p.name for p in single if p.kind is not p.POSITIONAL_ONLY],
            [p.name for p in single if p.default is p.empty],
            any(p.kind is p.VAR_KEYWORD for p in every),
        )

    @staticmethod
    def inspected(function: Callable[..., Any]) -> "Parameters | None":
        """The same; None of a class, whose objects are called, and where Python cannot inspect it."""
        try:
            return None if inspect.isclass(function) else Parameters.of(function)
        except (TypeError, ValueError):
            return None

    def form(self, location: str, kwargs: Collection[str]) -> CallForm:
        """The form of a function with these parameters. Raises RewardError for no known form or an unknown kwarg."""
        form = next(
            (form for signs, form in SIGNS if signs & set(self.names)), TRL if self.takes_any else None
        )
        if form is None:
            raise RewardError(
                f"reward {location}: takes ({', '.join(self.names)}). "
                "Give it the parameters (prompts, completions, **columns)."
            )
        self.refuse_unknown(location, kwargs)
        return form

    def refuse_unknown(self, location: str, kwargs: Collection[str]) -> None:
        """Raises RewardError for a kwarg that the function does not take."""
        unknown = [name for name in kwargs if name not in self.names]
        if unknown and not self.takes_any:
            raise RewardError(
                f"reward {location}: has no parameter {unknown[0]!r}, which its kwargs name "
                f"(it takes {', '.join(self.names)})."
            )

    def refuse_missing(
        self, location: str, form: CallForm, kwargs: Collection[str], columns: Sequence[str]
    ) -> None:
        """Raises RewardError for a required parameter that neither the form, a column nor `kwargs` supplies."""
        one = Answers([""], [""], [[]], {name: [None] for name in columns}, [""])
        offered = {*form.arguments(one, TrainerState(0, 1)), *kwargs, *(LOGS if form is TRL else ())}
        missing = [name for name in self.required if name not in offered]
        if missing:
            raise RewardError(
                f"reward {location}: its parameter {missing[0]!r} is neither a column of the rows "
                f"({', '.join(columns) or 'which have no further ones'}) nor among its kwargs. Rename a column with "
                "data.column_map, or give it in kwargs."
            )


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function of the user's, or of ours, with how it is called.

    file              the source file of its function; "" where Python does not know it
    answers_per_call  the most answers that a call judges, as a service or an object with this attribute says; None: a
                      call judges all answers, or one
    per               sequence, step or token: what it gives for an answer, see `value`
    """

    name: str
    location: str
    function: Callable[..., Any]
    parameters: Parameters
    form: CallForm
    kwargs: Mapping[str, Any]
    file: str
    answers_per_call: int | None = None
    per: str = "sequence"

    def arguments(
        self, answers: Answers, state: TrainerState, logs: Mapping[str, Callable[[str, Any], None]]
    ) -> Arguments:
        """The keyword arguments of the call that judges these. Raises RewardError where a required one is missing."""
        self.parameters.refuse_missing(self.location, self.form, self.kwargs, list(answers.columns))
        logs = logs if self.form is TRL else {}
        every = {**self.form.arguments(answers, state), **logs, **self.kwargs}
        takes_any, names = self.parameters.takes_any, self.parameters.names
        return {name: value for name, value in every.items() if takes_any or name in names}

    def values(
        self, returned: Any, places: Sequence[int], answers: Answers
    ) -> "list[RewardValue | RewardError]":
        """One value for each of the answers at these indices, from what a call returned; the error for a bad one.

        Raises RewardError where there is not one for each.
        """
        listed = [returned] if self.form.per_answer else self._listed(returned, len(places))
        values: list[RewardValue | RewardError] = []
        for place, value in zip(places, listed, strict=True):
            try:
                values.append(self.value(value, len(answers.completion_ids[place])))
            except RewardError as error:
                error.place = place
                values.append(error)
        return values

    def _listed(self, returned: Any, n_answers: int) -> Sequence[Any]:
        if isinstance(returned, Mapping):  # OpenRLHF's
            key = next((name for name in ("rewards", "scores") if name in returned), None)
            if key is None:
                raise RewardError(
                    f"reward {self.name!r} returned a dict without 'rewards' (keys: {_keys(returned)})."
                )
            returned = returned[key]
        returned = plain(returned)
        if not isinstance(returned, list | tuple):
            kind = type(returned).__name__ if returned is not None else "None"
            raise RewardError(f"reward {self.name!r} returned {kind} instead of a list of numbers.")
        if len(returned) != n_answers:
            raise RewardError(
                f"reward {self.name!r} returned {len(returned)} values for {n_answers} answers."
            )
        return returned

    def value(self, value: Any, n_tokens: int) -> RewardValue:
        """The value of an answer that has so many tokens. Raises RewardError.

        Per token, it is a list of n_tokens numbers, one for each of `completion_ids`. Per step, it is a list of
        [token, number]: the index among `completion_ids` of a step's last token, and the step's reward.
        """
        if self.per == "sequence":
            return self._number(value)
        if isinstance(value, Mapping):  # verl's
            value = value.get("score", value)
        value = plain(value)
        if value is None:
            return None
        returned = f"reward {self.name!r} returned"
        if not isinstance(value, list | tuple):
            raise RewardError(f"{returned} {_shown(value)} for an answer: with per: {self.per} it is a list.")
        if self.per == "token":
            if len(value) != n_tokens:
                raise RewardError(
                    f"{returned} {len(value)} numbers for an answer of {n_tokens} tokens: with per: token there is "
                    "one for each of completion_ids."
                )
            return [self._finite(each) for each in value]
        tokens = [0.0] * n_tokens
        for step in value:
            step = plain(step)
            token = plain(step[0]) if isinstance(step, list | tuple) and len(step) == 2 else None
            if type(token) is float and token.is_integer():  # an array of steps has one dtype for all
                token = int(token)
            if type(token) is not int or not 0 <= token < n_tokens:
                raise RewardError(
                    f"{returned} {_shown(value)} for an answer of {n_tokens} tokens: with per: step each step is "
                    f"[token, number], its last token from 0 to {n_tokens - 1}."
                )
            tokens[token] += self._finite(step[1])
        return tokens

    def _finite(self, value: Any) -> float:
        number = self._number(value)
        if number is None:
            raise RewardError(f"reward {self.name!r} returned None among an answer's numbers.")
        return number

    def _number(self, value: Any) -> float | None:
        if isinstance(value, Mapping):  # verl's
            if "score" not in value:
                raise RewardError(
                    f"reward {self.name!r} returned a dict without 'score' (keys: {_keys(value)})."
                )
            value = value["score"]
        value = unwrapped(value)
        if value is None:
            return None
        number = as_float(value)
        if math.isfinite(number):
            return number
        kind = "finite number" if isinstance(value, float | int) else "number"
        raise RewardError(f"reward {self.name!r} returned {_shown(value)}: not a {kind}.")


def plain(value: Any) -> Any:
    """A value, or the list or number that an array or a tensor holds."""
    return value.tolist() if hasattr(value, "tolist") else value


def unwrapped(value: Any) -> Any:
    """What a list, an array or a tensor of one value holds, however deep; else the value."""
    value = plain(value)
    while isinstance(value, list | tuple) and len(value) == 1:
        value = plain(value[0])
    return value


def as_float(value: Any) -> float:
    """A number of any kind (Python's, NumPy's, a Decimal, a Fraction, a bool) as a float; NaN for anything else."""
    try:
        return math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _shown(value: Any) -> str:
    return shortened(repr(value), 80)


def _keys(mapping: Mapping[Any, Any]) -> str:
    return shortened(", ".join(map(str, mapping)), 200) or "none"


def load_reward(name: str, location: str, kwargs: Mapping[str, Any], per: str = "sequence") -> Reward:
    """The reward at `module:function`, `file.py:function` or `FILE.pickle:function`. From a class, an object is made
    with `kwargs`.

    Raises RewardError when it is not there or its parameters match no form. What the user's module raises while it is
    imported is not caught.
    """
    place, _, attribute = location.rpartition(":")
    target = unpickled(Path(place)) if is_pickled(location) else getattr(module_at(place), attribute, None)
    if target is None:
        raise RewardError(f"reward {location}: {place} has no function {attribute!r}.")
    if not callable(target):
        raise RewardError(f"reward {location}: {attribute!r} is not a function.")
    if inspect.isclass(target):
        target, kwargs = target(**kwargs), {}
        if not callable(target):
            raise RewardError(f"reward {location}: objects of the class {attribute!r} cannot be called.")
    try:
        parameters = Parameters.of(target)
    except (TypeError, ValueError):
        raise RewardError(
            f"reward {location}: Python cannot inspect its parameters. Wrap it in a function."
        ) from None
    code = getattr(target, "__code__", None) or getattr(type(target).__call__, "__code__", None)
    file = code.co_filename if code is not None else ""
    form = parameters.form(location, kwargs)
    most = getattr(target, "answers_per_call", None)
    return Reward(name, location, target, parameters, form, kwargs, file, most, per)


def module_at(place: str, kind: str = "rewards") -> ModuleType:
    """A module by its name, or the one in a file, or the one of `kind` that is built in. Raises RewardError."""
    if place == BUILTIN:
        return importlib.import_module(f"prefect_rlhf.rlhf_tasks.user_code.{_BUILT_IN[kind]}")
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise RewardError(f"file {path} of the {kind}: no such file.")
    name = f"{kind}_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
