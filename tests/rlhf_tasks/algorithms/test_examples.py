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

from flows.demo import write_model_folder
from rlhf_tasks.algorithms.configurations import make_config, resolve_paths
from rlhf_tasks.algorithms.examples import endless, prepared_rows, prompt_tokens, read_examples
from rlhf_tasks.config.data import DataConfig
from rlhf_tasks.data.dataset import DataError, PlacedRow, data_set
from rlhf_tasks.data.rows import (
    CompletionExample,
    Reader,
    completion_example,
    labelled_examples,
    pair_example,
    prompt_example,
)
from rlhf_tasks.data.token_file import ROWS, SKIPPED, TokenFile
from rlhf_tasks.data.tokenizer import Tokenizer, TokenizerError
from rlhf_tasks.system.child_pipes import Lines
from rlhf_tasks.system.reading import ConfigError

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


def read_row(reader: Reader[Any], row: dict[str, Any], tokenizer: Tokenizer) -> Any:
    examples = [example for _, example in read_examples(reader, [PlacedRow(0, 1, "rows:1", row)], tokenizer)]
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


def test_a_template_that_rewrites_earlier_turns_cannot_tell_the_assistants_apart(
    plain_folder: Path, tmp_path: Path
):
    shutil.copytree(plain_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}" + TEMPLATE)
    reader = partial(completion_example, assistant_only_loss=True)
    with pytest.raises(DataError, match="changes earlier turns"):
        read_row(reader, {"messages": [USER, ANSWER, USER, ANSWER]}, Tokenizer.from_folder(tmp_path))


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
    placed = PlacedRow(0, 3, "rows:3", {"prompt": "p", "chosen": "y", "rejected": "n"})
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


def config(folder: Path, data: Path, **changes: Any) -> Any:
    document = {
        "type": "ppo",
        "models": {"actor": str(folder)},
        "data": {"train": str(data), "max_prompt_tokens": changes.pop("limit", 64)},
        "sampling": {"max_completion_length": 8},
        "rewards": [{"function": "m:f"}],
        "total_iterations": 1,
        "output_dir": str(data.parent / "runs"),
    }
    return make_config({**document, **changes})


