"""The demo's data: disjoint sets, honest sloppiness, a tokenizer and a model that transformers reads too."""

import json
from pathlib import Path
from random import Random

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from prefect_rlhf.flows.demo import (
    SIZES,
    near_miss,
    preference_pairs,
    sloppy,
    write_demo_data,
    write_model_folder,
)
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("reasoning_gym")
    folder = tmp_path_factory.mktemp("demo")
    write_demo_data(folder, seed=3)
    return folder


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_sets_have_their_sizes_and_share_no_word(data: Path):
    words = {name: [row["prompt"] for row in read(data / f"{name}.jsonl")] for name in SIZES}
    assert {name: len(rows) for name, rows in words.items()} == SIZES
    assert len({word for rows in words.values() for word in rows}) == sum(SIZES.values())


def test_answers_are_the_words_backward(data: Path):
    for row in read(data / "test.jsonl"):
        assert row["answer"] == row["prompt"].removesuffix(">")[::-1]


def test_demonstrations_are_right_or_have_their_last_two_letters_swapped(data: Path):
    swapped = changed = 0
    for row in read(data / "demonstrations.jsonl"):
        right = row["prompt"].removesuffix(">")[::-1]
        assert row["completion"] in (right, right[:-2] + right[-1] + right[-2])
        changed += right[-1] != right[-2]
        swapped += row["completion"] != right
    assert 0.5 < swapped / changed < 0.7


def test_the_same_seed_gives_the_same_bytes(data: Path, tmp_path: Path):
    write_demo_data(tmp_path / "again", seed=3)
    write_demo_data(tmp_path / "other", seed=4)
    for file in sorted(data.glob("*.jsonl")):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
        assert (tmp_path / "other" / file.name).read_bytes() != file.read_bytes()


def test_transformers_reads_the_same_tokenizer_and_a_model_of_820_864_parameters(tmp_path: Path):
    write_model_folder(tmp_path)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "regal>é\n ü"
    assert ours.encode(text) == theirs(text).input_ids
    assert ours.decode([*ours.encode(text), ours.eos_id]) == text
    assert ours.size == len(theirs) == 260
    assert (ours.eos_id, ours.pad_id) == (theirs.eos_token_id, theirs.pad_token_id)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(parameter.numel() for parameter in model.parameters()) == 820_864
    assert read_shape(tmp_path).vocab == 260


def test_sloppy_swaps_only_the_last_two_letters():
    results = {sloppy("abcd", Random(seed)) for seed in range(50)}
    assert results == {"abcd", "abdc"}


def test_pairs_have_a_right_and_a_wrong_answer_with_few_near_misses():
    samples = [
        {"prompt": f"p{i}", "completion": text, "score": float(text == "abcd")}
        for i in range(40)
        for text in ("abcd", "abdc" if i < 20 else "xy", "abcd")
    ]
    pairs = preference_pairs(samples, 24, seed=0)
    assert len(pairs) == 24
    assert all(pair["chosen"] == "abcd" and pair["rejected"] != "abcd" for pair in pairs)
    assert sum(near_miss(pair["chosen"], pair["rejected"]) for pair in pairs) == 6
    assert pairs == preference_pairs(samples, 24, seed=0)


def test_prompts_with_answers_of_one_kind_give_no_pair():
    samples = [
        {"prompt": "p", "completion": "a", "score": 1.0},
        {"prompt": "q", "completion": "b", "score": 0.0},
    ]
    assert preference_pairs(samples, 10, seed=0) == []


def test_near_misses():
    assert near_miss("abc", "acb")
    assert near_miss("abc", "abx")
    assert not near_miss("abc", "ab")
    assert not near_miss("abc", "xyc")
