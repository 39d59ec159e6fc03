"""OpenAI's API, as agents speak it: what is read, what is refused, what is written."""

import pytest

from prefect_rlhf.rlhf_tasks.user_code.agents.chat_api import (
    RAW,
    Choice,
    Drawing,
    Refused,
    answer,
    read_request,
    reward_of,
)

DRAWING = Drawing(temperature=1.0, top_p=0.9)
HI = [{"role": "user", "content": "hi"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


NO_TOOL = "tools: each is {type: function, function: {name, parameters}}, parameters being a JSON schema"
UNKNOWN = [
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "guided_json",
    "reasoning_effort",
]
HALF = "the request has half a character: a surrogate, \\ud800 to \\udfff, without its other half"


def tool(parameters):
    return {"type": "function", "function": {"name": "add", "parameters": parameters}}


def chat(**fields):
    return read_request({"messages": HI, **fields}, is_chat=True, drawing=DRAWING, raws={})


def said(text, raw=None, finish="stop"):
    return Choice(text, text if raw is None else raw, finish, ["o", "k"], [-0.5, -1.0])


def test_a_request_states_what_is_drawn():
    assert chat(max_tokens=5, stop="b", n=2) == {
        "messages": HI,
        "text": "",
        "tools": [],
        "n": 2,
        "most": 5,
        "stop": ["b"],
        "stream": False,
    }
    assert chat(max_completion_tokens=7, max_tokens=5, stop=["b", "a", "b"])["stop"] == ["a", "b"]
    assert chat(max_completion_tokens=7, max_tokens=5)["most"] == 7
    text = read_request({"prompt": "once", "logprobs": 1}, is_chat=False, drawing=DRAWING, raws={})
    assert (text["text"], text["messages"], text["most"]) == ("once", None, None)
    same = {
        "temperature": 1,
        "top_p": 0.9,
        "presence_penalty": 0.0,
        "tool_choice": "auto",
        "seed": 3,
        "store": False,
        "user": "me",
        "top_k": None,
    }
    assert chat(**same) == chat()


def test_tools_are_offered_unless_none_is_to_be_chosen():
    assert chat(tools=[ADD])["tools"] == [ADD]
    assert chat(tools=[ADD], tool_choice="none")["tools"] == []


def test_messages_become_what_a_template_takes():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
    ]
    developer, assistant, tool = chat(messages=history)["messages"]
    assert developer == {"role": "system", "content": "ab"}
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert tool == {"role": "tool", "tool_call_id": "x", "content": "1"}
    drawn = read_request({"messages": history}, True, DRAWING, {"x": f"thus{CALL}"})["messages"][1]
    assert drawn == {**assistant, RAW: f"thus{CALL}"}, "it has the turn as it was drawn, too"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"temperature": 0.2},
            "temperature=0.2: this run draws with temperature=1, so that it can learn from it",
        ),
        ({"top_p": 1}, "top_p=1: this run draws with top_p=0.9, so that it can learn from it"),
        ({"logit_bias": {"5": 1}}, "logit_bias={'5': 1} is not supported here"),
        ({"tool_choice": "required"}, "tool_choice='required' is not supported here"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls=False is not supported here"),
        *(({name: 1}, f"{name}=1 is not supported here") for name in UNKNOWN),
        ({"n": 0}, "n=0: give a whole number from 1 to 128"),
        ({"max_tokens": "many"}, "max_tokens='many': give a whole number from 1 to 2147483648"),
        ({"stop": [""]}, "stop=['']: give strings that are not empty"),
        ({"stop": ["x" * 300]}, "stop: give at most 32 strings of 256 bytes together"),
        ({"messages": []}, "messages=[]: give a list of messages"),
        ({"messages": ["hi"]}, "'hi' is no message: it has no role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "content {'type': 'image_url'}: only text is read here",
        ),
        ({"tools": [{"name": "add"}]}, NO_TOOL),
        *(({"tools": [tool(parameters)]}, NO_TOOL) for parameters in ("none", [1], {"type": 5}, {"enum": 3})),
        *(({"tools": [tool({"properties": each})]}, NO_TOOL) for each in ([1], {"x": {"required": 5}})),
        ({"tools": [tool({"properties": {"x": {"anyOf": [{"type": [[]]}]}}})]}, NO_TOOL),
        ({"stream_options": [1]}, "stream_options=[1]: give an object"),
        ({"stop": "\ud800"}, HALF),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a\udfff"}]}]}, HALF),
    ],
)
def test_what_would_change_what_is_drawn_is_refused(fields, sentence):
    with pytest.raises(Refused) as caught:
        chat(**fields)
    assert str(caught.value) == sentence
    assert caught.value.status == 400
    assert caught.value.body["error"]["message"] == sentence


