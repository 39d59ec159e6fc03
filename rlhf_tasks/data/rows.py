"""What algorithms read of a row: text or conversations as token ids. Torch-free and fast to import.

Rows have the columns of TRL's data set types, standard (text) or conversational (messages), or those of
verl's Parquet files. Everything an algorithm does not read itself is a further column, handed to the rewards.
"""

import json
import math
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlhf_tasks.system.reading import DataError, one_line

if TYPE_CHECKING:
    from rlhf_tasks.data.chat_template import Conversation
    from rlhf_tasks.data.dataset import Row
    from rlhf_tasks.data.tokenizer import Tokenizer

T = TypeVar("T")
DatasetValue = list[int] | list[bool] | list[float] | str
"""Of one key of one sample: token ids, a mask, numbers, or text."""
Reading = Generator["list[Conversation]", list[str], T]
"""A row being read: it asks once for the texts of conversations, and returns what was read. So the conversations of
many rows are rendered together."""
Reader = Callable[..., Reading[T]]
"""(row, tokenizer, options by keyword) -> the reading of an example, or of a list of them."""


class PromptExample(NamedTuple):
    """A prompt to answer. columns: JSON of the row, the prompt itself included, for the rewards."""

    prompt_ids: list[int]
    columns: str

    def values(self) -> dict[str, list[int] | str]:
        """By the keys of the data set."""
        return {"prompt_ids": self.prompt_ids, "columns": self.columns}


class CompletionExample(NamedTuple):
    """A sequence to learn. learned: the places in `input_ids` of the tokens that are learned; the rest is given."""

    input_ids: list[int]
    learned: tuple[range, ...]

    def values(self) -> dict[str, DatasetValue]:
        """By the keys of the data set; the mask is True on what is learned."""
        mask = [False] * len(self.input_ids)
        for places in self.learned:
            mask[places.start : places.stop] = [True] * len(places)
        return {"input_ids": self.input_ids, "response_mask": mask}


class PairExample(NamedTuple):
    """Two answers to a prompt; the first is preferred. Both are given with the prompt before them.

    prompt_tokens  tokens of both sequences that are not learned: the prompt's, or the first where there is no prompt
    margin         by how much the preferred answer is better; 0 where the row does not say
    """

    chosen_ids: list[int]
    rejected_ids: list[int]
    prompt_tokens: int
    margin: float

    def values(self) -> dict[str, DatasetValue]:
        """By the keys of the data set; the masks are True on the answers."""
        return {
            "chosen_ids": self.chosen_ids,
            "rejected_ids": self.rejected_ids,
            "chosen_mask": [place >= self.prompt_tokens for place in range(len(self.chosen_ids))],
            "rejected_mask": [place >= self.prompt_tokens for place in range(len(self.rejected_ids))],
            "margin": [self.margin],
        }


class LabelledExample(NamedTuple):
    """An answer that is desirable or not. prompt_tokens: as in `PairExample`."""

    input_ids: list[int]
    prompt_tokens: int
    desirable: bool

    def values(self) -> dict[str, DatasetValue]:
        """By the keys under which it is stored."""
        return {
            "input_ids": self.input_ids,
            "prompt_tokens": [self.prompt_tokens],
            "desirable": [self.desirable],
        }


def prompt_example(row: "Row", tokenizer: "Tokenizer") -> Reading[PromptExample]:
    """`prompt` (text or messages) and any further columns. Raises DataError, without its place."""
    prompt = _column(row, "prompt")
    is_text = isinstance(prompt, str)
    texts = yield [] if is_text else [(_messages(prompt, "prompt"), True)]
    ids = tokenizer.encode(prompt if is_text else texts[0], special_tokens=is_text)
    if not ids:
        raise DataError("has an empty prompt.")
    return PromptExample(ids, json.dumps(dict(row), ensure_ascii=False, default=str))


def completion_example(
    row: "Row",
    tokenizer: "Tokenizer",
    completion_only_loss: bool = True,
    assistant_only_loss: bool = False,
) -> Reading[CompletionExample]:
    """`prompt` + `completion`, `messages` (the last one is the completion), or `text` (all of it is the completion).

    completion_only_loss  learn the completion only; else all tokens
    assistant_only_loss   learn every message of the assistant, and nothing else
    Raises DataError, without its place.
    """
    if assistant_only_loss:
        return (yield from _assistant_turns(_conversation(row), tokenizer))
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
    given, ids = _given(prompt, completion), prompt + completion
    return CompletionExample(ids, (range(given if completion_only_loss else 1, len(ids)),))


