"""OpenAI's completions API as an agent sees it: requests that are read, answers that are written. Pure functions.

What a run cannot do as it was asked is refused with a sentence, in the form of OpenAI's errors: nothing is ignored
that would change what is drawn. Imports the standard library only.
"""

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

from prefect_rlhf.rlhf_tasks.system.reading import shown
from prefect_rlhf.rlhf_tasks.user_code.tools.formats import Call, calls_of, is_schema

MODEL = "policy"
RAW = "raw"  # the key of the text of a turn of calls in its message; templates do not get it
BEAT_S = 1.0
"""At most, between two messages of the process of agents to its rank."""
MOST_STOPS, MOST_STOP_BYTES = 32, 256  # of a request: the table that finds them has a row for each byte
_ONLY: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields that change what is drawn -> the values that change nothing."""
_READ = {
    "messages",
    "prompt",
    "tools",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "logprobs",
    "stream",
}
_READ |= {"stream_options", "temperature", "top_p", "return_token_ids"}
_IGNORED = {"model", "user", "metadata", "store", "seed", "service_tier", "prediction", "safety_identifier"}
_KNOWN = {*_READ, *_IGNORED, *_ONLY, "prompt_cache_key"}
"""Any other field may change what is drawn. The seed is the run's."""


class Refused(Exception):
    """A request that is not answered.

    status  of HTTP
    code    as OpenAI's clients know it
    """

    def __init__(self, status: int, sentence: str, code: str = "invalid_value") -> None:
        super().__init__(sentence)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        return {
            "error": {"message": str(self), "type": "invalid_request_error", "code": self.code, "param": None}
        }


class Asked(NamedTuple):
    """A request of an agent.

    number    of it, among all of its process
    sample    the episode's
    messages  of a conversation, as a chat template takes them; None where `text` is to be continued
    tools     that the conversation offers, as JSON schemas
    n         answers
    most      tokens of an answer; None: as many as there is room for
    stop      further strings that end an answer
    stream    whether it is told while it is drawn
    ids       of the tokens that are to be continued, in place of a text
    wants_ids whether the answer has the ids of its tokens, and of those before it
    """

    number: int
    sample: int
    messages: list[dict[str, Any]] | None
    text: str
    tools: list[dict[str, Any]]
    n: int
    most: int | None
    stop: list[str]
    stream: bool = False
    ids: Sequence[int] = ()
    wants_ids: bool = False


class Choice(NamedTuple):
    """One answer to a request.

    text      what was drawn, without special tokens and without the stop string that ended it
    raw       with special tokens, but without the one that ended it
    finish    stop or length
    tokens    texts of all drawn tokens
    logprobs  their log-probabilities
    ids       of the tokens
    """

    text: str
    raw: str
    finish: str
    tokens: list[str]
    logprobs: list[float]
    ids: Sequence[int] = ()


class Drawing(NamedTuple):
    """How a run draws: what a request may name, but not change."""

    temperature: float
    top_p: float


class Limits(NamedTuple):
    """What agents may take.

    at_once       agents that run at the same time
    timeout_s     seconds of an episode
    max_requests  answers that an agent may ask for
    most_bytes    of memory, of an agent with all that it starts
    """

    at_once: int
    timeout_s: float
    max_requests: int
    most_bytes: int


