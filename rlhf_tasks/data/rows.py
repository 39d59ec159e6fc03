"""What algorithms read of a row: text or conversations as token ids. Torch-free and fast to import.

Rows have the columns of TRL's data set types, standard (text) or conversational (messages), those of verl's Parquet
files, or ShareGPT's. Everything an algorithm does not read itself is a further column, handed to the rewards. The
same row gives the same messages from every kind of file: where messages, tool calls or tools differ in their keys,
Arrow files hold null for those that are missing, so a null key counts as missing everywhere.
"""

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from prefect_rlhf.rlhf_tasks.system.reading import DataError, one_line, shown

if TYPE_CHECKING:
    from prefect_rlhf.rlhf_tasks.data.chat_template import Conversation
    from prefect_rlhf.rlhf_tasks.data.dataset import Row
    from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer

Messages = list[dict[str, Any]]
SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
"""ShareGPT's `from` -> role."""
GIVEN_ROLES = ("system", "user", "tool")
"""Whose messages are given, never learned."""
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
    """`prompt` (text or messages) and any further columns. Where there is no `prompt`, it is the row's conversation
    up to the assistant's last message. Raises DataError, without its place."""
    told = conversation_of(row) if row.get("prompt") is None else None
    prompt: Any = _before_answer(told) if told else _text_or_messages(row, "prompt")
    is_text = isinstance(prompt, str)
    texts = yield [] if is_text else [(prompt, True)]
    ids = tokenizer.encode(prompt if is_text else texts[0], special_tokens=is_text)
    if not ids:
        raise DataError("has an empty prompt.")
    return PromptExample(ids, json.dumps({**row, "prompt": prompt}, ensure_ascii=False, default=str))


def _before_answer(told: Messages) -> Messages:
    said = [place for place, message in enumerate(told) if message["role"] == "assistant"]
    before = told[: said[-1]] if said and said[-1] == len(told) - 1 else told
    if not before:
        raise DataError("has an empty prompt: its conversation begins with the answer.")
    return before


def completion_example(
    row: "Row",
    tokenizer: "Tokenizer",
    completion_only_loss: bool = True,
    assistant_only_loss: bool = False,
) -> Reading[CompletionExample]:
    """A conversation (the last message is the completion), `text` (all of it is), or `prompt` + `completion`.

    completion_only_loss  learn the completion only; else all tokens
    assistant_only_loss   learn every message of the assistant, and nothing else
    Raises DataError, without its place.
    """
    if assistant_only_loss:
        return (yield from _assistant_turns(_conversation(row), tokenizer))
    told = conversation_of(row)
    if told is not None:
        prompt, (completion,) = yield from _turn_ids(told[:-1], [told[-1:]], tokenizer)
    elif row.get("text") is not None:
        yield []
        ids = _ended(tokenizer.encode(_text(row["text"], "text"), special_tokens=True), tokenizer)
        prompt, completion = [], ids
    else:
        answers = [_text_or_messages(row, "completion")]
        prompt, (completion,) = yield from _answer_ids(_column(row, "prompt"), answers, tokenizer)
    given, ids = _given(prompt, completion), prompt + completion
    return CompletionExample(ids, (range(given if completion_only_loss else 1, len(ids)),))


def pair_example(row: "Row", tokenizer: "Tokenizer") -> Reading[PairExample]:
    """`prompt`, `chosen`, `rejected` and `margin` (0 where it is missing).

    Without `prompt` it is what the two answers begin with in common: messages, or of text tokens, so that both texts
    have the tokens that they have as wholes. Raises DataError, without its place.
    """
    answers = [_text_or_messages(row, name) for name in ("chosen", "rejected")]
    margin = _margin(row.get("margin"))
    if answers[0] == answers[1]:
        raise DataError(EQUAL_ANSWERS)
    prompt = row.get("prompt") or _asked(row)
    texts = [answer for answer in answers if isinstance(answer, str)]
    if prompt or len(texts) < len(answers):
        first, (chosen, rejected) = yield from _answer_ids(prompt, answers, tokenizer)
    else:
        yield []
        chosen, rejected = (_ended(tokenizer.encode(each, special_tokens=True), tokenizer) for each in texts)
        common = _shared(chosen, rejected)
        first, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    if chosen == rejected:
        raise DataError(EQUAL_ANSWERS)
    given = max(_given(first, answer) for answer in (chosen, rejected))
    return PairExample(first + chosen, first + rejected, given, margin)


