"""The formats in which models call tools, read from a turn's text: a table, chosen by what a chat template writes.

A model writes calls as its template does. What looks like a call and is none is Malformed: a sentence for the model,
which says what to change. Reads what a model has written, so nothing in it may raise. Imports the standard library
only.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a tool. id: as the model has named it; "" where it has not"""

    name: str
    arguments: dict[str, Any]
    id: str = ""


class Malformed(NamedTuple):
    """What is no call of a tool, though it was meant as one.

    name  of the tool, as far as it can be read; else ""
    """

    reason: str
    name: str = ""
    id: str = ""


Read = Call | Malformed
Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> the JSON schema of its parameters."""

_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_TYPED = json.JSONDecoder(parse_constant=lambda name: _refuse(f"{name} is no JSON"))
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PAIR = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_SPACES = re.compile(r"[\s;,]*")
_THOUGHT = "</think>"
_MOST_REFERENCES = 16  # of schemas, one to the next
_DECISIVE = {"type", "enum", "const", "anyOf", "oneOf", "allOf"}  # what says whether a text is meant


@dataclass(frozen=True)
class Format:
    """A format of calls.

    marks     texts of a chat template by which it is recognised: all of one of these groups
    read      (the text of a turn, schemas) -> its calls, not yet compared with the schemas
    openings  a call begins with one of these
    are_all   a turn with calls has nothing before them
    """

    marks: Sequence[Sequence[str]]
    read: Callable[[str, Schemas], Iterator[Read]]
    openings: Sequence[str]
    are_all: bool = False


def format_of(template: str) -> str | None:
    """The name of the format in which a chat template writes calls; None where it is none that is known."""
    for name, known in FORMATS.items():
        if any(all(mark in template for mark in marks) for marks in known.marks):
            return name
    return None


def format_named(name: str) -> str:
    """The name, where it is a format's. Raises ValueError."""
    if name not in FORMATS:
        raise ValueError(f"tool_format={name!r} is none of {', '.join(FORMATS)}.")
    return name


def calls_of(text: str, name: str, schemas: Schemas) -> list[Read]:
    """The calls in a turn, in their order; none where it is an answer.

    text  with the special tokens that the model has drawn, but without the token that ended the turn
    name  of a format
    A call of a tool that there is not, or with arguments that the tool's schema does not take, is Malformed.
    """
    return [_checked(each, schemas) for each in FORMATS[name].read(text, schemas)]


def _refuse(reason: str) -> Any:
    raise ValueError(reason)


def _hermes(text: str, schemas: Schemas) -> Iterator[Read]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, after any thoughts."""
    for inner, is_closed in _between(text, "<tool_call>", "</tool_call>"):
        yield _of_json(inner) if is_closed else Malformed("</tool_call> is missing", _name_in(inner))


def _xml(text: str, schemas: Schemas) -> Iterator[Read]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    A value of a parameter that is no string is JSON.
    """
    for inner, is_closed in _between(text, "<tool_call>", "</tool_call>"):
        name = re.match(r"\s*<function=([^>\n]*)>", inner)
        if name is None:
            yield Malformed("<function=NAME> must follow <tool_call>")
            continue
        called, rest = name[1].strip(), inner[name.end() :]
        if not is_closed or "</function>" not in rest:
            missing = "</function>" if "</function>" not in rest else "</tool_call>"
            yield Malformed(f"{missing} is missing", called)
            continue
        body, _, after = rest.rpartition("</function>")
        yield (
            Malformed("text follows </function>", called)
            if after.strip()
            else _of_parameters(_PARAMETER, called, body, schemas)
        )


def _glm(text: str, schemas: Schemas) -> Iterator[Read]:
    """`<tool_call>NAME`, then `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` for each, then `</tool_call>`.

    Values are as in `_xml`.
    """
    for inner, is_closed in _between(text, "<tool_call>", "</tool_call>"):
        name = re.match(r"\s*([^<\s]+)", inner)
        if name is None:
            yield Malformed("the tool's name must follow <tool_call>")
        elif not is_closed:
            yield Malformed("</tool_call> is missing", name[1])
        else:
            yield _of_parameters(_PAIR, name[1], inner[name.end() :], schemas)


def _of_parameters(pattern: re.Pattern[str], called: str, body: str, schemas: Schemas) -> Read:
    arguments: dict[str, Any] = {}
    place = 0
    while written := pattern.match(body, place):  # a search would take quadratic time
        key, value = written[1].strip(), written[2]
        if key in arguments:
            return Malformed(f"the parameter {key!r} stands there twice", called)
        root = schemas.get(called, {})
        arguments[key] = _of_text(value, _referred(_properties(root).get(key, {}), root), root)
        place = written.end()
    if body[place:].strip():
        end = pattern.pattern.rpartition("<")[2]
        return Malformed(f"between the parameters stands other text, or <{end} is missing", called)
    return Call(called, arguments)


