"""Conversations as rows have them, as the messages that chat templates read. Torch-free and fast to import.

The same row gives the same messages from every kind of file: where messages, tool calls or tools differ in their
keys, Arrow files hold null for those that are missing, so a null key counts as missing everywhere.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from rlhf_tasks.system.reading import DataError, shown

Messages = list[dict[str, Any]]
SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
"""ShareGPT's `from` -> role."""
GIVEN_ROLES = ("system", "user", "tool")
"""Whose messages are given, never learned."""


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
            f"has different prompts: chosen goes on with {_shown(first[0])}, rejected with {_shown(first[1])}. Give "
            "both the same conversation up to the answers."
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
    return message


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