def read_request(document: Any, is_chat: bool, drawing: Drawing, raws: Mapping[str, str]) -> dict[str, Any]:
    """The fields of `Asked` that a request's JSON states.

    raws  id of a call of a tool -> the text of the turn in which the policy has made it. That message has it under
          RAW, beside the calls: by it a chain is continued as it was drawn, not as a template would write the calls
    Raises Refused.
    """
    if not isinstance(document, dict):
        raise Refused(400, "the request is no JSON object")
    _refuse_unwritable(document)
    _refuse_other_drawing(document, drawing)
    n = _whole(document, "n", 1, 128) or 1
    most = _whole(document, "max_completion_tokens", 1) or _whole(document, "max_tokens", 1)
    stream = bool(document.get("stream"))
    fields = {"n": n, "most": most, "stop": _stop(document.get("stop")), "tools": [], "stream": stream}
    options = document.get("stream_options")
    if not isinstance(options, dict | None):
        raise Refused(400, f"stream_options={shown(options)}: give an object")
    if document.get("return_token_ids"):
        if document.get("stream"):
            raise Refused(400, "return_token_ids: a stream has no ids of tokens. Leave out one of the two")
        fields["wants_ids"] = True
    if not is_chat:
        text = document.get("prompt")
        if isinstance(text, list) and text and all(type(each) is int and each >= 0 for each in text):
            return fields | {"messages": None, "text": "", "ids": text}
        if not isinstance(text, str) or not text:
            raise Refused(400, f"prompt={shown(text)}: give one text that is not empty, or ids of tokens")
        return fields | {"messages": None, "text": text}
    tools = document.get("tools") or []
    if not isinstance(tools, list) or not all(_is_tool(each) and _has_schema(each) for each in tools):
        raise Refused(
            400,
            "tools: each is {type: function, function: {name, parameters}}, parameters being a JSON schema",
        )
    if offers_tools(document):
        fields["tools"] = tools
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, f"messages={shown(messages)}: give a list of messages")
    return fields | {"messages": [_message(each, raws) for each in messages], "text": ""}


def _refuse_unwritable(document: Mapping[str, Any]) -> None:
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused(
            400, "the request has half a character: a surrogate, \\ud800 to \\udfff, without its other half"
        ) from None
    except RecursionError:
        raise Refused(400, "the request is nested too deeply") from None


def _refuse_other_drawing(document: Mapping[str, Any], drawing: Drawing) -> None:
    for name, value in drawing._asdict().items():
        stated = document.get(name)
        if stated is not None and stated != value:
            raise Refused(
                400,
                f"{name}={shown(stated)}: this run draws with {name}={value:g}, so that it can learn from it",
            )
    for name, stated in document.items():
        if stated is not None and (name not in _KNOWN or stated not in _ONLY.get(name, (stated,))):
            raise Refused(400, f"{name[:64]}={shown(stated)} is not supported here")


def _whole(document: Mapping[str, Any], name: str, least: int, most: int = 2**31) -> int | None:
    value = document.get(name)
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise Refused(400, f"{name}={shown(value)}: give a whole number from {least} to {most}")
    return value


def _stop(stated: Any) -> list[str]:
    strings = [] if stated is None else [stated] if isinstance(stated, str) else stated
    if not isinstance(strings, list) or not all(isinstance(each, str) and each for each in strings):
        raise Refused(400, f"stop={shown(stated)}: give strings that are not empty")
    if len(strings) > MOST_STOPS or sum(len(each.encode()) for each in strings) > MOST_STOP_BYTES:
        raise Refused(400, f"stop: give at most {MOST_STOPS} strings of {MOST_STOP_BYTES} bytes together")
    return sorted(set(strings))


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _has_schema(tool: Mapping[str, Any]) -> bool:
    parameters = tool["function"].get("parameters")
    return parameters is None or (isinstance(parameters, dict) and is_schema(parameters))


