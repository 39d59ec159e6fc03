"""Data sets as a run reads them: checked whole, kept, mixed of several sources, with the rows that are left out."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config, resolve_paths
from prefect_rlhf.rlhf_tasks.algorithms.examples import endless, prepared_rows, prompt_tokens, read_examples
from prefect_rlhf.rlhf_tasks.data.dataset import DataError, PlacedRow
from prefect_rlhf.rlhf_tasks.data.rows import (
    pair_example,
)
from prefect_rlhf.rlhf_tasks.data.token_file import ROWS, SKIPPED, TokenFile
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.system.child_pipes import Lines
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.rlhf_tasks.algorithms.test_examples import ANSWER, TEMPLATE, USER, text


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
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.algorithms.examples.SAMPLED", 3)
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.data.token_file.SAMPLED", 3)
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
    placed = [PlacedRow(0, line, f"rows:{line}", pair, pair) for line in (1, 2)]
    (_, first), (_, last) = read_examples(pair_example, placed, tokenizer)
    assert first == last
    assert requests == [6]


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
