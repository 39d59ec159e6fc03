"""An answer as server-sent events of OpenAI's API, while it is drawn. Pure functions and their state.

Only what nothing later can change is sent. The pieces of a stream add up to the answer that the same request has
without `stream`; where it calls tools, the text before the calls is sent too. Imports the standard library only.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from prefect_rlhf.rlhf_tasks.user_code.agents.chat_api import Choice, head_of, logprobs_of, offers_tools
from prefect_rlhf.rlhf_tasks.user_code.tools.formats import FORMATS


class Piece(NamedTuple):
    """What was drawn of an answer since its last piece.

    choice    the answer's number among those to its request
    text      without special tokens, as far as it is settled
    raw       the same with special tokens; "" where no tools are offered
    tokens    texts of all tokens that were drawn since
    logprobs  their log-probabilities
    """

    choice: int
    text: str
    raw: str
    tokens: list[str]
    logprobs: list[float]


def begun(text: str, strings: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of one of some strings."""
    return max(
        (n for string in strings for n in range(1, len(string)) if text.endswith(string[:n])), default=0
    )


def before_calls(text: str, tool_format: str) -> str:
    """The part of a turn, or of its beginning, that is before anything which may be a call of a tool, by the name of
    the format of calls."""
    known = FORMATS[tool_format]
    if known.are_all:
        start = text.lstrip()
        may_be = (start.startswith(each) or each.startswith(start) for each in known.openings)
        return "" if any(may_be) else text
    for opening in known.openings:
        text = text.partition(opening)[0]
    return text[: len(text) - begun(text, known.openings)]


@dataclass
class _Sent:
    """What is known of an answer, and how much of it was sent.

    text, raw  so far
    shown      characters that were sent
    tokens     whose log-probabilities were sent; offset: characters of these
    """

    text: str = ""
    raw: str = ""
    shown: int | None = None
    tokens: int = 0
    offset: int = 0


class Stream:
    """The events of the answer to one request.

    request      as JSON
    number       of it
    tool_format  of the model's calls of tools; None: it has none that is known
    """

    def __init__(
        self, request: Mapping[str, Any], is_chat: bool, number: int, tool_format: str | None
    ) -> None:
        self._request, self._is_chat = request, is_chat
        self._tool_format = tool_format if offers_tools(request) else None
        self._head = head_of(is_chat, number)
        if is_chat:
            self._head["object"] += ".chunk"
        self._sent: dict[int, _Sent] = {}

    def of(self, piece: Piece) -> Iterator[str]:
        """The events of a piece: none where nothing in it may be sent yet."""
        sent = self._sent.setdefault(piece.choice, _Sent())
        sent.text += piece.text
        sent.raw += piece.raw
        yield from self._shown(piece.choice, self._free(sent.text, sent.raw), piece.tokens, piece.logprobs)

    def end(self, choices: Sequence[Choice], whole: Mapping[str, Any]) -> Iterator[str]:
        """The events of the rest. whole: the answer as it is without `stream`, which has these choices"""
        for choice, made in zip(choices, whole["choices"], strict=True):
            index, sent = made["index"], self._sent.setdefault(made["index"], _Sent())
            calls = made["message"].get("tool_calls", []) if self._is_chat else []
            text = self._free(choice.text, choice.raw) if calls else choice.text
            yield from self._shown(
                index, text, choice.tokens[sent.tokens :], choice.logprobs[sent.tokens :], calls
            )
            yield self._event(index, made["finish_reason"], {"delta": {}} if self._is_chat else {"text": ""})
        if (self._request.get("stream_options") or {}).get("include_usage"):
            yield _written({**self._head, "choices": [], "usage": whole["usage"]})
        yield "data: [DONE]\n\n"

    def _free(self, text: str, raw: str) -> str:
        """The text that is no part of a call, whatever follows."""
        if self._tool_format is None:
            return text
        free = before_calls(raw, self._tool_format)
        same = takewhile(lambda both: both[0] == both[1], zip(text, free, strict=False))
        return "".join(character for character, _ in same)

    def _shown(
        self,
        index: int,
        text: str,
        tokens: Sequence[str],
        logprobs: Sequence[float],
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> Iterator[str]:
        """The event in which an answer has a text, and further tokens, if anything of this is new."""
        sent = self._sent[index]
        new = text[sent.shown or 0 :]
        listed = logprobs_of(self._request, self._is_chat, tokens, logprobs, sent.offset)
        opens = self._is_chat and sent.shown is None
        if not (new or calls or opens or (listed and tokens)):
            return
        said: dict[str, Any] = {"text": new}
        if self._is_chat:
            delta: dict[str, Any] = {"role": "assistant"} if opens else {}
            if new or not calls:
                delta["content"] = new
            if calls:
                delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
            said = {"delta": delta}
        sent.shown = (sent.shown or 0) + len(new)
        sent.tokens += len(tokens)
        sent.offset += sum(map(len, tokens))
        yield self._event(index, None, said, listed if tokens else None)

    def _event(self, index: int, reason: str | None, said: Mapping[str, Any], logprobs: Any = None) -> str:
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        return _written({**self._head, "choices": [choice]})


def _written(document: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"