@pytest.mark.parametrize(
    "document", [[], {"prompt": ["a", "b"]}, {"prompt": [1, -2]}, {"prompt": [1, True]}, {"prompt": ""}]
)
def test_a_text_is_one_that_is_not_empty(document):
    with pytest.raises(Refused):
        read_request(document, is_chat=False, drawing=DRAWING, raws={})


def test_a_text_may_be_given_as_tokens_and_an_answer_has_tokens_where_they_are_asked_for():
    asked = {"prompt": [1, 2], "return_token_ids": True}
    fields = read_request(asked, is_chat=False, drawing=DRAWING, raws={})
    assert (fields["ids"], fields["text"], fields["wants_ids"]) == ([1, 2], "", True)
    choice = said("ok")._replace(ids=[3, 4])
    for request, is_chat in ((asked, False), ({"return_token_ids": True}, True)):
        (made,) = answer(request, is_chat, [choice], 2, 3, None, [1, 2])[0]["choices"]
        assert (made["prompt_token_ids"], made["token_ids"]) == ([1, 2], [3, 4])
    assert "token_ids" not in answer({}, False, [choice], 2, 3, None)[0]["choices"][0]
    with pytest.raises(Refused, match=r"return_token_ids: a stream has no ids of tokens"):
        read_request({**asked, "stream": True}, is_chat=False, drawing=DRAWING, raws={})


def test_an_answer_has_the_texts_the_log_probabilities_and_the_number_of_tokens():
    whole, raws = answer({"logprobs": True}, True, [said("ok"), said("no", finish="length")], 5, 3, None)
    first, second = whole["choices"]
    assert first["message"] == {"role": "assistant", "content": "ok"}
    assert [each["logprob"] for each in first["logprobs"]["content"]] == [-0.5, -1.0]
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "length")
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert not raws
    flat, _ = answer({"logprobs": 1}, False, [said("ok")], 5, 3, None)
    assert flat["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -1.0]
    assert flat["choices"][0]["logprobs"]["text_offset"] == [0, 1]


def test_calls_of_tools_are_read_where_tools_are_offered():
    whole, raws = answer({"tools": [ADD]}, True, [said("", CALL)], 5, 3, "hermes")
    (choice,) = whole["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert raws == {call["id"]: CALL}
    assert len(call["id"]) == 9, "Mistral's template takes no other"
    assert call["id"].isalnum()


@pytest.mark.parametrize(
    ("request_", "raw", "form"),
    [
        ({"tools": [ADD]}, CALL + CALL.replace("add", "sub"), "hermes"),
        ({"tools": [ADD], "tool_choice": "none"}, CALL, "hermes"),
        ({}, CALL, "hermes"),
        ({"tools": [ADD]}, CALL, None),
    ],
)
def test_otherwise_an_answer_is_text(request_, raw, form):
    whole, _ = answer(request_, True, [said(raw)], 5, 3, form)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": raw}


NO_REWARDS = [True, "1", float("nan"), 10**400]


@pytest.mark.parametrize("document", [{}, [], *({"reward": each} for each in NO_REWARDS)])
def test_a_reward_is_a_finite_number(document):
    with pytest.raises(Refused, match="is no finite number"):
        reward_of(document)
    assert reward_of({"reward": 2}) == 2.0