def _of_text(value: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """A value that is written as text. What is neither a string nor JSON stays a text, which its schema refuses."""
    if schema.keys() & _DECISIVE and not _fault(value, schema, root):
        return value
    try:
        return _TYPED.decode({"True": "true", "False": "false", "None": "null"}.get(value.strip(), value))
    except (ValueError, RecursionError):
        return value


def _llama(text: str, schemas: Schemas) -> Iterator[Read]:
    """`{"name": ..., "parameters": {...}}` as the whole turn, maybe behind <|python_tag|>, or what Llama 4 writes for
    it; several with ; between, or nothing."""
    text = text.strip()
    body = text.removeprefix("<|python_tag|>").removeprefix("<|python_start|><|python_end|>")
    if body is text and re.match(r'\{\s*"name"', text) is None:
        return
    yield from _one_after_another(body.strip())


def _one_after_another(text: str) -> Iterator[Read]:
    place = 0
    while place < len(text) or not text:
        try:
            value, place = _TYPED.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            yield Malformed(_no_json(error), _name_in(text[place:]))
            return
        yield _of_value(value)
        place = _SPACES.match(text, place).end()  # type: ignore[union-attr]  # it matches an empty text too


def _mistral(text: str, schemas: Schemas) -> Iterator[Read]:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}]`, or `[TOOL_CALLS]NAME[ARGS]{...}` for each."""
    for part in text.split("[TOOL_CALLS]")[1:]:
        inner = part.strip()
        if inner.startswith("["):
            try:
                listed = _TYPED.decode(inner)
            except (ValueError, RecursionError) as error:
                yield Malformed(_no_json(error), _name_in(inner))
                continue
            yield from map(_of_value, listed or [None])
            continue
        named = re.match(r"([^\s\[{]+)(?:\[CALL_ID\]([^\s\[]*))?\s*(?:\[ARGS\]|(?=\{))", inner)
        if named is None:
            yield Malformed("after [TOOL_CALLS] must stand a JSON list of calls, or NAME[ARGS]{...}")
            continue
        yield _of_arguments(named[1], inner[named.end() :], named[2] or "")


def _harmony(text: str, schemas: Schemas) -> Iterator[Read]:
    """Messages of channels, of which one `to=functions.NAME` is a call: `<|message|>{...}`."""
    for message in text.split("<|start|>"):
        header, opened, body = message.partition("<|message|>")
        to = re.search(r"\bto=(\S+?)(?=[\s<]|$)", header)
        if to is None or to[1] == "assistant":
            continue
        name = to[1].removeprefix("functions.")
        if name == to[1]:
            yield Malformed(f"a call is to=functions.NAME, not to={to[1]}", name)
        elif not opened:
            yield Malformed("<|message|> with the arguments is missing", name)
        else:
            yield _of_arguments(name, re.split(r"<\|(?:call|end|return)\|>", body)[0])


FORMATS: Mapping[str, Format] = {
    "xml": Format([["<tool_call>", "<function="]], _xml, ["<tool_call>"]),
    "glm": Format([["<tool_call>", "<arg_key>"]], _glm, ["<tool_call>"]),
    "hermes": Format([["<tool_call>"]], _hermes, ["<tool_call>"]),
    "mistral": Format([["[TOOL_CALLS]"]], _mistral, ["[TOOL_CALLS]"]),
    "harmony": Format([["<|channel|>commentary", "functions."]], _harmony, ["<|", "to="]),
    "llama": Format(
        [["<|python_tag|>"], ["ipython", '"parameters": ']],
        _llama,
        ["{", "<|python_tag|>", "<|python_start|>"],
        are_all=True,
    ),
}
"""Name -> format: of Qwen3-Coder and 3.5, GLM 4.5, Hermes and Qwen 2.5 and 3, Mistral, GPT-OSS, Llama 3 and 4."""


def _between(text: str, opening: str, closing: str) -> list[tuple[str, bool]]:
    """The texts that an opening begins, after any thoughts, and whether each is closed.

    Thoughts may have calls in them, and a closed call may have what ends thoughts as a part of an argument.
    """
    calls: list[tuple[str, bool]] = []
    for part in text.split(opening)[1:]:
        inner, closed, after = part.partition(closing)
        calls.append((inner, bool(closed)))
        if _THOUGHT in (after if closed else inner):
            calls.clear()
    return calls


def _of_json(text: str) -> Read:
    try:
        return _of_value(_TYPED.decode(text.strip()))
    except (ValueError, RecursionError) as error:
        return Malformed(_no_json(error), _name_in(text))


def _of_value(value: Any) -> Read:
    """The call that a JSON value is."""
    if not isinstance(value, dict):
        return Malformed("a call is a JSON object with name and arguments")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name:
        return Malformed("the call has no name")
    named = value.get("id")
    number = named if isinstance(named, str) else ""
    if isinstance(arguments, str):  # as OpenAI's interface has them
        return _of_arguments(name, arguments, number)
    if not isinstance(arguments, dict):
        return Malformed("the arguments are no JSON object", name, number)
    return Call(name, arguments, number)


def _of_arguments(name: str, text: str, number: str = "") -> Read:
    """A call whose arguments are JSON."""
    try:
        arguments = _TYPED.decode(text.strip())
    except (ValueError, RecursionError) as error:
        return Malformed(_no_json(error), name, number)
    if not isinstance(arguments, dict):
        return Malformed("the arguments are no JSON object", name, number)
    return Call(name, arguments, number)


def _no_json(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is no valid JSON: {error.msg} at character {error.pos}"
    return "it is no valid JSON"


def _name_in(text: str) -> str:
    named = re.search(r'"name"\s*:\s*"([^"\\\n]{1,64})"', text)
    return named[1] if named else ""


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return schema.get("properties") or {}


def _checked(read: Read, schemas: Schemas) -> Read:
    """A call, or why a tool does not take it."""
    if isinstance(read, Malformed):
        return read
    if read.name not in schemas:
        return Malformed(
            f"there is no tool {read.name[:64]!r}; there are {', '.join(schemas)}", read.name, read.id
        )
    schema = schemas[read.name]
    try:
        reason = _fault(
            read.arguments, {"additionalProperties": "properties" not in schema, **schema}, schema
        )
    except RecursionError:
        reason = "the arguments are nested too deeply"
    return Malformed(reason, read.name, read.id) if reason else read


def _fault(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], place: str = "") -> str:
    """Why a JSON value is not of a schema; "" where it is. Types, properties, items, alternatives and references are
    looked at; bounds and patterns are the tool's to check.

    root   schema of all arguments, in which `$ref` is looked up
    place  of the value in the arguments, for sentences
    """
    schema = _referred(schema, root)
    if value is None and schema.get("nullable"):
        return ""
    stated = schema.get("type")
    kinds = [stated] if isinstance(stated, str) else stated or []
    alternatives = schema.get("anyOf") or schema.get("oneOf") or []
    if (
        (kinds and not any(_is_of(value, kind) for kind in kinds))
        or ("enum" in schema and value not in schema["enum"])
        or ("const" in schema and value != schema["const"])
        or (alternatives and all(_fault(value, each, root) for each in alternatives))
    ):
        return f"the argument {place!r} must be of {json.dumps(_stated(schema))}"
    parts = [(value, each, place) for each in schema.get("allOf") or ()]
    if isinstance(value, dict):
        properties, more = _properties(schema), schema.get("additionalProperties", True)
        before = f"{place}." if place else ""
        for key in schema.get("required") or ():
            if key not in value:
                return f"the argument {before + key!r} is missing"
        for key, inner in value.items():
            if key not in properties and not more:
                return (
                    f"there is no argument {before + key[:64]!r}; there are {', '.join(properties) or 'none'}"
                )
            parts.append(
                (inner, properties.get(key, more if isinstance(more, dict) else {}), before + key[:64])
            )
    if isinstance(value, list):
        parts += [(each, schema.get("items") or {}, f"{place}[{n}]") for n, each in enumerate(value)]
    return next(filter(None, (_fault(inner, of, root, at) for inner, of, at in parts)), "")


def is_schema(parameters: Mapping[str, Any]) -> bool:
    """Whether what is read of a tool's schema, and of those within it, has the types that it must have."""
    waiting: list[Any] = [parameters]
    seen = set[int]()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict) or id(each) in seen:  # what is no object takes anything
            continue
        seen.add(id(each))
        stated, properties = each.get("type"), _properties(each)
        kinds = [stated] if isinstance(stated, str) else stated or []
        required, enum, *within = (
            each.get(key) or [] for key in ("required", "enum", "anyOf", "oneOf", "allOf")
        )
        if not isinstance(properties, dict) or not all(
            isinstance(listed, list) for listed in (kinds, required, enum, *within)
        ):
            return False
        if not all(isinstance(name, str) for name in (*kinds, *required)):
            return False
        waiting += [_referred(each, parameters), each.get("items"), each.get("additionalProperties")]
        waiting += [*properties.values(), *(inner for listed in within for inner in listed)]
    return True


def _referred(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or that to which it refers within `root`; {}, which takes anything, where it refers elsewhere."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping):  # True takes anything, too
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root if reference.startswith("#") else {}
        for name in reference.split("/")[1:]:
            schema = schema.get(name, {}) if isinstance(schema, Mapping) else {}
    return {}


def _stated(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in schema.items() if key not in ("description", "title", "default")}


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS.get(kind, (object,)))
