"""What algorithms read of a row: text and conversations, verl's rows, lengths, places of faults."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Regex as TokenizerRegex
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer

from prefect_rlhf.flows.demo import write_model_folder
from prefect_rlhf.rlhf_tasks.algorithms.examples import read_examples
from prefect_rlhf.rlhf_tasks.config.data import DataConfig
from prefect_rlhf.rlhf_tasks.data.dataset import DataError, PlacedRow, data_set
from prefect_rlhf.rlhf_tasks.data.rows import (
    CompletionExample,
    Reader,
    completion_example,
    labelled_examples,
    pair_example,
    prompt_example,
)
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("chat")
    write_model_folder(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.from_folder(folder)


def read_row(reader: Reader[Any], row: dict[str, Any], tokenizer: Tokenizer) -> Any:
    examples = [
        example for _, example in read_examples(reader, [PlacedRow(0, 1, "rows:1", row, row)], tokenizer)
    ]
    return examples if reader is labelled_examples else examples[0]


def text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, special_tokens=True)


def learned(tokenizer: Tokenizer, example: CompletionExample) -> list[str]:
    """The parts of a sequence that are learned."""
    return [text(tokenizer, example.input_ids[part.start : part.stop]) for part in example.learned]


def test_prompts_keep_their_row_for_the_rewards(plain: Tokenizer):
    example = read_row(prompt_example, {"prompt": "ab", "answer": "ba"}, plain)
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
    example = read_row(prompt_example, row, chat)
    assert text(chat, example.prompt_ids) == "<|user|>hi<eos><|assistant|>"
    assert json.loads(example.columns) == row


@pytest.mark.parametrize(
    ("reader", "row", "told"),
    [
        (prompt_example, {"prompt": "hi"}, {"prompt": [USER]}),
        (completion_example, {"prompt": "hi", "completion": "ho"}, {"messages": [USER, ANSWER]}),
        (
            pair_example,
            {"prompt": "hi", "chosen": "ho", "rejected": "hi"},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "hi"}]},
        ),
        (
            labelled_examples,
            {"prompt": "hi", "completion": "ho", "label": True},
            {"prompt": [USER], "completion": [ANSWER], "label": True},
        ),
    ],
)
def test_text_as_messages_is_read_as_rows_of_messages_are(
    tmp_path: Path, chat: Tokenizer, reader: Reader[Any], row: dict[str, Any], told: dict[str, Any]
):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    spoken = next(iter(data_set(DataConfig(train=str(path), as_messages=True)))).row
    example = read_row(reader, dict(spoken), chat)
    assert example == read_row(reader, told, chat)
    assert example != read_row(reader, row, chat)


def test_answers_without_a_prompt_stay_text(tmp_path: Path):
    """They are whole conversations (HH-RLHF)."""
    path, row = tmp_path / "rows.jsonl", {"chosen": "H: hi A: ho", "rejected": "H: hi A: no"}
    path.write_text(json.dumps(row))
    assert next(iter(data_set(DataConfig(train=str(path), as_messages=True)))).row == row


def test_prompt_and_completion_learn_the_completion_and_its_end(plain: Tokenizer):
    example = read_row(completion_example, {"prompt": "ab", "completion": "ba"}, plain)
    assert text(plain, example.input_ids) == "abba<eos>"
    assert example.learned == (range(2, 5),)


def test_text_learns_all_that_can_be_predicted(plain: Tokenizer):
    example = read_row(completion_example, {"text": "abc"}, plain)
    assert text(plain, example.input_ids) == "abc<eos>"
    assert example.learned == (range(1, 4),)
    assert read_row(completion_example, {"text": "abc<eos>"}, plain) == example


def test_without_a_prompt_the_first_token_is_not_learned(plain: Tokenizer):
    """Nothing predicts it, and the loss's denominator counts the tokens that are learned."""
    example = read_row(completion_example, {"prompt": "", "completion": "abc"}, plain)
    assert example == read_row(completion_example, {"text": "abc"}, plain)
    with pytest.raises(DataError, match="nothing to learn"):
        read_row(completion_example, {"prompt": "", "completion": ""}, plain)


def test_messages_learn_the_last_turn(chat: Tokenizer):
    example = read_row(completion_example, {"messages": [USER, ANSWER]}, chat)
    assert text(chat, example.input_ids) == "<|user|>hi<eos><|assistant|>ho<eos>"
    assert learned(chat, example) == ["ho<eos>"]


