"""Calls of tools are read as each template writes them; what is none says what to change."""

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.rlhf_tasks.data.chat_template import _environment
from prefect_rlhf.rlhf_tasks.user_code.tools.formats import FORMATS, Call, Malformed, calls_of, format_of
from tests.rlhf_tasks.user_code.tools.templates import TEMPLATES

SCHEMAS: dict[str, Any] = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "One."},
            "b": {"type": "number"},
            "of": {"type": "array", "items": {"type": "integer"}},
            "exact": {"type": "boolean", "nullable": True},
        },
        "required": ["a"],
    },
    "say": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "how": {"type": "string", "enum": ["loud", "low"]}},
        "required": ["text"],
    },
    "any": {"type": "object", "properties": {"value": {}}},
    "walk": {
        "type": "object",
        "$defs": {
            "Point": {
                "type": "object",
                "title": "Point",
                "properties": {
                    "x": {"type": "integer"},
                    "label": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                    "kind": {"$ref": "#/$defs/Kind"},
                    "next": {"$ref": "#/$defs/Point"},
                },
                "required": ["x"],
                "additionalProperties": False,
            },
            "Kind": {"enum": ["12", "hill"], "type": "string"},
        },
        "properties": {
            "points": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
            "kind": {"$ref": "#/$defs/Kind"},
            "sizes": {"type": "object", "additionalProperties": {"type": "number"}},
        },
        "required": ["points"],
    },
}
ENVIRONMENT = _environment()
RENDERED = {name: ENVIRONMENT.from_string(text) for name, text in TEMPLATES.items()}


def written(name, calls):
    """The turn that a format's template writes for some calls, without what ends it."""
    listed = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    told = [{"role": "assistant", "content": "", "tool_calls": listed}]
    text = RENDERED[name].render(messages=told, add_generation_prompt=False)
    return text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")


def without_ids(calls):
    return [each._replace(id="") for each in calls]


CALLS = [
    Call("add", {"a": 2, "b": 0.5, "of": [1, 2], "exact": None}, "abcdefghi"),
    Call("say", {"text": "\n  as it stands \n"}, "abcdefghk"),
    Call("say", {"text": 'He said "no" \\ {x}\n\nand left é 😀', "how": "low"}, "abcdefghj"),
]


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_names_its_format_and_its_own_calls_are_read_back(name):
    assert format_of(TEMPLATES[name]) == name
    read = calls_of(written(name, CALLS), name, SCHEMAS)
    assert without_ids(read) == without_ids(CALLS)
    if name == "mistral":
        assert read == CALLS


def test_a_template_without_calls_is_of_no_format():
    assert format_of("{% for m in messages %}{{ m.content }}{% endfor %}") is None


