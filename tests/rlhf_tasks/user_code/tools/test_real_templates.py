"""The chat templates of real models, which two packages carry: each names its format, and what it writes is read."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.rlhf_tasks.data.chat_template import _environment
from prefect_rlhf.rlhf_tasks.data.tokenizer import Observations, Tokenizer
from prefect_rlhf.rlhf_tasks.user_code.tools.formats import Call, Malformed, calls_of, format_of
from tests.registry import folder_of
from tests.rlhf_tasks.user_code.tools.test_formats import CALLS, GOOD, SCHEMAS, without_ids
from tests.tiny_runs import byte_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.whole, pytest.mark.cluster]

FOLDERS = {"trl": "trl==1.16.0", "axolotl": "axolotl==0.19.0"}
PLACES = {"trl": "trl/chat_templates", "axolotl": "axolotl/utils/chat_templates/templates"}
FORMAT_OF = {
    "trl/qwen2_5": "hermes",
    "trl/qwen3": "hermes",
    "trl/qwen3_vl": "hermes",
    "axolotl/exaone4": "hermes",
    "trl/qwen3_5_think": "xml",
    "trl/qwen3_8": "xml",
    "trl/nemotron_3_nano": "xml",
    "trl/glm4moe": "glm",
    "trl/llama3_1": "llama",
    "trl/llama3_2": "llama",
    "axolotl/llama4": "llama",
    "axolotl/mistral_v2v3": "mistral",
    "axolotl/mistral_v3_tekken": "mistral",
    "trl/gptoss": "harmony",
}
"""Those of the formats that are read. What others write is in no format of these."""
OTHERS = ("trl/deepseekv3", "trl/gemma4", "trl/lfm2_v2", "axolotl/command_a", "axolotl/jamba")
ONE_CALL = ("trl/llama3_1", "trl/llama3_2", "trl/gptoss")
"""These write one call a turn."""
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "</s>",
    "[|endofturn|]",
    "<|call|>",
    "<|observation|>",
)
OFFERED = [
    {"type": "function", "function": {"name": name, "description": "It does.", "parameters": parameters}}
    for name, parameters in SCHEMAS.items()
]
ASKED = [{"role": "user", "content": "Do it."}]


@lru_cache
def text_of(name: str) -> str:
    package, _, file = name.partition("/")
    return (folder_of(FOLDERS[package]) / PLACES[package] / f"{file}.jinja").read_text()


@lru_cache
def template_of(name: str) -> Any:
    return _environment().from_string(text_of(name))


def rendered(name: str, messages: Sequence[Mapping[str, Any]], opened: bool = False) -> str:
    return template_of(name).render(
        messages=messages, add_generation_prompt=opened, tools=OFFERED, bos_token="<s>", eos_token="</s>"
    )


def message_of(calls: Sequence[Call]) -> dict[str, Any]:
    listed = [
        {
            "id": each.id or f"call0000{n}",
            "type": "function",
            "function": {"name": each.name, "arguments": each.arguments},
        }
        for n, each in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": listed}


def turn_of(name: str, calls: Sequence[Call]) -> tuple[str, str]:
    """What a template writes of an assistant's turn of calls: (turn, the token that ends it). GLM's has none: there
    the next role's token ends a turn."""
    whole = rendered(name, [*ASKED, message_of(calls)]).rstrip("\n")
    before = os.path.commonprefix([whole, rendered(name, ASKED, opened=True)])  # noqa: RUF071  of characters
    turn = whole.removeprefix(before)
    end = next((end for end in ENDS if turn.endswith(end)), ENDS[-1])
    return turn.removesuffix(end), end


@pytest.mark.parametrize("name", FORMAT_OF)
def test_a_real_template_names_its_format_and_its_own_calls_are_read_back(name):
    assert format_of(text_of(name)) == FORMAT_OF[name]
    for calls in ([CALLS[0]], [CALLS[1]], [CALLS[2]], *([] if name in ONE_CALL else [CALLS])):
        turn, _ = turn_of(name, calls)
        assert without_ids(calls_of(turn, FORMAT_OF[name], SCHEMAS)) == without_ids(calls), turn


