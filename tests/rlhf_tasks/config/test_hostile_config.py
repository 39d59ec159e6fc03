"""Configurations that are meant to break what reads them: each ends in one sentence, at once."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from prefect_rlhf.planner.pricing.device_classes import read_cluster
from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    ConfigError,
    load_config,
    make_config,
    read_assignments,
)
from prefect_rlhf.rlhf_tasks.config.files import MAX_KEYS, MOST_YAML_BYTES
from tests.rlhf_tasks.algorithms.test_configurations import ppo

DIGITS = "9" * 6000


def said(call, *arguments: Any) -> str:
    """The sentence with which a reader refuses."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    sentence = str(caught.value)
    assert sentence.isprintable(), repr(sentence)
    assert len(sentence) < 1200
    return sentence


YAML = {
    "nested": ("seed: 1\na: " + "[" * 900, ":2: not valid YAML: nested more than 64 deep."),
    "nested blocks": ("\n".join(" " * i + "a:" for i in range(900)), "nested more than 64 deep."),
    "a long number": (f"seed: 1\nbatch_size: {DIGITS}", ":2: not valid YAML: Exceeds the limit (4300"),
    "a long hexadecimal": (f"type: 0x{DIGITS}", "rollout, found a number of 24000 bits."),
    "a tag that lies": ("seed: 1\n\ngamma: !!float x", ":3: not valid YAML: could not convert string"),
    "an empty number": ("seed: !!int ''", ":1: not valid YAML: string index out of range."),
    "a tag of no value": ("seed: !!bool maybe", ":1: not valid YAML: 'maybe' is not there."),
    "a set": ("seed: !!set {a, b}", ":1: not valid YAML: could not determine a constructor for"),
    "itself": ("seed: &a [*a]", ":1: not valid YAML: an alias refers to a value that contains it."),
    "half a character": ('seed: 1\nname: "\\ud800"', ":2: not valid YAML: half of a surrogate pair"),
    "a list as a key": ("? [a]\n: 1", ":1: not valid YAML: a key is a list or mapping."),
    "a merge key": ("a: &a {x: 1}\nb: {<<: *a, y: 2}", ":2: not valid YAML: no key may be '<<': write out"),
    "a NUL": ("seed: 1\0", "not valid YAML: unacceptable character #x0000"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", YAML)
def test_hostile_yaml_is_refused_with_its_line(tmp_path: Path, case: str):
    content, sentence = YAML[case]
    path = tmp_path / "run.yaml"
    path.write_text(content)
    found = said(load_config, path)
    assert sentence in found
    assert found.startswith(str(path)) or ".yaml" not in sentence


def test_a_date_is_text_like_any_other(tmp_path: Path):
    assert "found '2001-13-45'" in said(make_config, ppo(seed="2001-13-45"))
    path = tmp_path / "run.yaml"
    path.write_text(
        "type: sft\nname: 2001-13-45\nmodels: {actor: a}\ndata: {train: d}\ntotal_iterations: 1\n"
    )
    assert load_config(path).name == "2001-13-45"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("keys", [40_000, pytest.param(400_000, marks=pytest.mark.whole)])
def test_many_keys_are_refused_at_once(tmp_path: Path, keys: int):
    path = tmp_path / "run.yaml"
    path.write_text("type: sft\n" + "".join(f"k{i}: 0\n" for i in range(keys)))
    found = said(load_config, path)
    assert (
        f":{MAX_KEYS + 1}: not valid YAML: more than {MAX_KEYS} keys" in found
        or f"more than {MOST_YAML_BYTES:,} bytes" in found
    )


def test_a_measured_distribution_of_thousands_of_lengths_is_taken(tmp_path: Path):
    lengths = dict.fromkeys(range(1, 4097), 1 / 4096)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(ppo(planning={"new_tokens": lengths})))
    assert load_config(path).planning.new_tokens == lengths


@pytest.mark.parametrize("faulty", ["seed=!!float x", "seed=" + "[" * 3000, f"seed={DIGITS}", "seed=[\0"])
def test_hostile_overrides_are_refused(tmp_path: Path, faulty: str):
    path = tmp_path / "run.yaml"
    path.write_text("type: sft\n")
    assert said(load_config, path, [faulty]).startswith("override 'seed=")


SIZES = {
    "hosts": (
        {"cluster": {"n_hosts": 10**9}},
        "cluster.n_hosts: input should be less than or equal to 131072",
    ),
    "devices": (
        {"cluster": {"devices_per_host": 10**9}},
        "cluster.devices_per_host: give auto, or ranks from 1 to 131072, found 1000000000",
    ),
    "both": ({"cluster": {"n_hosts": 10**5, "devices_per_host": 8}}, "are 800000 devices"),
    "a batch": ({"batch_size": 2**40}, "batch_size: input should be less than or equal to 1048576, found"),
    "a prompt": ({"data": {"train": "d", "max_prompt_tokens": 10**12}}, "data.max_prompt_tokens: input"),
    "an answer": ({"sampling": {"max_completion_length": 10**12}}, "sampling.max_completion_length: input"),
    "epochs": ({"num_ppo_epochs": 10**9}, "num_ppo_epochs: input should be less than or equal to 1000"),
    "iterations": ({"total_iterations": 10**12}, "total_iterations: input should be less than"),
    "seconds": ({"reward_timeout_s": 1e300}, "reward_timeout_s: input should be less than"),
    "a huge number": ({"batch_size": 1 << 100_000}, "found a number of 100001 bits."),
    "a huge text": ({"gamma": "x" * 10**7}, "gamma: input should be a valid number"),
    "a huge list": ({"gamma": [[0] * 10**5] * 9}, "gamma: input should be a valid number"),
    "a huge key": ({"k\n" * 10**5: 1}, "unknown key"),
    "a name for no file": ({"name": "x" * 300}, "name: string should have at most 200 characters"),
    "strategies": (
        {"plan": {"actor_train": "0 d999999999"}},
        "plan.actor_train: d in '0 d999999999' is a number from 1 to 131072, found 999999999.",
    ),
    "hosts of a plan": (
        {"plan": {"a": "hosts 0-999"}, "cluster": {"devices_per_host": 10**5, "address": "x"}},
        "plan.a: n_hosts=1000 x devices_per_host=100000 are 100000000 devices",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_no_run_has_are_refused(case: str):
    changes, sentence = SIZES[case]
    assert sentence in said(make_config, ppo(**changes))


@pytest.mark.parametrize("entry", [None, 3, "rewards.py:judge", ["url"]])
def test_a_reward_that_is_no_entry_is_refused(entry: Any):
    assert "rewards" in said(make_config, {**ppo(), "rewards": [entry]})


def test_a_home_folder_of_nobody_is_refused(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("type: sft\nmodels: {actor: ~nobody-at-all/x}\ndata: {train: d}\ntotal_iterations: 1\n")
    assert "~nobody-at-all/x" in said(load_config, path)


@pytest.mark.timeout(60)
def test_a_cluster_file_of_a_thousand_million_hosts_is_refused(tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    path.write_text("n_hosts: 1000000000\ndevices_per_host: 8\ndevice: h100-sxm\n")
    assert "n_hosts: input should be less than or equal to 131072" in said(read_cluster, path)
    path.write_text("n_hosts: 1\ndevices_per_host: 8\ndevice: " + "[" * 900)
    assert f"{path}:3: not valid YAML: nested" in said(read_cluster, path)


@pytest.mark.timeout(60)
def test_a_plan_of_many_hosts_of_many_devices_is_refused(tmp_path: Path):
    path = tmp_path / "plan.yaml"
    path.write_text("a: hosts 0-999 d131072 t131072\n")
    assert f"{path}: a: n_hosts=1000 x devices_per_host=100000" in said(read_assignments, path, 100_000)
