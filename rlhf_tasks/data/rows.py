"""What algorithms read of a row: text or conversations as token ids. Torch-free and fast to import.

Rows have the columns of TRL's data set types, standard (text) or conversational (messages), or those of
verl's Parquet files. Everything an algorithm does not read itself is a further column, handed to the rewards.
"""

import json
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlhf_tasks.system.reading import DataError, one_line

if TYPE_CHECKING:
    from rlhf_tasks.data.chat_template import Conversation
    from rlhf_tasks.data.dataset import Row
    from rlhf_tasks.data.tokenizer import Tokenizer

T = TypeVar("T")
DatasetValue = list[int] | list[bool] | str
"""Of one key of one sample: token ids, a mask, or text."""
Reading = Generator["list[Conversation]", list[str], T]
"""A row being read: it asks once for the texts of conversations, and returns what was read. So the conversations of
many rows are rendered together."""
Reader = Callable[["Row", "Tokenizer"], Reading[T]]


class PromptExample(NamedTuple):
    """A prompt to answer. columns: JSON of the row, the prompt itself included, for the rewards."""

    prompt_ids: list[int]
    columns: str

    def values(self) -> dict[str, list[int] | str]:
        """By the keys of the data set."""
        return {"prompt_ids": self.prompt_ids, "columns": self.columns}


class CompletionExample(NamedTuple):
    """A sequence to learn; the first `prompt_tokens` of `input_ids` are given, the rest is learned."""

    input_ids: list[int]
    prompt_tokens: int

    def values(self) -> dict[str, list[int] | list[bool]]:
        """By the keys of the data set; the mask is True on what is learned."""
        learned = [place >= self.prompt_tokens for place in range(len(self.input_ids))]
        return {"input_ids": self.input_ids, "response_mask": learned}


class PairExample(NamedTuple):
    """Two answers to one prompt, each with the prompt before it."""

    chosen_ids: list[int]
    rejected_ids: list[int]

    def values(self) -> dict[str, list[int]]:
        """By the keys of the data set."""
        return self._asdict()


def prompt_example(row: "Row", tokenizer: "Tokenizer") -> Reading[PromptExample]:
    """`prompt` (text or messages) and any further columns. Raises DataError, without its place."""
    prompt = _column(row, "prompt")
    is_text = isinstance(prompt, str)
    texts = yield [] if is_text else [(_messages(prompt, "prompt"), True)]
    ids = tokenizer.encode(prompt if is_text else texts[0], special_tokens=is_text)
    if not ids:
        raise DataError("has an empty prompt.")
    return PromptExample(ids, json.dumps(dict(row), ensure_ascii=False, default=str))


def completion_example(row: "Row", tokenizer: "Tokenizer") -> Reading[CompletionExample]:
    """`prompt` + `completion`, `messages` (the last one is learned), or `text` (all of it is learned).

    Raises DataError, without its place.
    """
    if "messages" in row:
        messages = _messages(row["messages"], "messages")
        prompt, (completion,) = yield from _turn_ids(messages[:-1], [messages[-1:]], tokenizer)
    elif "text" in row:
        yield []
        ids = _ended(tokenizer.encode(_text(row["text"], "text"), special_tokens=True), tokenizer)
        prompt, completion = [], ids
    else:
        answers = [_column(row, "completion")]
        prompt, (completion,) = yield from _answer_ids(_column(row, "prompt"), answers, tokenizer)
    if not prompt:  # nothing stands before the first token to predict it from
        prompt, completion = completion[:1], completion[1:]
    if not completion:
        raise DataError("has nothing to learn: the completion is empty.")
    return CompletionExample(prompt + completion, len(prompt))


def pair_example(row: "Row", tokenizer: "Tokenizer") -> Reading[PairExample]:
    """`prompt`, `chosen` and `rejected`; without `prompt` it is what the two answers begin with in common.

    Raises DataError, without its place.
    """
    chosen, rejected = _column(row, "chosen"), _column(row, "rejected")
    prompt = row.get("prompt")
    if prompt is None:
        common = 0
        if not isinstance(chosen, str):
            pairs = zip(_messages(chosen, "chosen"), _messages(rejected, "rejected"), strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
        elif not isinstance(rejected, str):
            raise DataError("chosen is text, but rejected is not. Give both as text or both as messages.")
        prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    first, answers = yield from _answer_ids(prompt, [chosen, rejected], tokenizer)
    pair = PairExample(*(first + then for then in answers))
    if not all(pair):
        raise DataError("has an empty answer.")
    return pair


def tools_of(row: "Row") -> list[Any]:
    """The tools that a row offers: column `tools`, a list of JSON schemas, or JSON of one. Raises DataError."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = {}
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError("column 'tools' must be a list of JSON schemas, or JSON of one.")
    return tools


def _column(row: "Row", name: str) -> Any:
    value = row.get(name)
    if value is None:
        raise DataError(
            f"has no column {name!r} (columns: {one_line(', '.join(row))}). Rename one with data.column_map."
        )
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"column {name!r} must be text, found {type(value).__name__}.")
    return value


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    """A conversation: a non-empty list of {role, content}."""
    well_formed = isinstance(value, list) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value
    )
    if not well_formed or not value:
        raise DataError(f"column {name!r} must be text or a list of messages with `role` and `content`.")
    return value


Answers = tuple[list[int], list[list[int]]]
"""Token ids of a prompt, and of each answer to it with its end token."""


def _answer_ids(prompt: Any, answers: list[Any], tokenizer: "Tokenizer") -> Reading[Answers]:
    if not isinstance(prompt, str):
        before = _messages(prompt, "prompt") if prompt else []
        turns = [
            [{"role": "assistant", "content": a}] if isinstance(a, str) else _messages(a, "answer")
            for a in answers
        ]
        return (yield from _turn_ids(before, turns, tokenizer))
    if not all(isinstance(answer, str) for answer in answers):
        raise DataError("prompt is text, but its answer is not. Give both as text or both as messages.")
    yield []
    ended = [_ended(tokenizer.encode(answer), tokenizer) for answer in answers]
    return tokenizer.encode(prompt, special_tokens=True), ended


def _turn_ids(before: list, turns: list[list], tokenizer: "Tokenizer") -> Reading[Answers]:
    """Token ids of a conversation and of each turn that may follow it."""
    asked: list[Conversation] = [(before, True)] if before else []
    texts = yield [*asked, *(([*before, *turn], False) for turn in turns)]
    opening, wholes = (texts[0], texts[1:]) if before else ("", texts)
    if not all(whole.startswith(opening) for whole in wholes):
        raise DataError(
            "the chat template changes earlier turns when one is added, so answers cannot be told apart."
        )
    return tokenizer.encode(opening), [tokenizer.encode(whole[len(opening) :]) for whole in wholes]


def _ended(ids: list[int], tokenizer: "Tokenizer") -> list[int]:
    """The ids with an end token at their end."""
    return ids if ids and ids[-1] in tokenizer.stop_ids else [*ids, tokenizer.eos_id]
