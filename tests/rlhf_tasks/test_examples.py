"""What algorithms read of a row: text and conversations, verl's rows, lengths, places of faults."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from flows.demo_data import write_model_folder
from rlhf_tasks.config import make_config
from rlhf_tasks.dataset import DataError
from rlhf_tasks.examples import completion_example, load_and_check, pair_example, prompt_example
from rlhf_tasks.tokenizer import Tokenizer, TokenizerError

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_model_folder(folder)
    return folder


@pytest.fixture(scope="module")
def plain(plain_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(plain_folder)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("chat")
    write_model_folder(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.from_folder(folder)


def text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, special_tokens=True)


def test_prompts_keep_their_row_for_the_rewards(plain: Tokenizer):
    example = prompt_example({"prompt": "ab", "answer": "ba"}, plain)
    assert text(plain, example.prompt_ids) == "ab"
    assert json.loads(example.columns) == {"prompt": "ab", "answer": "ba"}


def test_rows_of_verl_are_read_as_they_are(chat: Tokenizer):
    row = {
        "data_source": "gsm8k",
        "prompt": [USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"index": 0},
    }
    example = prompt_example(row, chat)
    assert text(chat, example.prompt_ids) == "<|user|>hi<eos><|assistant|>"
    assert json.loads(example.columns) == row


def test_prompt_and_completion_learn_the_completion_and_its_end(plain: Tokenizer):
    example = completion_example({"prompt": "ab", "completion": "ba"}, plain)
    assert text(plain, example.input_ids) == "abba<eos>"
    assert example.prompt_tokens == 2


def test_text_learns_all_that_can_be_predicted(plain: Tokenizer):
    example = completion_example({"text": "abc"}, plain)
    assert text(plain, example.input_ids) == "abc<eos>"
    assert example.prompt_tokens == 1
    assert completion_example({"text": "abc<eos>"}, plain) == example


def test_without_a_prompt_the_first_token_is_not_learned(plain: Tokenizer):
    """Nothing predicts it, and the loss's denominator counts the tokens that are learned."""
    assert completion_example({"prompt": "", "completion": "abc"}, plain) == completion_example(
        {"text": "abc"}, plain
    )
    with pytest.raises(DataError, match="nothing to learn"):
        completion_example({"prompt": "", "completion": ""}, plain)


def test_messages_learn_the_last_turn(chat: Tokenizer):
    example = completion_example({"messages": [USER, ANSWER]}, chat)
    assert text(chat, example.input_ids) == "<|user|>hi<eos><|assistant|>ho<eos>"
    assert text(chat, example.input_ids[example.prompt_tokens :]) == "ho<eos>"


def test_conversations_are_rendered_as_transformers_renders_them(chat: Tokenizer, plain_folder: Path):
    theirs = AutoTokenizer.from_pretrained(plain_folder)
    theirs.chat_template = TEMPLATE
    ids = theirs.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert prompt_example({"prompt": [USER]}, chat).prompt_ids == ids


def test_pairs_with_and_without_a_prompt(plain: Tokenizer, chat: Tokenizer):
    pair = pair_example({"prompt": "p", "chosen": "a", "rejected": "b"}, plain)
    assert (text(plain, pair.chosen_ids), text(plain, pair.rejected_ids)) == ("pa<eos>", "pb<eos>")
    pair = pair_example({"chosen": "pa", "rejected": "pb"}, plain)
    assert (text(plain, pair.chosen_ids), text(plain, pair.rejected_ids)) == ("pa<eos>", "pb<eos>")
    other = {"role": "assistant", "content": "no"}
    pair = pair_example({"chosen": [USER, ANSWER], "rejected": [USER, other]}, chat)
    assert text(chat, pair.chosen_ids) == "<|user|>hi<eos><|assistant|>ho<eos>"
    assert text(chat, pair.rejected_ids) == "<|user|>hi<eos><|assistant|>no<eos>"


@pytest.mark.parametrize(
    ("reader", "row", "sentence"),
    [
        (prompt_example, {"question": "a"}, "has no column 'prompt' (columns: question)"),
        (prompt_example, {"prompt": ""}, "has an empty prompt."),
        (prompt_example, {"prompt": 3}, "must be text or a list of messages"),
        (prompt_example, {"prompt": [{"content": "x"}]}, "must be text or a list of messages"),
        (prompt_example, {"prompt": [USER]}, "the model has no chat template"),
        (completion_example, {"prompt": "a"}, "has no column 'completion'"),
        (
            completion_example,
            {"prompt": "a", "completion": [ANSWER]},
            "prompt is text, but its answer is not.",
        ),
        (completion_example, {"text": 1}, "column 'text' must be text, found int."),
        (pair_example, {"prompt": "a", "chosen": "b"}, "has no column 'rejected'"),
    ],
)
def test_faults_of_a_row_are_named(plain: Tokenizer, reader: Any, row: dict, sentence: str):
    with pytest.raises((DataError, TokenizerError)) as caught:
        reader(row, plain)
    assert sentence in str(caught.value)


def config(folder: Path, data: Path, **changes: Any) -> Any:
    document = {
        "type": "ppo",
        "models": {"actor": str(folder)},
        "data": {"train": str(data), "max_prompt_tokens": changes.pop("limit", 64)},
        "sampling": {"max_completion_length": 8},
        "rewards": [{"function": "m:f"}],
        "total_iterations": 1,
    }
    return make_config({**document, **changes})


def test_a_whole_data_set_is_checked_before_training(plain_folder: Path, tmp_path: Path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "abc"}\n{"prompt": "abcdef"}\n')
    rows, tokenizer = load_and_check(config(plain_folder, data))
    assert len(rows) == 2
    assert tokenizer.eos_id == 2
    with pytest.raises(DataError, match=r"rows\.jsonl:2: has 6 tokens, but data\.max_prompt_tokens is 5\."):
        load_and_check(config(plain_folder, data, limit=5))
    long = {"max_completion_length": 124}
    with pytest.raises(DataError, match=r"rows\.jsonl:2: has 6 tokens .* role 'actor' \(.*\) holds 128\."):
        load_and_check(config(plain_folder, data, sampling=long))
    data.write_text('{"prompt": "abc"}\n{"question": "abcdef"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: has no column 'prompt' \(columns: question\)\."):
        load_and_check(config(plain_folder, data))


def test_a_folder_that_holds_no_tokenizer_is_named(plain_folder: Path, tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read as a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((plain_folder / "tokenizer.json").read_bytes())
    with pytest.raises(TokenizerError, match="declares no end token"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 9]}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.stop_ids, tokenizer.pad_id) == ((7, 9), 7)


def test_templates_cannot_reach_out_of_the_sandbox(plain_folder: Path, tmp_path: Path):
    write_model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.append(1) }}")
    with pytest.raises(TokenizerError, match="the chat template refuses"):
        Tokenizer.from_folder(tmp_path).render([USER], generation_prompt=True)