def test_no_other_template_is_taken_for_one_whose_calls_are_read():
    for name in OTHERS:
        assert "tool_call" in text_of(name)
        assert format_of(text_of(name)) is None, name
    for package, place in PLACES.items():
        for file in sorted((folder_of(FOLDERS[package]) / place).glob("*.jinja")):
            name, format = f"{package}/{file.stem}", format_of(file.read_text())
            if format is not None and "tool_calls" in file.read_text():
                turn, _ = turn_of(name, CALLS[:1])
                assert without_ids(calls_of(turn, format, SCHEMAS)) == without_ids(CALLS[:1]), name


@pytest.mark.parametrize("name", FORMAT_OF)
@settings(max_examples=25, deadline=None)
@given(calls=st.lists(GOOD, min_size=1, max_size=3))
def test_what_it_writes_is_read_back_whatever_the_arguments(name, calls):
    calls = calls[:1] if name in ONE_CALL else calls
    turn, _ = turn_of(name, calls)
    assert without_ids(calls_of(turn, FORMAT_OF[name], SCHEMAS)) == calls, turn


@pytest.mark.parametrize("name", FORMAT_OF)
@settings(max_examples=10, deadline=None)
@given(call=GOOD, data=st.data())
def test_a_call_that_is_cut_anywhere_is_malformed_or_whole_but_never_another(name, call, data):
    turn, _ = turn_of(name, [call])
    cut = turn[: data.draw(st.integers(0, len(turn)))]
    for read in calls_of(cut, FORMAT_OF[name], SCHEMAS):
        assert isinstance(read, Malformed) or read._replace(id="") == call, cut


KINDS = {
    "unknown tool": (Call("shout", {"text": "x"}), "there is no tool 'shout'"),
    "missing argument": (Call("say", {"how": "low"}), "the argument 'text' is missing"),
    "unknown argument": (Call("say", {"text": "x", "tone": "y"}), "there is no argument 'tone'"),
    "wrong type": (Call("add", {"a": 1.5}), "the argument 'a' must be of"),
    "wrong value": (Call("say", {"text": "x", "how": "mid"}), "the argument 'how' must be of"),
}
"""Malformed calls of five kinds, and what each is answered with; the two others damage what is written."""


@pytest.mark.parametrize("name", FORMAT_OF)
def test_malformed_calls_of_seven_kinds_are_one_sentence_each(name):
    format = FORMAT_OF[name]
    for kind, (call, reason) in KINDS.items():
        (read,) = calls_of(turn_of(name, [call])[0], format, SCHEMAS)
        assert isinstance(read, Malformed), kind
        assert (read.name, read.reason[: len(reason)]) == (call.name, reason)
    turn, _ = turn_of(name, [Call("say", {"text": "abc"})])
    cut = turn[: turn.index("abc") + 1]
    damaged = (
        turn.replace("abc", "</parameter></arg_value>abc")
        if format in ("xml", "glm")
        else turn.replace('abc"', "abc")
    )
    for text in (cut, damaged):
        (read,) = calls_of(text, format, SCHEMAS)
        assert isinstance(read, Malformed), text
        assert read.name == "say"
        assert "missing" in read.reason or "no valid JSON" in read.reason


@pytest.mark.parametrize("name", FORMAT_OF)
def test_what_tools_answer_is_what_it_writes_behind_the_calls(tmp_path, name):
    calls = CALLS[:1] if name in ONE_CALL else CALLS[:2]
    turn, end = turn_of(name, calls)
    backend = byte_tokenizer()
    backend.add_special_tokens([end])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "bos_token": "<s>"}))
    (tmp_path / "chat_template.jinja").write_text(text_of(name))
    tokenizer = Tokenizer.from_folder(tmp_path)
    answers = [{"name": each.name, "id": each.id, "content": f"It is {n}."} for n, each in enumerate(calls)]
    read = [
        {"role": "tool", "name": each["name"], "tool_call_id": each["id"], "content": each["content"]}
        for each in answers
    ]
    whole = rendered(name, [*ASKED, message_of(calls), *read], opened=True)
    ids = Observations(tokenizer).ids(answers, list(ASKED), tokenizer.eos_id)
    assert whole.endswith(turn[-9:] + end + tokenizer.decode(ids, special_tokens=True))
