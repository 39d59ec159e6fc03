"""Answers as events: they add up to the answer without `stream`, and nothing is sent that may be a call of a tool."""

import json

import pytest

from prefect_rlhf.rlhf_tasks.user_code.agents.chat_api import Choice, answer
from prefect_rlhf.rlhf_tasks.user_code.agents.streams import Piece, Stream, before_calls, begun
from tests.rlhf_tasks.user_code.agents.test_chat_api import ADD, CALL

USAGE = {"include_usage": True}


def told(request, is_chat, choices, pieces, tool_format=None):
    """(the events of each piece, those of the end, the whole answer)"""
    whole, _ = answer(request, is_chat, choices, 5, 3, tool_format)
    stream = Stream(request, is_chat, 3, tool_format)
    early = [[read(event) for event in stream.of(piece)] for piece in pieces]
    *late, done = stream.end(choices, whole)
    assert done == "data: [DONE]\n\n"
    return early, [read(event) for event in late], whole


def read(event):
    return json.loads(event.removeprefix("data: "))


def choice_of(event):
    (choice,) = event["choices"]
    return choice


def said(text, raw=None, finish="stop"):
    return Choice(text, text if raw is None else raw, finish, list(text), [-1.0] * len(text))


def piece(text, raw="", choice=0):
    return Piece(choice, text, raw, list(text), [-1.0] * len(text))


def deltas(events):
    return [choice_of(event)["delta"] for event in events if event["choices"]]


def joined(lists):
    return [each for one in lists for each in one]


def test_the_pieces_of_a_chat_add_up_to_its_answer():
    request = {"logprobs": True, "stream_options": USAGE}
    early, late, whole = told(request, True, [said("hello")], [piece("he"), piece("l")])
    assert deltas(early[0] + early[1]) == [{"role": "assistant", "content": "he"}, {"content": "l"}]
    rest, end, usage = late
    assert deltas([rest, end]) == [{"content": "lo"}, {}]
    assert choice_of(end)["finish_reason"] == "stop"
    assert usage["usage"] == whole["usage"]
    listed = [choice_of(each)["logprobs"]["content"] for each in (*early[0], *early[1], rest)]
    assert joined(listed) == whole["choices"][0]["logprobs"]["content"]
    assert {each["object"] for each in (*early[0], *late)} == {"chat.completion.chunk"}


def test_so_do_those_of_a_text_and_of_several():
    request = {"logprobs": 1, "n": 2}
    choices = [said("abc"), said("de", finish="length")]
    early, late, whole = told(request, False, choices, [piece("a"), piece("d", choice=1), piece("b")])
    events = [choice_of(event) for event in (*joined(early), *late)]
    for made in whole["choices"]:
        mine = [each for each in events if each["index"] == made["index"]]
        assert "".join(each["text"] for each in mine) == made["text"]
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + [made["finish_reason"]]
        for key, values in made["logprobs"].items():
            parts = [each["logprobs"][key] for each in mine if each["logprobs"]]
            assert values == (joined(parts) if values else None)


def test_an_answer_that_was_not_told_before_is_one_event_and_its_end():
    _, late, _ = told({}, True, [said("")], [])
    assert deltas(late) == [{"role": "assistant", "content": ""}, {}]
    _, late, _ = told({}, False, [said("ab")], [])
    assert [choice_of(each)["text"] for each in late] == ["ab", ""]


def test_log_probabilities_come_though_the_text_is_held_back():
    held = Piece(0, "", "", ["E"], [-2.0])
    ((event,),), _, _ = told({"logprobs": True}, True, [said("E")], [held])
    assert choice_of(event)["delta"] == {"role": "assistant", "content": ""}
    assert choice_of(event)["logprobs"]["content"][0]["logprob"] == -2.0


def test_a_call_is_sent_whole_at_the_end_after_the_text_before_it():
    text = f"I add. {CALL}"
    pieces = [piece(part, part) for part in ("I ", "add. <to", text[10:40], text[40:])]
    early, late, whole = told({"tools": [ADD]}, True, [said(text)], pieces, "hermes")
    assert [deltas(events) for events in early] == [
        [{"role": "assistant", "content": "I "}],
        [{"content": "add. "}],
        [],
        [],
    ]
    call = whole["choices"][0]["message"]["tool_calls"][0]
    assert deltas(late) == [{"tool_calls": [{"index": 0, **call}]}, {}]
    assert choice_of(late[1])["finish_reason"] == "tool_calls"


def test_what_only_looks_like_a_call_is_text_in_the_end():
    text = "a <tool_call>{ b"
    pieces = [piece("a <tool", "a <tool"), piece("_call>{ b", "_call>{ b")]
    early, late, _ = told({"tools": [ADD]}, True, [said(text)], pieces, "hermes")
    assert [delta["content"] for delta in deltas(early[0] + late)[:2]] == ["a ", "<tool_call>{ b"]
    assert early[1] == []
    early, late, _ = told({}, True, [said(text)], pieces, "hermes")
    assert [delta["content"] for delta in deltas(early[0] + early[1])] == ["a <tool", "_call>{ b"]


def test_a_mark_of_calls_that_the_text_has_not_ends_what_may_be_sent():
    """[TOOL_CALLS] is a special token: only the raw text has it."""
    raw = 'so [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'
    text = raw.replace("[TOOL_CALLS]", "")
    early, late, _ = told({"tools": [ADD]}, True, [said(text, raw)], [piece(text, raw)], "mistral")
    assert deltas(early[0]) == [{"role": "assistant", "content": "so "}]
    assert "tool_calls" in deltas(late)[0]


@pytest.mark.parametrize(
    ("form", "text", "before"),
    [
        ("hermes", "so <tool_call>{", "so "),
        ("xml", "so <tool_", "so "),
        ("glm", "a < b", "a < b"),
        ("mistral", "so [TOOL", "so "),
        ("llama", " ", ""),
        ("llama", '{"name"', ""),
        ("llama", "<|python", ""),
        ("llama", "so {", "so {"),
        ("harmony", "<|channel|>final<|message|>so", ""),
        ("harmony", " to=functions.add", " "),
    ],
)
def test_only_what_stands_before_anything_that_may_be_a_call_is_sent(form, text, before):
    assert before_calls(text, form) == before
    assert all(before.startswith(before_calls(text[:n], form)) for n in range(len(text)))


@pytest.mark.parametrize(
    ("text", "strings", "held"),
    [("aab", ["abc", "bx"], 2), ("abc", ["abc"], 0), ("x", ["ab"], 0), ("", ["ab"], 0), ("a", [], 0)],
)
def test_the_end_of_a_text_may_begin_a_string(text, strings, held):
    assert begun(text, strings) == held