def test_a_whole_data_set_is_checked_before_training(plain_folder: Path, tmp_path: Path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "abc"}\n{"prompt": "abcdef"}\n')
    assert len(prepared_rows(config(plain_folder, data))) == 2
    with pytest.raises(DataError, match=r"rows\.jsonl:2: has 6 tokens, but data\.max_prompt_tokens is 5\."):
        prepared_rows(config(plain_folder, data, limit=5))
    long = {"max_completion_length": 124}
    with pytest.raises(DataError, match=r"rows\.jsonl:2: has 6 tokens .* role 'actor' \(.*\) holds 128\."):
        prepared_rows(config(plain_folder, data, sampling=long))
    data.write_text('{"prompt": "abc"}\n{"question": "abcdef"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: has no column 'prompt' \(columns: question\)\."):
        prepared_rows(config(plain_folder, data))


def test_a_run_keeps_its_tokens_until_something_that_they_depend_on_changes(
    plain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, data, tokenised = tmp_path / "model", tmp_path / "rows.jsonl", list[str]()
    shutil.copytree(plain_folder, model)
    data.write_text('{"prompt": "abc"}\n{"prompt": "abcdef"}\n')
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, special_tokens: bool = False) -> list[int]:
        tokenised.append(text)
        return encode(self, text, special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)

    def prepare(**changes: Any) -> list[str]:
        tokenised.clear()
        prepared_rows(config(model, data, **changes), tmp_path).keep(tmp_path)
        return list(tokenised)

    assert prepare() == ["abc", "abcdef"]
    assert prepare() == prepare(limit=6, seed=3, total_iterations=9) == []
    with pytest.raises(DataError, match=r"rows\.jsonl:2: has 6 tokens, but data\.max_prompt_tokens is 5\."):
        prepare(limit=5)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    assert prepare() == ["abc", "abcdef"]
    data.write_text('{"prompt": "abc"}\n{"prompt": "abd"}\n')
    assert prepare() == ["abc", "abd"]
    (tmp_path / ROWS).write_bytes((tmp_path / ROWS).read_bytes()[:100])
    assert prepare() == ["abc", "abd"], "a damaged file is made anew"


def test_the_lengths_of_prompts_are_the_same_before_and_after_a_data_set_is_tokenised(
    plain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rlhf_tasks.algorithms.examples.SAMPLED", 3)
    monkeypatch.setattr("rlhf_tasks.data.token_file.SAMPLED", 3)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": "a" * (1 + i * i)}) + "\n" for i in range(7)))
    assert prompt_tokens(config(plain_folder, data)) == [1, 10, 37]
    assert prepared_rows(config(plain_folder, data)).tokens == (1, 10, 37)


def test_the_conversations_of_a_data_set_are_rendered_many_at_once(
    plain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A request has 256 of them, or so many that they have 256 KiB; a pair of answers has three."""
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(plain_folder, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'bad' %}{{ 1 // 0 }}{% endif %}"
        "{{ m.content[:9] }},{% endfor %}"
    )
    requests = list[int]()

    def send(lines: Lines, line: str, *rest: Any) -> None:
        if '"role"' in line:  # else it is the template
            requests.append(len(json.loads(line)))
        sent(lines, line, *rest)

    sent = Lines.send
    monkeypatch.setattr(Lines, "send", send)

    def checked(rows: list[dict]) -> list[int]:
        requests.clear()
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        prepared_rows(config(model, data))
        return requests[1:]  # the first asks whether the template opens the assistant's turn

    def prompt(content: str) -> dict:
        return {"prompt": [{"role": "user", "content": content}]}

    assert checked([prompt(str(i)) for i in range(600)]) == [256, 256, 88]
    assert checked([prompt("x" * 100_000)] * 4) == [3, 1]
    with pytest.raises(
        DataError, match=rf"{data}:290: .*chat_template\.jinja: .* division or modulo by zero"
    ):
        checked([prompt("bad" if i == 289 else "good") for i in range(600)])
    pair = {"prompt": [USER], "chosen": [ANSWER], "rejected": "no"}
    tokenizer = Tokenizer.from_folder(model)
    requests.clear()
    placed = [PlacedRow(0, line, f"rows:{line}", pair) for line in (1, 2)]
    (_, first), (_, last) = read_examples(pair_example, placed, tokenizer)
    assert first == last
    assert requests == [6]


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
        next(Tokenizer.from_folder(tmp_path).render([([USER], True)]))


# --- rows that are left out, tools, generation prompts -------------------------------------------------------


def skipping(folder: Path, data: Path, **changes: Any) -> Any:
    """A configuration that skips bad rows."""
    found = config(folder, data, **changes)
    return found.model_copy(update={"data": found.data.model_copy(update={"on_bad_row": "skip"})})


def prompts_of(rows: Any, tokenizer: Tokenizer) -> list[str]:
    return [text(tokenizer, rows.values(i)["prompt_ids"].tolist()) for i in range(len(rows))]


def test_bad_and_long_rows_are_skipped_and_listed_where_that_is_wanted(
    plain_folder: Path, plain: Tokenizer, tmp_path: Path
):
    data, run = tmp_path / "rows.jsonl", tmp_path / "run"
    run.mkdir()
    bad = ["{broken", '{"question": "?"}', '{"prompt": ""}', "[1]", json.dumps({"prompt": "a" * 40})]
    data.write_text("\n".join(['{"prompt": "abc"}', *bad, '{"prompt": "abd"}']) + "\n")
    rows = prepared_rows(skipping(plain_folder, data, limit=30))
    assert prompts_of(rows, plain) == ["abc", "abd"]
    assert rows.where(1) == f"{data}:7"
    rows.keep(run)
    listed = [json.loads(line) for line in (run / SKIPPED).read_text().splitlines()]
    assert [row["row"] for row in listed] == [f"{data}:{line}" for line in range(2, 7)]
    reasons = (
        "not valid JSON",
        "has no column 'prompt'",
        "has an empty prompt",
        "expected a JSON object",
        "has 40 tokens",
    )
    for row, reason in zip(listed, reasons, strict=True):
        assert row["reason"].startswith(reason)
    assert TokenFile.open(run / ROWS).skipped == rows.skipped
    with pytest.raises(DataError, match=r"rows\.jsonl:2: not valid JSON"):
        prepared_rows(config(plain_folder, data))


def test_other_limits_choose_other_rows_of_a_run_that_skips(plain_folder: Path, tmp_path: Path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "abc"}\n{"prompt": "abcdef"}\n')
    prepared_rows(skipping(plain_folder, data, limit=4), tmp_path).keep(tmp_path)
    assert len(prepared_rows(skipping(plain_folder, data, limit=4), tmp_path)) == 1
    assert len(prepared_rows(skipping(plain_folder, data, limit=6), tmp_path)) == 2


def test_a_conversation_that_the_template_refuses_is_skipped_alone(plain_folder: Path, tmp_path: Path):
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(plain_folder, model)
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].content == 'x' %}{{ 1 // 0 }}{% endif %}" + TEMPLATE
    )
    data.write_text(
        "".join(json.dumps({"prompt": [{"role": "user", "content": c}]}) + "\n" for c in "axbxxc")
    )
    rows = prepared_rows(skipping(model, data))
    assert [rows.where(i).rpartition(":")[2] for i in range(len(rows))] == ["1", "3", "6"]
    assert [where.rpartition(":")[2] for where, _ in rows.skipped] == ["2", "4", "5"]


def test_data_with_more_than_a_hundredth_of_malformed_rows_are_refused(plain_folder: Path, tmp_path: Path):
    data = tmp_path / "rows.jsonl"
    good, long = ['{"prompt": "ab"}'] * 1000, [json.dumps({"prompt": "a" * 40})] * 300
    data.write_text("\n".join([*good, *long, *["{"] * 13]))
    assert len(prepared_rows(skipping(plain_folder, data, limit=30)).skipped) == 313
    data.write_text("\n".join([*good, *long, *["{"] * 14]))
    with pytest.raises(DataError, match=r"14 of the 1314 rows are malformed: more than 1% are not skipped"):
        prepared_rows(skipping(plain_folder, data, limit=30))
    data.write_text("{\n" * 3)
    with pytest.raises(DataError, match=r"no row that can be used: .*rows\.jsonl:1 not valid JSON"):
        prepared_rows(skipping(plain_folder, data))


def test_max_rows_takes_the_first_rows_that_can_be_used(plain_folder: Path, plain: Tokenizer, tmp_path: Path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a"}\n{\n{"prompt": "b"}\n{"prompt": "c"}\n')
    found = skipping(plain_folder, data)
    few = found.model_copy(update={"data": found.data.model_copy(update={"max_rows": 2})})
    assert prompts_of(prepared_rows(few), plain) == ["a", "b"]


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


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        (TEMPLATE, False),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", True),
        ("{% for m in messages %}{% if m.role == 'user' %}[I]{{ m.content }}[/I]{% else %}{{ m.content }}"
         "{% endif %}{% endfor %}", False),
    ],
    ids=["opens the turn", "does not", "needs no opening"],
)  # fmt: skip
def test_a_template_that_leaves_the_opening_of_its_turn_to_the_model_is_refused(
    plain_folder: Path, tmp_path: Path, template: str, refused: bool
):
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(plain_folder, model)
    (model / "chat_template.jinja").write_text(template)
    data.write_text(json.dumps({"prompt": [USER]}) + "\n")
    if refused:
        with pytest.raises(
            DataError, match=r"before an answer it writes '<\|assistant\|>', after a prompt nothing"
        ):
            prepared_rows(config(model, data))
    else:
        prepared_rows(config(model, data))


@pytest.mark.parametrize(
    ("row", "template", "stops", "warned"),
    [
        ([USER], TEMPLATE, {}, False),
        ([USER], TEMPLATE.replace("{{ eos_token }}", "<|end|>"), {}, True),
        ([USER], TEMPLATE.replace("{{ eos_token }}", "<|end|>"), {"stop": ["<|end|>"]}, False),
        ([USER], "{{ raise_exception('system') }}", {}, False),
        ("hi", TEMPLATE.replace("{{ eos_token }}", ""), {}, False),
    ],
    ids=["ends", "does not", "a stop string", "refuses", "text"],
)
def test_a_template_that_ends_no_answer_is_warned_of(
    plain_folder: Path, tmp_path: Path, row: Any, template: str, stops: dict, warned: bool
):
    shutil.copytree(plain_folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": row}))
    sampling = {"max_completion_length": 8, **stops}
    found = config(tmp_path / "model", tmp_path / "rows.jsonl", sampling=sampling)
    said = endless(found, Tokenizer.from_folder(tmp_path / "model"))
    if warned:
        assert said.startswith(
            "nothing will stop the model: after an answer its chat template writes '<|end|>', and"
        )
        assert "('<eos>')" in said
    else:
        assert not said


@pytest.mark.parametrize(
    ("labels", "sentence"), [([True] * 3, "label true"), ([False] * 3, "label false"), ([True, False], "")]
)
def test_labels_of_one_kind_only_are_refused(
    plain_folder: Path, tmp_path: Path, labels: list[bool], sentence: str
):
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": "a", "completion": "b", "label": x}) + "\n" for x in labels)
    )
    kto = make_config(
        {"type": "kto", "models": {"actor": str(plain_folder)}, "data": {"train": str(data)}, "batch_size": 2,
         "total_iterations": 1, "output_dir": str(tmp_path / "runs")}
    )  # fmt: skip
    if sentence:
        with pytest.raises(
            DataError, match=rf"rows\.jsonl: all 3 rows have the {sentence}, but kto learns from both\."
        ):
            prepared_rows(kto)
    else:
        assert len(prepared_rows(kto)) == 2


# --- several sources -----------------------------------------------------------------------------------------


def sourced(folder: Path, base: Path, sizes: dict[str, int], weights: list[float], **data: Any) -> Any:
    """A configuration with a file for each letter, which has so many rows."""
    for letter, size in sizes.items():
        rows = (json.dumps({"prompt": letter * (i + 1)}) for i in range(size))
        (base / f"{letter}.jsonl").write_text("".join(f"{row}\n" for row in rows))
    train = {str(base / f"{x}.jsonl"): weight for x, weight in zip(sizes, weights, strict=True)}
    document = config(folder, base / "x").model_dump(mode="json")
    return make_config({**document, "data": {"train": train, **data}})


def test_sources_are_mixed_by_weight_and_each_is_passed_through_in_its_own_epochs(
    plain_folder: Path, plain: Tokenizer, tmp_path: Path
):
    found = sourced(plain_folder, tmp_path, {"a": 4, "b": 10}, [3, 1])
    rows = prepared_rows(found)
    assert rows.sources == (4, 10)
    prompts = prompts_of(rows, plain)
    stream = [prompts[found.row_of(rows, sample)] for sample in range(40)]
    assert [text[0] for text in stream].count("a") == 30
    of_a, of_b = [t for t in stream if t[0] == "a"], [t for t in stream if t[0] == "b"]
    for first in range(0, 28, 4):
        assert sorted(of_a[first : first + 4]) == ["a", "aa", "aaa", "aaaa"]
    assert len(set(of_b)) == 10, "10 of 40 samples: one epoch"
    assert [found.row_of(rows, 39 - n) for n in range(40)][::-1] == [found.row_of(rows, n) for n in range(40)]


def test_one_source_in_a_list_is_the_same_as_its_path(plain_folder: Path, tmp_path: Path):
    listed = sourced(plain_folder, tmp_path, {"a": 7}, [2.0])
    alone = config(plain_folder, tmp_path / "a.jsonl")
    rows = prepared_rows(listed)
    assert prepared_rows(alone).key == rows.key
    assert [listed.row_of(rows, n) for n in range(20)] == [alone.row_of(rows, n) for n in range(20)]


def test_max_rows_is_of_each_source_and_a_source_without_rows_is_refused(
    plain_folder: Path, plain: Tokenizer, tmp_path: Path
):
    few = sourced(plain_folder, tmp_path, {"a": 4, "b": 3}, [1, 1], max_rows=2)
    assert prompts_of(prepared_rows(few), plain) == ["a", "aa", "b", "bb"]
    none = sourced(plain_folder, tmp_path, {"a": 4, "b": 0}, [1, 1])
    with pytest.raises(DataError, match=r"b\.jsonl: has no row that can be used"):
        prepared_rows(none)


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ([], "data.train: "),
        ("", "data.train: "),
        ({"a": 0}, "data.train.a: input should be greater than 0"),
        ({}, "data.train: "),
        (["a", ""], "data.train.1: "),
        (5, "data.train: "),
        (
            [{"path": "a", "weight": 3}],
            "data.train: give a path, a list of paths, or {path: weight}, found [{'path': 'a', 'weight': 3}].",
        ),
    ],
)
def test_faults_of_sources_are_named(plain_folder: Path, tmp_path: Path, train: Any, sentence: str):
    document = config(plain_folder, tmp_path / "x").model_dump(mode="json")
    with pytest.raises(ConfigError) as caught:
        make_config({**document, "data": {"train": train}})
    assert str(caught.value).startswith(sentence)


def test_paths_of_sources_become_absolute(plain_folder: Path, tmp_path: Path):
    document = config(plain_folder, tmp_path / "x").model_dump(mode="json")
    found = make_config({**document, "data": {"train": ["a.jsonl", "/b"]}})
    assert [source.path for source in resolve_paths(found, tmp_path).data.sources] == [
        str(tmp_path / "a.jsonl"),
        "/b",
    ]
    weighted = resolve_paths(make_config({**document, "data": {"train": {"a.jsonl": 3, "/b": 1}}}), tmp_path)
    assert weighted.data.train == {str(tmp_path / "a.jsonl"): 3, "/b": 1}


def test_a_file_that_has_two_weights_is_refused(plain_folder: Path, tmp_path: Path):
    document = config(plain_folder, tmp_path / "x").model_dump(mode="json")
    twice = make_config({**document, "data": {"train": {"a.jsonl": 3, "./a.jsonl": 1}}})
    with pytest.raises(ConfigError, match=r"data\.train names .*a\.jsonl twice\. Give it one weight\."):
        resolve_paths(twice, tmp_path)