def test_all_tokens_are_learned_that_can_be_predicted(plain: Tokenizer, chat: Tokenizer):
    reader = partial(completion_example, completion_only_loss=False)
    assert learned(plain, read_row(reader, {"prompt": "ab", "completion": "ba"}, plain)) == ["bba<eos>"]
    example = read_row(reader, {"messages": [USER, ANSWER]}, chat)
    assert learned(chat, example) == [text(chat, example.input_ids[1:])]


def test_every_message_of_the_assistant_is_learned_and_nothing_else(chat: Tokenizer):
    reader = partial(completion_example, assistant_only_loss=True)
    other = {"role": "assistant", "content": "no"}
    example = read_row(reader, {"messages": [USER, ANSWER, USER, other, USER]}, chat)
    assert text(chat, example.input_ids) == (
        "<|user|>hi<eos><|assistant|>ho<eos><|user|>hi<eos><|assistant|>no<eos><|user|>hi<eos>"
    )
    assert learned(chat, example) == ["ho<eos>", "no<eos>"]
    mask = example.values()["response_mask"]
    assert sum(mask) == sum(len(part) for part in example.learned)
    example = read_row(reader, {"messages": [ANSWER, USER, other]}, chat)
    assert learned(chat, example)[1:] == ["no<eos>"]
    assert learned(chat, example)[0].endswith("ho<eos>"), "nothing opens a conversation's first message"
    example = read_row(reader, {"prompt": [USER, ANSWER, USER], "completion": [other]}, chat)
    assert learned(chat, example) == ["ho<eos>", "no<eos>"]


