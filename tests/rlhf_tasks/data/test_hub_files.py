"""Which files a name on a Hub means."""

import pytest

from prefect_rlhf.rlhf_tasks.config.hub_names import HubName, hub_data, hub_model
from prefect_rlhf.rlhf_tasks.data.hub_files import beside_weights, data_files, weights_of
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError

GSM8K = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
  - split: test
    path:
    - socratic/test-*
tags: [math]
---
# GSM8K
"""
OF_GSM8K = [
    f"{subset}/{split}-00000-of-00001.parquet"
    for subset in ("main", "socratic")
    for split in ("test", "train")
]


def named(text: str) -> HubName:
    name = hub_data(text)
    assert name is not None
    return name


def chosen(text: str, files: list[str], card: str = "", preferred: tuple[str, ...] = ("train",)) -> list[str]:
    return data_files(named(text), card, [*files, "README.md", ".gitattributes"], preferred)


def test_the_card_says_which_subsets_and_splits_there_are():
    assert chosen("openai/gsm8k:main", OF_GSM8K, GSM8K) == ["main/train-00000-of-00001.parquet"]
    assert chosen("openai/gsm8k:socratic:test", OF_GSM8K, GSM8K) == ["socratic/test-00000-of-00001.parquet"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "openai/gsm8k",
            "has several subsets. Write one of its subsets after a colon, as in openai/gsm8k:main: main, socratic.",
        ),
        ("openai/gsm8k:mian", "has no subset or split 'mian'"),
        ("openai/gsm8k:mian:test", "has no subset 'mian'"),
        ("openai/gsm8k:main:dev", "openai/gsm8k:main has no split 'dev'. Its splits are train, test."),
    ],
)
def test_a_subset_or_split_that_there_is_not_is_refused_with_those_that_there_are(text, said):
    with pytest.raises(ConfigError) as refusal:
        chosen(text, OF_GSM8K, GSM8K)
    assert said in str(refusal.value)


def test_rows_to_answer_are_of_a_split_that_is_named_if_there_are_several():
    with pytest.raises(ConfigError, match="which split of openai/gsm8k:main is meant"):
        chosen("openai/gsm8k:main", OF_GSM8K, GSM8K, ())
    assert chosen("org/one", ["held_out.jsonl"], preferred=()) == ["held_out.jsonl"]


@pytest.mark.parametrize(
    ("files", "split", "found"),
    [
        (["train.csv", "test.csv"], "train", ["train.csv"]),
        (["my-train-file.jsonl", "dev.jsonl"], "validation", ["dev.jsonl"]),
        (["retrained.jsonl"], "train", ["retrained.jsonl"]),
        (["data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet", "test.csv"], "train",
         ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
        (["data/random-00000-of-00001.parquet"], "random", ["data/random-00000-of-00001.parquet"]),
        (["training/a.json", "eval/b.json"], "test", ["eval/b.json"]),
        (["a/training_set/x.csv", "a/rest.csv"], "train", ["a/training_set/x.csv"]),
        (["b.parquet", "a.parquet", "dataset_info.json"], "train", ["a.parquet", "b.parquet"]),
    ],
)  # fmt: skip
def test_without_a_card_names_of_files_and_folders_say_it(files, split, found):
    assert chosen(f"org/name:{split}", files) == found


def test_a_default_subset_is_meant_and_a_folder_may_be_a_subset():
    card = """---
configs:
- config_name: small
  data_dir: small
- config_name: large
  data_dir: large
  default: true
---
"""
    files = ["small/train.jsonl", "large/train.jsonl", "large/test.jsonl"]
    assert chosen("org/name", files, card) == ["large/train.jsonl"]
    assert chosen("org/name:test", files, card) == ["large/test.jsonl"]
    assert chosen("org/name:small", files, card) == ["small/train.jsonl"]


@pytest.mark.parametrize(
    "configs",
    [
        "configs:\n# the small one\n- config_name: small\n# as it was\n  data_dir: small\n",
        "configs: [{config_name: small, data_dir: small}]\n",
        '"configs" :\n  - {config_name: small, data_dir: small}\n',
        "dataset_info:\n# columns\n- {name: a, name: b}\nconfigs:\n- {config_name: small, data_dir: small}\n",
    ],
)
def test_a_card_is_read_however_its_yaml_is_written(configs):
    card = f"\ufeff---\nlicense: mit\n{configs}tags: [a]\n---\n# Rows\n".replace("\n", "\r\n")
    assert chosen("org/name:small", ["small/train.jsonl", "train.jsonl"], card) == ["small/train.jsonl"]


def test_a_card_that_is_not_yaml_is_refused_and_one_without_a_header_says_nothing():
    with pytest.raises(ConfigError, match="org/name: the card: not valid YAML"):
        chosen("org/name", ["train.jsonl"], "---\nconfigs: [\n---\n")
    assert chosen("org/name", ["train.jsonl"], "---\n---\nText: a: b\n---\n") == ["train.jsonl"]


def test_a_glob_goes_through_folders_by_two_stars_alone():
    files = ["a/1.parquet", "a/b/2.parquet", "a/notes.txt"]
    assert chosen("hf://datasets/org/name/a/*.parquet", files) == ["a/1.parquet"]
    assert chosen("hf://datasets/org/name/**/*.parquet", files) == ["a/1.parquet", "a/b/2.parquet"]
    assert chosen("hf://datasets/org/name/a", files) == ["a/1.parquet", "a/b/2.parquet"]
    with pytest.raises(ConfigError, match=r"matches 'c/\*'. It has a/1.parquet, a/b/2.parquet"):
        chosen("hf://datasets/org/name/c/*", files)


def test_a_data_set_of_code_or_pictures_alone_is_refused():
    with pytest.raises(ConfigError, match=r"no JSONL, JSON, CSV or Parquet file \(it has .jpg, .py\)"):
        chosen("org/name", ["name.py", "images/1.jpg"])


def test_only_the_files_that_are_read_of_a_model_are_chosen():
    name = hub_model("org/model")
    assert name is not None
    files = [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja",
        "merges.txt", "README.md", "model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json",
        "original/params.json",
        "consolidated.safetensors", "model.gguf", "onnx/model.onnx", "onnx/README.md",
    ]  # fmt: skip
    assert beside_weights(files) == sorted(files[:7])
    assert weights_of(name, files, None) == ["model.safetensors"]
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors"}}
    shards = ["model-1.safetensors", "model-2.safetensors"]
    assert weights_of(name, [*files, *shards], index) == shards
    with pytest.raises(ConfigError, match="names files that it does not have"):
        weights_of(name, files, {"weight_map": {"a": "../secret"}})
    with pytest.raises(ConfigError, match=r"has no model.safetensors, but pytorch_model.bin"):
        weights_of(name, ["config.json", "pytorch_model.bin"], None)