def _asked(row: "Row") -> Messages | str:
    """The conversation that the answers of a pair follow, where the row has one beside them; else nothing."""
    told = conversation_of(row)
    return "" if told is None or told[-1]["role"] == "assistant" else told


def _margin(value: Any) -> float:
    """A margin; text too, as CSV has it."""
    if value is None or value == "":
        return 0.0
    try:
        margin = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise DataError(f"column 'margin' must be a finite number, found {one_line(repr(value))}.")
    return margin


EQUAL_ANSWERS = "has equal answers: neither is preferred. Remove the row or correct chosen or rejected."


def labelled_examples(row: "Row", tokenizer: "Tokenizer") -> Reading[list[LabelledExample]]:
    """`prompt` and `completion` or a conversation, and `label` (true where the answer is desirable), or a pair
    as `pair_example` reads it: its chosen answer is desirable, its rejected one is not.

    Raises DataError, without its place.
    """
    if "chosen" in row or "rejected" in row:
        pair = yield from pair_example(row, tokenizer)
        return [
            LabelledExample(pair.chosen_ids, pair.prompt_tokens, True),
            LabelledExample(pair.rejected_ids, pair.prompt_tokens, False),
        ]
    label = _column(row, "label")
    label = TRUTHS.get(label.strip().lower(), label) if isinstance(label, str) else label
    if not isinstance(label, bool):
        raise DataError(f"column 'label' must be true or false, found {one_line(repr(label))}.")
    told = conversation_of(row) if row.get("completion") is None else None
    if told is not None:
        first, (answer,) = yield from _turn_ids(told[:-1], [told[-1:]], tokenizer)
    else:
        prompt, answers = _column(row, "prompt"), [_text_or_messages(row, "completion")]
        first, (answer,) = yield from _answer_ids(prompt, answers, tokenizer)
    return [LabelledExample(first + answer, _given(first, answer), label)]


TRUTHS = {"true": True, "false": False}  # as CSV has them


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


def _text_or_messages(row: "Row", name: str) -> str | Messages:
    value = _column(row, name)
    return value if isinstance(value, str) else messages(value, name)


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
    if not all(isinstance(part, str) for part in (prompt, *answers)):
        return (yield from _turn_ids(*parted(prompt, answers), tokenizer))
    if not all(answers):
        raise DataError(NOTHING_TO_LEARN)
    yield []
    ended = [_ended(tokenizer.encode(answer), tokenizer) for answer in answers]
    return tokenizer.encode(prompt, special_tokens=True), ended


def _turn_ids(before: Messages, turns: list[Messages], tokenizer: "Tokenizer") -> Reading[PromptAndAnswers]:
    """Token ids of a conversation and of each turn that may follow it."""
    if not all(any(message["content"] or message.get("tool_calls") for message in turn) for turn in turns):
        raise DataError(NOTHING_TO_LEARN)
    last = next((turn[-1]["role"] for turn in turns if turn[-1]["role"] in GIVEN_ROLES), None)
    if last is not None:
        raise DataError(
            f"ends with a message of the role {last!r}, but the last message is the one that is learned. End it with "
            "the assistant's (SFT: or set assistant_only_loss)."
        )
    asked: list[Conversation] = [(before, True)] if before else []
    texts = yield [*asked, *(([*before, *turn], False) for turn in turns)]
    opening, wholes = (texts[0], texts[1:]) if before else ("", texts)
    for whole in wholes:
        if not whole.startswith(opening):
            raise DataError(_why_not_begun(opening, whole, before))
    return tokenizer.encode(opening), [tokenizer.encode(whole[len(opening) :]) for whole in wholes]