def test_a_conversation_whose_assistant_says_nothing_has_nothing_to_learn(plain_folder: Path, tmp_path: Path):
    """A mini-batch of such rows would have no token to take the mean over."""
    shutil.copytree(plain_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    reader, chat = partial(completion_example, assistant_only_loss=True), Tokenizer.from_folder(tmp_path)
    nothing = {"role": "assistant", "content": ""}
    with pytest.raises(DataError, match="has nothing to learn"):
        read_row(reader, {"messages": [USER, nothing]}, chat)
    assert learned(chat, read_row(reader, {"messages": [USER, nothing, USER, ANSWER]}, chat))[-1] == "ho"


def test_a_pair_has_a_margin_and_its_prompt_is_not_learned(plain: Tokenizer):
    pair = read_row(pair_example, {"prompt": "pq", "chosen": "a", "rejected": "bc", "margin": 2}, plain)
    assert pair.values() == {
        "chosen_ids": pair.chosen_ids,
        "rejected_ids": pair.rejected_ids,
        "chosen_mask": [False, False, True, True],
        "rejected_mask": [False, False, True, True, True],
        "margin": [2.0],
    }
    pair = read_row(pair_example, {"chosen": "ab", "rejected": "cd", "margin": None}, plain)
    assert (pair.prompt_tokens, pair.margin) == (1, 0.0), "nothing predicts the first token"


def test_a_labelled_answer_is_one_example_and_a_pair_is_two(plain: Tokenizer, chat: Tokenizer):
    row = {"prompt": "p", "completion": "no", "label": False}
    (example,) = read_row(labelled_examples, row, plain)
    assert text(plain, example.input_ids) == "pno<eos>"
    assert (example.prompt_tokens, example.desirable) == (1, False)
    row = {"prompt": [USER], "completion": [ANSWER], "label": True}
    (example,) = read_row(labelled_examples, row, chat)
    assert text(chat, example.input_ids[example.prompt_tokens :]) == "ho<eos>"
    row = {"prompt": "p", "chosen": "y", "rejected": "n"}
    placed = PlacedRow(0, 3, "rows:3", row, row)
    read = list(read_examples(labelled_examples, [placed], plain))
    assert [each.where for each, _ in read] == ["rows:3", "rows:3"]
    assert [(text(plain, e.input_ids), e.desirable) for _, e in read] == [
        ("py<eos>", True),
        ("pn<eos>", False),
    ]


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        "{{ messages | tojson(ensure_ascii=true) }}"
        "{{ {'b': '\u00e4', 'a': [1]} | tojson(False, 1, (',', ':'), true) }}",
        "a{% generation %}{% set a = 1 %}\n {{ messages[0].content }}{% endgeneration %}\n{{ a }}b",
    ],
    ids=["text", "tojson", "generation"],
)
def test_conversations_are_rendered_as_transformers_renders_them(
    plain_folder: Path, tmp_path: Path, template: str
):
    shutil.copytree(plain_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(template)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = theirs.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
    assert list(ours.render([([USER], True)])) == [text]
    ids = theirs.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert read_row(prompt_example, {"prompt": [USER]}, ours).prompt_ids == ids


def test_pairs_with_and_without_a_prompt(plain: Tokenizer, chat: Tokenizer):
    pair = read_row(pair_example, {"prompt": "p", "chosen": "a", "rejected": "b"}, plain)
    assert (text(plain, pair.chosen_ids), text(plain, pair.rejected_ids)) == ("pa<eos>", "pb<eos>")
    pair = read_row(pair_example, {"chosen": "pa", "rejected": "pb"}, plain)
    assert (text(plain, pair.chosen_ids), text(plain, pair.rejected_ids)) == ("pa<eos>", "pb<eos>")
    other = {"role": "assistant", "content": "no"}
    pair = read_row(pair_example, {"chosen": [USER, ANSWER], "rejected": [USER, other]}, chat)
    assert text(chat, pair.chosen_ids) == "<|user|>hi<eos><|assistant|>ho<eos>"
    assert text(chat, pair.rejected_ids) == "<|user|>hi<eos><|assistant|>no<eos>"


def test_text_pairs_without_a_prompt_learn_what_differs_and_keep_the_tokens_of_the_whole(bpe: Tokenizer):
    """HH-RLHF's rows. The answers' first letters are in common too, but not their tokens."""
    question = "\n\nHuman: Name one.\n\nAssistant:"
    row = {"chosen": f"{question} A pear.", "rejected": f"{question} Apple.", "margin": ""}
    pair = read_row(pair_example, row, bpe)
    assert (text(bpe, pair.chosen_ids), text(bpe, pair.rejected_ids)) == (
        f"<bos>{question} A pear.<eos>",
        f"<bos>{question} Apple.<eos>",
    )
    assert pair.chosen_ids[:-1] == bpe.encode(row["chosen"], special_tokens=True)
    assert text(bpe, pair.chosen_ids[: pair.prompt_tokens]) == f"<bos>{question}"
    liked, disliked = read_row(labelled_examples, row, bpe)
    assert [text(bpe, e.input_ids[e.prompt_tokens :]) for e in (liked, disliked)] == [
        " A pear.<eos>",
        " Apple.<eos>",
    ]
    longer = read_row(pair_example, {"chosen": f"{question} A", "rejected": question}, bpe)
    assert text(bpe, longer.rejected_ids[longer.prompt_tokens :]) == "<eos>"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose tokens are words with the space before them, and that puts BOS and EOS around a text."""
    folder = tmp_path_factory.mktemp("bpe")
    write_model_folder(folder)
    made = BackendTokenizer.from_file(str(folder / "tokenizer.json"))
    words = pre_tokenizers.Split(TokenizerRegex(r" ?[A-Za-z]+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    merged = ["\u0120A", "\u0120Ap", "pl", "\u0120Appl", "\u0120Apple"]
    vocabulary = {**made.get_vocab(), **{token: 260 + i for i, token in enumerate(merged)}}
    merges = [("\u0120", "A"), ("\u0120A", "p"), ("p", "l"), ("\u0120Ap", "pl"), ("\u0120Appl", "e")]
    made.model = models.BPE(vocab=vocabulary, merges=merges)
    around = [(token, made.token_to_id(token)) for token in ("<bos>", "<eos>")]
    made.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=around)
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def test_a_text_has_one_bos_and_one_eos(bpe: Tokenizer):
    for given in ("ab", "<bos>ab"):
        assert text(bpe, read_row(prompt_example, {"prompt": given}, bpe).prompt_ids) == "<bos>ab"
        for end in ("", "<eos>"):
            assert (
                text(bpe, read_row(completion_example, {"text": given + end}, bpe).input_ids)
                == "<bos>ab<eos>"
            )
        row = {"prompt": given, "completion": "c<eos>"}
        assert text(bpe, read_row(completion_example, row, bpe).input_ids) == "<bos>abc<eos>"
    assert text(bpe, bpe.encode("", special_tokens=True)) == "<bos>"


SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
NO = {"role": "assistant", "content": "no"}


@pytest.mark.parametrize(
    ("reader", "row", "same"),
    [
        (completion_example, {"conversations": SHARED}, {"messages": [USER, ANSWER]}),
        (
            completion_example,
            {"conversations": SHARED, "system": "s"},
            {"messages": [{"role": "system", "content": "s"}, USER, ANSWER]},
        ),
        (prompt_example, {"conversations": SHARED}, {"prompt": [USER]}),
        (prompt_example, {"prompt": SHARED[:1]}, {"prompt": [USER]}),
        (
            prompt_example,
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": part} for part in "hi"]}]},
            {"prompt": [USER]},
        ),
        (
            labelled_examples,
            {"conversations": SHARED, "label": "True"},
            {"prompt": [USER], "completion": [ANSWER], "label": True},
        ),
        (
            pair_example,
            {"conversations": SHARED[:1], "chosen": SHARED[1], "rejected": {"from": "gpt", "value": "no"}},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [NO]},
        ),
        (
            pair_example,
            {"prompt": "hi", "chosen": [USER, ANSWER], "rejected": [USER, NO], "messages": [USER, ANSWER]},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [NO]},
        ),
        (
            pair_example,
            {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, NO], "margin": "0.5"},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [NO], "margin": 0.5},
        ),
        (
            completion_example,
            {"prompt": "hi", "completion": [USER, ANSWER]},
            {"prompt": [USER], "completion": [ANSWER]},
        ),
    ],
    ids=[
        "sft",
        "system",
        "grpo",
        "grpo prompt",
        "parts",
        "kto",
        "dpo",
        "ultrafeedback",
        "prompt twice",
        "text prompt",
    ],
)
def test_rows_of_other_systems_are_read_as_ours(chat: Tokenizer, reader: Any, row: dict, same: dict):
    ours, theirs = read_row(reader, same, chat), read_row(reader, row, chat)
    if reader is prompt_example:
        assert json.loads(theirs.columns)["prompt"] == [USER], "rewards see messages"
        assert theirs.prompt_ids == ours.prompt_ids
    else:
        assert theirs == ours


def test_the_same_tool_calls_from_jsonl_and_parquet_give_the_same_tokens(plain_folder: Path, tmp_path: Path):
    """Arrow holds null where a message, a call or a tool lacks a key that another one has."""
    shutil.copytree(plain_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}"
        "{% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}{% endif %}{{ eos_token }}{% endfor %}"
    )
    calls = [
        {"function": {"name": "f", "arguments": each}} for each in ({"a": 1}, {"b": [{"c": 1}, {"d": "x"}]})
    ]
    row = {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "content": "2"},
            ANSWER,
        ],
        "tools": [{"name": "f"}, {"name": "g", "strict": True}],
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    chat, learned_of = Tokenizer.from_folder(tmp_path), list[list[int]]()
    for name in ("rows.jsonl", "rows.parquet"):
        placed = data_set(DataConfig(train=str(tmp_path / name)))
        ((_, example),) = read_examples(completion_example, placed, chat)
        learned_of.append(example.input_ids)
    assert learned_of[0] == learned_of[1]
    assert "null" not in text(chat, learned_of[0])
    assert '{"a": 1}' in text(chat, learned_of[0])


def test_a_turn_of_tool_calls_needs_no_content(chat: Tokenizer):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    for empty in ({}, {"content": None}, {"content": ""}):
        example = read_row(completion_example, {"messages": [USER, {**call, **empty}]}, chat)
        assert text(chat, example.input_ids) == "<|user|>hi<eos><|assistant|><eos>"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (
            TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}",
            "opens the assistant's turn with '<think>\\\\n'",
        ),
        (
            "{{ messages | length }}" + TEMPLATE,
            "changes earlier turns when one is added, so .* apart: first it writes '",
        ),
    ],
)
@pytest.mark.parametrize("assistant_only_loss", [False, True])
def test_why_answers_cannot_be_told_apart_is_said(
    plain_folder: Path, tmp_path: Path, template: str, sentence: str, assistant_only_loss: bool
):
    shutil.copytree(plain_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(template)
    reader, chat = (
        partial(completion_example, assistant_only_loss=assistant_only_loss),
        Tokenizer.from_folder(tmp_path),
    )
    with pytest.raises(DataError, match=sentence):
        read_row(reader, {"messages": [USER, ANSWER, USER, ANSWER]}, chat)


@pytest.mark.parametrize(
    ("reader", "row", "sentence"),
    [
        (prompt_example, {"question": "a"}, "has no column 'prompt' (columns: question)"),
        (prompt_example, {"prompt": ""}, "has an empty prompt."),
        (prompt_example, {"prompt": 3}, "column 'prompt' must be text or a list of messages"),
        (
            prompt_example,
            {"prompt": [{"content": "x"}]},
            "column 'prompt' must be text or a list of messages",
        ),
        (
            prompt_example,
            {"prompt": [USER]},
            "the rows are conversations, but the model has no chat template",
        ),
        (completion_example, {"prompt": "a"}, "has no column 'completion'"),
        (
            completion_example,
            {"prompt": "a", "completion": [ANSWER]},
            "prompt is text, but its answer is not, nor does it begin with the prompt.",
        ),
        (
            completion_example,
            {"messages": [USER, ANSWER, USER]},
            "ends with a message of the role 'user', but",
        ),
        (
            pair_example,
            {"chosen": [USER, ANSWER], "rejected": [{"role": "user", "content": "x"}, ANSWER]},
            "has different prompts: chosen continues with 'hi' (user), rejected with 'x' (user).",
        ),
        (
            completion_example,
            {"conversations": [{"from": "bing", "value": "x"}]},
            "column 'conversations' has a message from 'bing', not one of human, gpt, system, tool.",
        ),
        (
            completion_example,
            {"messages": [{"role": "user", "content": None}]},
            "column 'messages' must be text or",
        ),
        (
            prompt_example,
            {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]},
            "column 'prompt' has a message with a part of type 'image', and models read text alone.",
        ),
        (prompt_example, {"conversations": [{"from": "gpt", "value": "x"}]}, "has an empty prompt:"),
        (completion_example, {"text": 1}, "column 'text' must be text, found int."),
        (pair_example, {"prompt": "a", "chosen": "b"}, "has no column 'rejected'"),
        (
            pair_example,
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            "has equal answers: neither is preferred.",
        ),
        (pair_example, {"chosen": [USER], "rejected": [USER]}, "has equal answers: neither is preferred."),
        (pair_example, {"prompt": "a", "chosen": "b", "rejected": "b<eos>"}, "has equal answers:"),
        (
            pair_example,
            {"chosen": [USER, ANSWER], "rejected": [USER]},
            "has nothing to learn: an answer is empty.",
        ),
        (
            pair_example,
            {"prompt": "a", "chosen": "b", "rejected": ""},
            "has nothing to learn: an answer is empty.",
        ),
        (
            pair_example,
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"},
            "column 'margin' must be a finite number, found 'much'.",
        ),
        (completion_example, {"prompt": "a", "completion": ""}, "has nothing to learn: an answer is empty."),
        (
            partial(completion_example, assistant_only_loss=True),
            {"prompt": "a", "completion": "b"},
            "is text, but assistant_only_loss is set.",
        ),
        (
            partial(completion_example, assistant_only_loss=True),
            {"messages": [USER]},
            "has nothing to learn: no message is the assistant's",
        ),
        (labelled_examples, {"prompt": "a", "completion": "b"}, "has no column 'label'"),
        (
            labelled_examples,
            {"prompt": "a", "completion": "b", "label": 1},
            "column 'label' must be true or false, found 1.",
        ),
        (labelled_examples, {"prompt": "a", "completion": "", "label": True}, "has nothing to learn:"),
    ],
)
def test_faults_of_a_row_are_named(plain: Tokenizer, reader: Any, row: dict, sentence: str):
    with pytest.raises(DataError) as caught:
        read_row(reader, row, plain)
    assert str(caught.value).startswith(f"rows:1: {sentence}")


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_the_tools_of_a_row_are_rendered_as_transformers_does(plain_folder: Path, tmp_path: Path, tools: Any):
    write_model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    example = read_row(prompt_example, {"prompt": [USER], "tools": tools}, ours)
    expected = theirs.apply_chat_template([USER], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert text(ours, example.prompt_ids) == expected
    assert '"add"' in expected
    assert json.loads(example.columns)["tools"] == tools, "rewards get them, too"
    with pytest.raises(DataError, match="column 'tools' must be a list of JSON schemas"):
        read_row(prompt_example, {"prompt": [USER], "tools": "add"}, ours)