def _message(message: Any, raws: Mapping[str, str]) -> dict[str, Any]:
    """A message as chat templates take it: its content as text, the arguments of calls as objects."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise Refused(400, f"{shown(message)} is no message: it has no role")
    made: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content")),
    }
    made |= {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(_is_tool(each) for each in calls):
        raise Refused(400, "tool_calls: each is {id, type: function, function: {name, arguments}}")
    if not calls:
        return made
    made["tool_calls"] = [_with_object(each) for each in calls]
    raw = raws.get(str(calls[0].get("id")))
    return made if raw is None else made | {RAW: raw}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    with suppress(TypeError, ValueError, RecursionError):  # a template may write it as it stands
        function["arguments"] = json.loads(function.get("arguments") or "{}")
    return {**call, "function": function}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refused(400, f"content {shown(part)}: only text is read here")
    return "".join(part["text"] for part in parts)


def answer(
    request: Mapping[str, Any],
    is_chat: bool,
    choices: Sequence[Choice],
    prompt_tokens: int,
    number: int,
    tool_format: str | None,
    prompt_ids: Sequence[int] = (),
) -> tuple[dict[str, Any], dict[str, str]]:
    """(the answer to a request as JSON, id of each call of a tool in it -> the raw text of its turn). The ids of
    tokens have vLLM's names."""
    raws: dict[str, str] = {}
    made = []
    for index, choice in enumerate(choices):
        of_both: dict[str, Any] = {"index": index, "finish_reason": choice.finish}
        of_both["logprobs"] = logprobs_of(request, is_chat, choice.tokens, choice.logprobs)
        if request.get("return_token_ids"):
            of_both |= {"token_ids": choice.ids, "prompt_token_ids": prompt_ids}
        if not is_chat:
            made.append({**of_both, "text": choice.text})
            continue
        message: dict[str, Any] = {"role": "assistant", "content": choice.text}
        calls = _calls(request, choice, tool_format)
        if calls:
            message |= {"content": None, "tool_calls": calls}
            of_both["finish_reason"] = "tool_calls"
            raws |= {call["id"]: choice.raw for call in calls}
        made.append({**of_both, "message": message})
    drawn = sum(len(choice.tokens) for choice in choices)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": drawn,
        "total_tokens": prompt_tokens + drawn,
    }
    return {**head_of(is_chat, number), "choices": made, "usage": usage}, raws


def head_of(is_chat: bool, number: int) -> dict[str, Any]:
    """What the answer to a request begins with. number: of the request"""
    kind = "chat.completion" if is_chat else "text_completion"
    return {"id": f"{kind}-{number}", "object": kind, "created": 0, "model": MODEL}


def _calls(request: Mapping[str, Any], choice: Choice, tool_format: str | None) -> list[dict[str, Any]]:
    """The calls of tools in an answer; none where a part of it looks like a call and is none: the agent reads it."""
    if not offers_tools(request) or tool_format is None:
        return []
    offered = [each["function"] for each in request["tools"]]
    schemas = {each["name"]: each.get("parameters") or {} for each in offered}
    read = calls_of(choice.raw, tool_format, schemas)
    calls = [each for each in read if isinstance(each, Call)]
    return [
        {
            "id": secrets.token_hex(5)[:9],  # nine letters and digits: Mistral's template takes no other
            "type": "function",
            "function": {"name": each.name, "arguments": json.dumps(each.arguments, ensure_ascii=False)},
        }
        for each in (calls if len(calls) == len(read) else [])
    ]


def offers_tools(request: Mapping[str, Any]) -> bool:
    """Whether an answer may call tools."""
    return bool(request.get("tools")) and request.get("tool_choice") != "none"


def logprobs_of(
    request: Mapping[str, Any],
    is_chat: bool,
    tokens: Sequence[str],
    logprobs: Sequence[float],
    offset: int = 0,
) -> dict[str, Any] | None:
    """The log-probabilities of tokens as an answer has them; None where they are not asked for.

    tokens  texts; offset: characters of those before
    """
    if not is_chat:
        ends = accumulate(map(len, tokens), initial=offset)
        flat = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None}
        flat["text_offset"] = [end for end, _ in zip(ends, tokens, strict=False)]
        return None if request.get("logprobs") is None else flat
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None} if request.get("logprobs") else None


def reward_of(document: Any) -> float:
    """The reward in `{"reward": NUMBER}`. Raises Refused where it has none that is finite."""
    value = document.get("reward") if isinstance(document, dict) else None
    reward = math.nan
    if not isinstance(value, bool) and isinstance(value, int | float):
        with suppress(OverflowError):
            reward = float(value)
    if not math.isfinite(reward):
        raise Refused(400, f"the reward {shown(value)} is no finite number")
    return reward