# What stands for a mark of a format in an argument ends the call there, as it does for whoever wrote the template.
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20).filter(
    lambda text: "<" not in text and "[" not in text
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(-1e9, 1e9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.fixed_dictionaries({"a": st.integers()}, optional={"b": st.floats(-9, 9)})
ANYTHING = st.fixed_dictionaries({"value": VALUES.filter(lambda value: type(value) is not str)})
KINDS = st.sampled_from(["12", "hill"])
POINTS = st.recursive(
    st.fixed_dictionaries({"x": st.integers()}, optional={"label": st.none() | TEXTS, "kind": KINDS}),
    lambda inner: st.fixed_dictionaries({"x": st.integers(), "next": inner}),
    max_leaves=4,
)
WALKS = st.fixed_dictionaries(
    {"points": st.lists(POINTS, max_size=3)},
    optional={"kind": KINDS, "sizes": st.dictionaries(TEXTS, st.floats(-9, 9), max_size=2)},
)
GOOD = st.one_of(
    NUMBERS.map(lambda arguments: Call("add", arguments)),
    WALKS.map(lambda arguments: Call("walk", arguments)),
    TEXTS.map(lambda text: Call("say", {"text": text})),
    ANYTHING.map(lambda arguments: Call("any", arguments)),
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(calls=st.lists(GOOD, min_size=1, max_size=3))
def test_calls_are_read_back_whatever_their_arguments(name, calls):
    assert without_ids(calls_of(written(name, calls), name, SCHEMAS)) == calls


MARKS = (
    "<tool_call> </tool_call> <function=say> <parameter=text> </parameter> </function> { } [ ] ; \\ NaN </think> "
    "[TOOL_CALLS] [ARGS] <|python_tag|> <|start|>assistant to=functions.say <|channel|> <|message|>"
)
PIECES = st.sampled_from(
    [*MARKS.split(), '{"name": "say"', ', "arguments": ', '{"text": "x"}', "\ud800", " "]
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=80, deadline=None)
@given(pieces=st.lists(PIECES | st.text(max_size=3), max_size=14))
def test_no_text_makes_the_reader_fail(name, pieces):
    for read in calls_of("".join(pieces), name, SCHEMAS):
        assert isinstance(read, Malformed) or read.name in SCHEMAS


def enclosed(name, body, tool="say"):
    """A turn with one call of a tool, whose arguments are the text `body`."""
    return {
        "hermes": f'<tool_call>\n{{"name": "{tool}", "arguments": {body}}}\n</tool_call>',
        "xml": f"<tool_call>\n<function={tool}>{body}\n</function>\n</tool_call>",
        "glm": f"<tool_call>{tool}{body}\n</tool_call>",
        "llama": f'{{"name": "{tool}", "parameters": {body}}}',
        "mistral": f"[TOOL_CALLS]{tool}[ARGS]{body}",
        "harmony": f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{body}",
    }[name]


PARAMETER = {
    "xml": "\n<parameter={}>\n{}\n</parameter>",
    "glm": "\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>",
}


def of_arguments(name, **arguments):
    """Arguments as a format writes them."""
    if name in PARAMETER:
        return "".join(PARAMETER[name].format(*each) for each in arguments.items())
    written = (f'"{key}": {value if key == "a" else _quoted(value)}' for key, value in arguments.items())
    return f"{{{', '.join(written)}}}"


def _quoted(value):
    return f'"{value}"'


@pytest.mark.parametrize("name", FORMATS)
def test_malformed_calls_say_what_to_change(name):
    def reason(body, tool="say"):
        (read,) = calls_of(enclosed(name, body, tool), name, SCHEMAS)
        assert isinstance(read, Malformed)
        assert read.name == tool
        return read.reason

    broken = PARAMETER[name].format("text", "x").rpartition("<")[0] if name in PARAMETER else '{"text": '
    missing = {"xml": "or </parameter> is missing", "glm": "or </arg_value> is missing"}
    assert missing.get(name, "no valid JSON") in reason(broken)
    assert reason(of_arguments(name, text="x"), "shout") == (
        "there is no tool 'shout'; there are add, say, any, walk"
    )
    assert reason(of_arguments(name, how="low")) == "the argument 'text' is missing"
    assert reason(of_arguments(name, text="x", tone="y")) == (
        "there is no argument 'tone'; there are text, how"
    )
    assert reason(of_arguments(name, text="x", how="mid")) == (
        'the argument \'how\' must be of {"type": "string", "enum": ["loud", "low"]}'
    )
    assert reason(of_arguments(name, a="1.5"), "add") == ('the argument \'a\' must be of {"type": "integer"}')
    assert reason(of_arguments(name, a="true"), "add") == reason(of_arguments(name, a="1.5"), "add")
    if name not in PARAMETER:
        assert reason("[1]") == "the arguments are no JSON object"


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("hermes", '<tool_call>{"name": "say", "arguments": {"text": "x"}}', "</tool_call> is missing"),
        ("hermes", '<tool_call>{"arguments": {"text": "x"}}</tool_call>', "the call has no name"),
        ("hermes", "<tool_call>[]</tool_call>", "a call is a JSON object with name and arguments"),
        ("hermes", "<tool_call></tool_call>", "it is no valid JSON: Expecting value at character 0"),
        ("hermes", f"<tool_call>{'[' * 99999}</tool_call>", "it is no valid JSON"),
        ("xml", "<tool_call>say</tool_call>", "<function=NAME> must follow <tool_call>"),
        ("xml", "<tool_call><function=say></function>", "</tool_call> is missing"),
        ("xml", "<tool_call><function=say></tool_call>", "</function> is missing"),
        (
            "xml",
            "<tool_call><function=say>" + 2 * "<parameter=text>x</parameter>" + "</function></tool_call>",
            "the parameter 'text' stands there twice",
        ),
        ("glm", "<tool_call></tool_call>", "the tool's name must follow <tool_call>"),
        ("glm", "<tool_call>say", "</tool_call> is missing"),
        ("llama", "<|python_tag|>print(1)", "it is no valid JSON: Expecting value at character 0"),
        (
            "mistral",
            "[TOOL_CALLS] say it",
            "after [TOOL_CALLS] must stand a JSON list of calls, or NAME[ARGS]{...}",
        ),
        ("mistral", "[TOOL_CALLS] []", "a call is a JSON object with name and arguments"),
        ("harmony", " to=functions.say<|channel|>commentary", "<|message|> with the arguments is missing"),
        ("harmony", " to=python<|message|>{}", "a call is to=functions.NAME, not to=python"),
    ],
)
def test_so_do_those_of_one_format(name, text, reason):
    (read,) = calls_of(text, name, SCHEMAS)
    assert isinstance(read, Malformed)
    assert read.reason == reason


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "The sum is 4."),
        ("hermes", "<think>I could <tool_call>{}</tool_call></think>It is 4."),
        ("llama", '{"answer": 4}'),
        ("llama", 'It is {"name": "say"}'),
        ("mistral", "[4]"),
        (
            "harmony",
            "<|channel|>analysis<|message|>2 + 2<|end|><|start|>assistant<|channel|>final<|message|>4",
        ),
    ],
)
def test_an_answer_has_no_calls(name, text):
    assert calls_of(text, name, SCHEMAS) == []