def _why_not_begun(opening: str, whole: str, before: Messages) -> str:
    """Why a conversation does not begin with its opening, in which the assistant's turn is open: a sentence."""
    same = _shared(opening, whole)
    said = str(before[-1]["content"]).strip()
    if said and opening[:same].count(said) >= sum(said in str(message["content"]) for message in before):
        return (
            f"the chat template opens the assistant's turn with {shown(opening[same:])}, which it does not write "
            "before this answer. Begin answers with it, or let the template write nothing of the kind where "
            "add_generation_prompt is set."
        )
    return (
        "the chat template changes earlier turns when one is added, so answers cannot be told apart: first it writes "
        f"{shown(opening[same : same + 80])}, with the answer {shown(whole[same : same + 80])} there."
    )


def _conversation(row: "Row") -> Messages:
    """The messages of a row whose assistant's turns are learned: its conversation, or `prompt` + `completion`."""
    told = conversation_of(row)
    if told is not None:
        return told
    if row.get("text") is not None or isinstance(row.get("prompt"), str):
        raise DataError("is text, but assistant_only_loss is set. Give the row as messages or unset it.")
    return [m for name in ("prompt", "completion") for m in messages(_column(row, name), name)]


def _assistant_turns(told: Messages, tokenizer: "Tokenizer") -> Reading[CompletionExample]:
    """A conversation of which each message of the assistant is learned, with what the template ends it by."""
    turns = [place for place, message in enumerate(told) if message["role"] == "assistant"]
    if not turns:
        raise DataError(
            "has nothing to learn: no message is the assistant's, but assistant_only_loss is set."
        )
    before: list[Conversation] = [(told[:place], True) for place in turns if place]
    after: list[Conversation] = [(told[: place + 1], False) for place in turns]
    *texts, whole = yield [*before, *after, (told, False)]
    openings = [""] * (len(turns) - len(before)) + texts[: len(before)]  # nothing opens a first message
    for place, opening, closed in zip(turns, openings, texts[len(before) :], strict=True):
        if not closed.startswith(opening):
            raise DataError(_why_not_begun(opening, closed, told[:place]))
    borders = [text for pair in zip(openings, texts[len(before) :], strict=True) for text in pair]
    for text in borders:
        if not whole.startswith(text):
            same = _shared(text, whole)
            raise DataError(
                "the chat template changes earlier turns when one is added, so the assistant's cannot be told apart: "
                f"first it writes {shown(text[same : same + 80])}, then {shown(whole[same : same + 80])} there."
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


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many of the first entries are the same."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))


def messages(value: Any, name: str) -> Messages:
    """A non-empty list of {role, content}, from one, from ShareGPT's {from, value}, or from a single message.

    A message with `tool_calls` and no content has empty content. Raises DataError naming the column, without its
    place.
    """
    read = [_message(each, name) for each in (value if isinstance(value, list) else [value])]
    if not read:
        raise _malformed(name)
    return read


def conversation_of(row: Mapping[str, Any]) -> Messages | None:
    """A row's whole conversation: column `messages`, or ShareGPT's `conversations`, which begins with what a column
    `system` says. None where it has neither. Raises DataError, without its place."""
    if row.get("messages") is not None:
        return messages(row["messages"], "messages")
    if row.get("conversations") is None:
        return None
    read, system = messages(row["conversations"], "conversations"), row.get("system")
    if isinstance(system, str) and system and read[0]["role"] != "system":
        return [{"role": "system", "content": system}, *read]
    return read


def tools_of(row: Mapping[str, Any]) -> list[Any]:
    """The tools that a row offers: column `tools`, a list of JSON schemas, or JSON of one. Raises DataError."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = {}
    if tools is None or tools == "":
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError("column 'tools' must be a list of JSON schemas, or JSON of one.")
    return _without_nulls(tools)


def parted(prompt: Any, answers: Sequence[Any]) -> tuple[Messages, list[Messages]]:
    """What is given, and the messages of each answer, where not all of them are text.

    prompt   text, messages, or empty: then it is what the answers begin with in common
    answers  each text or messages; messages may begin with the prompt. Text is an answer of the assistant's
    Raises DataError, without its place.
    """
    if isinstance(prompt, str) and not all(isinstance(answer, list) for answer in answers):
        raise DataError("prompt is text, but its answer is not. Give both as text or both as messages.")
    turns = [[{"role": "assistant", "content": a}] if isinstance(a, str) else a for a in answers]
    common = [each[0] for each in takewhile(_all_equal, zip(*turns, strict=False))]
    before = messages(prompt, "prompt") if prompt and not isinstance(prompt, str) else []
    cut = 0
    if before:
        cut = len(before) if common[: len(before)] == before else 0
    elif not prompt:
        cut = len(common) if len(turns) > 1 else 0
        before = common[:cut]
    else:
        asked = [place for place, message in enumerate(common) if _says(message, prompt)]
        if not asked:
            raise DataError(
                "prompt is text, but its answer is not, nor does it begin with the prompt. Give both as text or both "
                "as messages."
            )
        cut = len(common) if len(turns) > 1 else asked[0] + 1
        before = common[:cut]
    answered = [turn[cut:] for turn in turns]
    first = [turn[0] for turn in answered if turn]
    if len(first) > 1 and not _all_equal(first) and any(m["role"] in ("system", "user") for m in first):
        raise DataError(
            f"has different prompts: chosen continues with {_shown(first[0])}, rejected with {_shown(first[1])}. "
            "Give both the same conversation up to the answers."
        )
    return before, answered


def _message(value: Any, name: str) -> dict[str, Any]:
    """One message. Raises DataError where it is none."""
    if not isinstance(value, dict):
        raise _malformed(name)
    message = _without_nulls(value)
    if "from" in message and "role" not in message:
        speaker = message["from"]
        if speaker not in (*SPEAKERS, *SPEAKERS.values()):
            raise DataError(
                f"column {name!r} has a message from {shown(speaker)}, not one of {', '.join(SPEAKERS)}."
            )
        message = {"role": SPEAKERS.get(speaker, speaker), "content": message.get("value")}
    if message.get("tool_calls") and message.get("content") is None:
        message["content"] = ""
    if "role" not in message or message.get("content") is None:
        raise _malformed(name)
    return message | {"content": _text_of(message["content"], name)}


def _text_of(content: Any, name: str) -> Any:
    """The text of a message's parts, as chat services have them; other content as it is. Raises DataError for a part
    that is none."""
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and "type" in part for part in content
    ):
        return content
    other = next((part["type"] for part in content if not isinstance(part.get("text"), str)), None)
    if other is not None:
        raise DataError(
            f"column {name!r} has a message with a part of type {shown(other)}, and models read text alone. Choose "
            "rows of text."
        )
    return "".join(part["text"] for part in content)


def _malformed(name: str) -> DataError:
    return DataError(
        f"column {name!r} must be text or a list of messages with `role` and `content` (or `from` and `value`)."
    )


def _without_nulls(value: Any) -> Any:
    """A copy in which no object at any depth has a key that is null."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _all_equal(messages: Sequence[Any]) -> bool:
    return all(message == messages[0] for message in messages)


def _says(message: Mapping[str, Any], text: str) -> bool:
    return isinstance(message["content"], str) and message["content"].strip() == text.strip()


def _shown(message: Mapping[str, Any]) -> str:
    return f"{shown(message['content'])} ({message['role']})"