def pair_example(row: "Row", tokenizer: "Tokenizer") -> Reading[PairExample]:
    """`prompt`, `chosen`, `rejected` and `margin` (0 where it is missing).

    Without `prompt` it is what the two answers begin with in common. Raises DataError, without its place.
    """
    chosen, rejected = _column(row, "chosen"), _column(row, "rejected")
    margin = row.get("margin")
    if margin is None:
        margin = 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(f"column 'margin' must be a finite number, found {one_line(repr(margin))}.")
    if chosen == rejected:
        raise DataError(EQUAL_ANSWERS)
    prompt = row.get("prompt")
    if prompt is None:
        common = 0
        if not isinstance(chosen, str):
            pairs = zip(_messages(chosen, "chosen"), _messages(rejected, "rejected"), strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
        elif not isinstance(rejected, str):
            raise DataError("chosen is text, but rejected is not. Give both as text or both as messages.")
        prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
        if not chosen or not rejected:
            raise DataError(NOTHING_TO_LEARN)
    first, answers = yield from _answer_ids(prompt, [chosen, rejected], tokenizer)
    if answers[0] == answers[1]:
        raise DataError(EQUAL_ANSWERS)
    given = max(_given(first, answer) for answer in answers)
    return PairExample(first + answers[0], first + answers[1], given, float(margin))


EQUAL_ANSWERS = "has equal answers: neither is preferred. Remove the row or correct chosen or rejected."


def labelled_examples(row: "Row", tokenizer: "Tokenizer") -> Reading[list[LabelledExample]]:
    """`prompt`, `completion` and `label` (true where the completion is desirable), or a pair as `pair_example` reads
    it: its chosen answer is desirable, its rejected one is not.

    Raises DataError, without its place.
    """
    if "chosen" in row or "rejected" in row:
        pair = yield from pair_example(row, tokenizer)
        return [
            LabelledExample(pair.chosen_ids, pair.prompt_tokens, True),
            LabelledExample(pair.rejected_ids, pair.prompt_tokens, False),
        ]
    label = _column(row, "label")
    if not isinstance(label, bool):
        raise DataError(f"column 'label' must be true or false, found {one_line(repr(label))}.")
    prompt, answers = _column(row, "prompt"), [_column(row, "completion")]
    first, (answer,) = yield from _answer_ids(prompt, answers, tokenizer)
    return [LabelledExample(first + answer, _given(first, answer), label)]


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


PromptAndAnswers = tuple[list[int], list[list[int]]]
"""Token ids of a prompt, and of each answer to it with its end token."""


def _given(prompt: list[int], answer: list[int]) -> int:
    """The tokens of prompt and answer that are not learned: the first at least, for nothing stands before it to
    predict it from. Raises DataError where nothing is learned."""
    given = max(len(prompt), 1)
    if given >= len(prompt) + len(answer):
        raise DataError(NOTHING_TO_LEARN)
    return given


NOTHING_TO_LEARN = "has nothing to learn: an answer is empty. Remove the row or fill it in."


def _answer_ids(prompt: Any, answers: list[Any], tokenizer: "Tokenizer") -> Reading[PromptAndAnswers]:
    if not isinstance(prompt, str):
        before = _messages(prompt, "prompt") if prompt else []
        turns = [
            [{"role": "assistant", "content": a}] if isinstance(a, str) else _messages(a, "answer")
            for a in answers
        ]
        return (yield from _turn_ids(before, turns, tokenizer))
    if not all(isinstance(answer, str) for answer in answers):
        raise DataError("prompt is text, but its answer is not. Give both as text or both as messages.")
    if not all(answers):
        raise DataError(NOTHING_TO_LEARN)
    yield []
    ended = [_ended(tokenizer.encode(answer), tokenizer) for answer in answers]
    return tokenizer.encode(prompt, special_tokens=True), ended


def _turn_ids(before: list, turns: list[list], tokenizer: "Tokenizer") -> Reading[PromptAndAnswers]:
    """Token ids of a conversation and of each turn that may follow it."""
    if not all(any(message["content"] or message.get("tool_calls") for message in turn) for turn in turns):
        raise DataError(NOTHING_TO_LEARN)
    asked: list[Conversation] = [(before, True)] if before else []
    texts = yield [*asked, *(([*before, *turn], False) for turn in turns)]
    opening, wholes = (texts[0], texts[1:]) if before else ("", texts)
    if not all(whole.startswith(opening) for whole in wholes):
        raise DataError(
            "the chat template changes earlier turns when one is added, so answers cannot be told apart."
        )
    return tokenizer.encode(opening), [tokenizer.encode(whole[len(opening) :]) for whole in wholes]


def _conversation(row: "Row") -> list[dict[str, Any]]:
    """The messages of a row whose assistant's turns are learned: `messages`, or `prompt` + `completion`."""
    if "messages" in row:
        return _messages(row["messages"], "messages")
    if "text" in row or isinstance(row.get("prompt"), str):
        raise DataError("is text, but assistant_only_loss is set. Give the row as messages or unset it.")
    return [m for name in ("prompt", "completion") for m in _messages(_column(row, name), name)]


def _assistant_turns(messages: list[dict[str, Any]], tokenizer: "Tokenizer") -> Reading[CompletionExample]:
    """A conversation of which each message of the assistant is learned, with what the template ends it by."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError(
            "has nothing to learn: no message is the assistant's, but assistant_only_loss is set."
        )
    before: list[Conversation] = [(messages[:place], True) for place in turns if place]
    after: list[Conversation] = [(messages[: place + 1], False) for place in turns]
    *texts, whole = yield [*before, *after, (messages, False)]
    openings = [""] * (len(turns) - len(before)) + texts[: len(before)]  # nothing opens a first message
    borders = [text for pair in zip(openings, texts[len(before) :], strict=True) for text in pair]
    if not all(whole.startswith(text) for text in borders):
        raise DataError(
            "the chat template changes earlier turns when one is added, so the assistant's cannot be told apart."
        )
    ids, learned, read = list[int](), list[range](), 0
    for number, text in enumerate([*borders, whole]):
        part = tokenizer.encode(whole[read : len(text)])
        if number % 2:
            learned.append(range(max(len(ids), 1), len(ids) + len(part)))
        ids, read = ids + part, len(text)
    if not any(learned):
        raise DataError(NOTHING_TO_LEARN)
    return CompletionExample(ids, tuple(learned))


def _ended(ids: list[int], tokenizer: "Tokenizer") -> list[int]:
    """The ids with an end token at their end."""
    return ids if ids and ids[-1] in tokenizer.stop_ids else [*ids, tokenizer.eos_id]