@pytest.mark.parametrize("name", ["hermes", "xml", "glm"])
def test_what_ends_thoughts_may_stand_in_an_argument(name):
    say = Call("say", {"text": "</think>"})
    assert calls_of(written(name, [say, CALLS[1]]), name, SCHEMAS) == without_ids([say, CALLS[1]])
    turn = f"I could {written(name, [say])}</think>" + written(name, [say])
    assert calls_of(turn, name, SCHEMAS) == [say]


def test_parameters_that_are_not_closed_are_read_in_linear_time():
    text = f"<tool_call><function=say>{10_000 * '<parameter=text>'}</function></tool_call>"
    since_s = time.process_time()
    (read,) = calls_of(text, "xml", SCHEMAS)
    assert time.process_time() - since_s < 1
    assert isinstance(read, Malformed)


def test_arguments_as_openais_interface_has_them_are_read():
    text = '<tool_call>{"name": "say", "arguments": "{\\"text\\": \\"x\\"}"}</tool_call>'
    assert calls_of(text, "hermes", SCHEMAS) == [Call("say", {"text": "x"})]


def test_mistral_names_a_call_between_its_name_and_its_arguments():
    text = '[TOOL_CALLS]say[CALL_ID]abcdefghi[ARGS]{"text": "x"}[TOOL_CALLS]say{"text": "y"}'
    assert calls_of(text, "mistral", SCHEMAS) == [
        Call("say", {"text": "x"}, "abcdefghi"),
        Call("say", {"text": "y"}),
    ]


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([{"x": 1}, {"x": "2"}], 'the argument \'points[1].x\' must be of {"type": "integer"}'),
        ([{"x": 1, "next": {"label": "a"}}], "the argument 'points[0].next.x' is missing"),
        ([{"x": 1, "y": 2}], "there is no argument 'points[0].y'; there are x, label, kind, next"),
        ([{"x": 1, "label": 3}], "the argument 'points[0].label' must be of"),
        ([{"x": 1, "kind": "lake"}], "the argument 'points[0].kind' must be of"),
        ({"x": 1}, "the argument 'points' must be of"),
    ],
)
def test_what_is_wrong_within_an_argument_is_named_by_its_place(points, reason):
    for name in FORMATS:
        (read,) = calls_of(written(name, [Call("walk", {"points": points})]), name, SCHEMAS)
        assert isinstance(read, Malformed), name
        assert read.reason.startswith(reason), name


def test_arguments_and_schemas_that_are_nested_without_end_are_malformed_or_taken():
    endless: Any = {"t": {"properties": {"a": {"$ref": "#/properties/a"}}}}
    text = '<tool_call>{"name": "t", "arguments": {"a": 1}}</tool_call>'
    assert calls_of(text, "hermes", endless) == [Call("t", {"a": 1})]
    itself: Any = {"t": {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}]}}}}
    (read,) = calls_of(text, "hermes", itself)
    assert read == Malformed("the arguments are nested too deeply", "t")


def test_a_server_may_take_arguments_that_it_does_not_name():
    open_one: Any = {"t": {"type": "object"}, "u": {"properties": {}, "additionalProperties": True}}
    for name in open_one:
        text = f'<tool_call>{{"name": "{name}", "arguments": {{"a": 1}}}}</tool_call>'
        assert calls_of(text, "hermes", open_one) == [Call(name, {"a": 1})]
