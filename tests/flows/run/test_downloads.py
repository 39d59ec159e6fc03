"""A run whose model and rows are named by their ids on a Hub."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.flows.commands.answers import _model_folder
from prefect_rlhf.flows.run.downloads import REVISIONS
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.run_folder import CONFIG, existing_run_folder, new_run_folder
from prefect_rlhf.flows.run.run_identity import accept_changes, differences, keep_identity
from prefect_rlhf.rlhf_tasks.algorithms.configurations import load_config, override
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import base_of
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.flows.checked_files import model_folder
from tests.flows.run.test_run_identity import commit, snapshots_of
from tests.loopback_hub import READER, Hub


@pytest.fixture
def home(tmp_path):
    """The folder of the Hub's client."""
    return tmp_path / "home"


@pytest.fixture
def config(hub: Hub, document, tmp_path, monkeypatch):
    """A configuration of ids; the Hub has its model and its data set, whose card names two subsets."""
    hub.add_folder("org/model", tmp_path / "model")
    rows = {f"data/{split}-00000-of-00001.jsonl": f'{{"prompt": "{split}"}}\n' for split in ("train", "test")}
    hub.add("org/rows", rows, "dataset")
    document["models"] = {"actor": "org/model"}
    document["data"] = {"train": "org/rows"}
    document["evaluation"] = {"data": "org/rows:test"}
    document["name"] = "mine"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    return load_config(tmp_path / "run.yaml")


def begun(config):
    """The folder of a run of a configuration, with a commit."""
    prepared = prepare(config)
    folder = new_run_folder(config)
    keep_identity(folder, prepared)
    snapshots = snapshots_of(folder, prepared)
    snapshots.latest()
    commit(snapshots, prepared, folder, 0)
    return folder, prepared


def test_ids_stay_in_the_configuration_and_ranks_get_folders(hub: Hub, config, home):
    with hub.used_here(home):
        folder, prepared = begun(config)
    assert (config.models.actor, config.data.train) == ("org/model", "org/rows")
    kept = json.loads((folder / CONFIG).read_text())
    assert (kept["models"]["actor"], kept["data"]["train"]) == ("org/model", "org/rows")
    newest = hub.repositories["model", "org/model"].refs["main"]
    for role in prepared.config.roles().values():
        assert role.folder == str(home / "hub" / "models--org--model" / "snapshots" / newest)
    recorded = json.loads((folder / REVISIONS).read_text())
    assert recorded["model org/model"]["commit"] == newest
    assert recorded["dataset org/rows"]["files"] == ["data/train-00000-of-00001.jsonl"]
    assert recorded["dataset org/rows:test"]["files"] == ["data/test-00000-of-00001.jsonl"]
    assert len(prepared.rows) == 1


def test_a_run_that_continues_has_its_commits_without_a_request_though_main_moves(hub: Hub, config, home):
    with hub.used_here(home):
        folder, prepared = begun(config)
        hub.add("org/model", {"generation_config.json": "{}"})
        hub.add("org/rows", {"data/train-00000-of-00001.jsonl": '{"prompt": "others"}\n'}, "dataset")
        hub.requests.clear()
        _, kept = existing_run_folder(folder)
        again = prepare(kept, folder)
        assert hub.requests == []
        assert differences(folder, again) == ()
        assert again.config == prepared.config
        assert prepare(config).pins != prepared.pins, "a new run begins with what is newest"


def test_a_cache_that_has_moved_is_no_change(hub: Hub, config, home, tmp_path):
    with hub.used_here(home):
        folder, _ = begun(config)
    home.rename(tmp_path / "elsewhere")
    with hub.used_here(tmp_path / "elsewhere"):
        assert differences(folder, prepare(existing_run_folder(folder)[1], folder)) == ()


def test_another_revision_is_a_change_that_is_named_and_may_be_accepted(hub: Hub, config, home):
    with hub.used_here(home):
        folder, _ = begun(config)
        before = hub.repositories["model", "org/model"].refs["main"]
        after = hub.add("org/model", {"generation_config.json": "{}"})
        other = override(existing_run_folder(folder)[1], ["models.actor=org/model@main"])
        prepared = prepare(other, folder)
        (change,) = differences(folder, prepared)
        assert change == f'models.actor "org/model@{before}" (now "org/model@{after}")'
        accept_changes(folder, prepared)
        _, kept = existing_run_folder(folder)
        assert kept.models.actor == "org/model@main"
        hub.requests.clear()
        assert differences(folder, prepare(kept, folder)) == ()
        assert hub.requests == []


def test_a_folder_of_the_same_name_wins(hub: Hub, config, home, tmp_path):
    model_folder((tmp_path / "org").mkdir() or tmp_path / "org" / "model")
    with hub.used_here(home):
        loaded = load_config(tmp_path / "run.yaml")
        assert loaded.models.actor == str(tmp_path / "org" / "model")
        assert "model org/model" not in prepare(loaded).pins


@pytest.fixture
def adapter(hub: Hub, config, tmp_path):
    """A folder of an adapter as peft writes it, whose base model is an id on the Hub."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    described = {
        "peft_type": "LORA",
        "r": 1,
        "lora_alpha": 2,
        "base_model_name_or_path": "org/model",
        "revision": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    halves = {name.format("A"): np.ones((1, 16), np.float32), name.format("B"): np.ones((16, 1), np.float32)}
    save_file(halves, folder / "adapter_model.safetensors")
    hub.add_folder("me/adapter", folder)
    return folder


def test_an_adapter_brings_the_base_model_that_it_names(hub: Hub, config, adapter, home, tmp_path):
    before = hub.repositories["model", "org/model"].refs["main"]
    for named in (str(adapter), "me/adapter"):
        with hub.used_here(home):
            continued = override(
                config, [f"models.actor={named}", f"name={Path(named).name}-of-{len(named)}"]
            )
            folder, prepared = begun(continued)
            newest = hub.add("org/model", {"generation_config.json": json.dumps({"top_k": len(named)})})
            assert prepared.pins["model org/model"].commit == before
            assert json.loads((folder / REVISIONS).read_text())["model org/model"]["commit"] == before
            actor = prepared.config.roles()["actor"].folder
            base = home / "hub" / "models--org--model" / "snapshots" / before
            assert base_of(actor).resolve() == base
            hub.requests.clear()
            again = prepare(existing_run_folder(folder)[1], folder)
            assert (differences(folder, again), hub.requests) == ((), [])
            assert json.loads((adapter / "adapter_config.json").read_text())["revision"] is None
        moved = home.rename(tmp_path / f"moved-{len(named)}")
        with hub.used_here(moved):
            assert differences(folder, prepare(existing_run_folder(folder)[1], folder)) == ()
        moved.rename(home)
        before = newest


def test_another_revision_of_an_adapter_s_base_is_a_change(hub: Hub, config, adapter, home):
    with hub.used_here(home):
        folder, prepared = begun(override(config, [f"models.actor={adapter}"]))
        before = prepared.pins["model org/model"].commit
        after = hub.add("org/model", {"generation_config.json": "{}"})
        described = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps(described | {"revision": "main"}))
        (change, *_) = differences(folder, prepare(existing_run_folder(folder)[1], folder))
    assert f"org/model@{before}" in change
    assert f"org/model@{after}" in change


def test_an_adapter_with_a_base_that_nobody_has_is_refused(hub: Hub, config, adapter, home):
    described = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps(described | {"base_model_name_or_path": "org/none"})
    )
    with hub.used_here(home), pytest.raises(ConfigError, match="has no model org/none that you may read"):
        prepare(override(config, [f"models.actor={adapter}"]))


@pytest.mark.parametrize("named", ["org/model", "me/adapter", "adapter"])
def test_to_validate_no_weights_are_downloaded(hub: Hub, config, adapter, home, tmp_path, capsys, named):
    command = ["config", "validate", str(tmp_path / "run.yaml"), f"models.actor={named}"]
    with hub.used_here(home):
        assert run_command(command) == 0, capsys.readouterr().err
        told = "".join(capsys.readouterr())
        assert {name for name in hub.downloads() if name.endswith(".safetensors")} == set()
        assert "are not here; a run downloads and checks them when it starts." in told
        prepare(override(config, [f"models.actor={named}"]))
        assert "model.safetensors" in hub.downloads()
        assert run_command(command) == 0
    assert "are not here" not in "".join(capsys.readouterr()), "what the cache has is checked"


def test_to_plan_no_weights_are_downloaded(hub: Hub, config, home, tmp_path, capsys):
    with hub.used_here(home):
        assert (
            run_command(
                ["plan", "--config", str(tmp_path / "run.yaml"), "--mode", "heuristic", "--no-compare"]
            )
            == 0
        )
    assert "model.safetensors" not in hub.downloads()
    assert "config.json" in hub.downloads()
    capsys.readouterr()


def test_init_writes_ids_and_downloads_no_weights(hub: Hub, config, home, tmp_path, capsys):
    command = [
        "init",
        "--model",
        "org/model",
        "--data",
        "org/rows",
        "--out",
        str(tmp_path / "new" / "run.yaml"),
    ]
    (tmp_path / "new").mkdir()
    with hub.used_here(home):
        assert run_command(command) == 0, capsys.readouterr().err
    written = yaml.safe_load((tmp_path / "new" / "run.yaml").read_text())
    assert (written["models"]["actor"], written["data"]["train"]) == ("org/model", "org/rows")
    assert "model.safetensors" not in hub.downloads()
    capsys.readouterr()


def test_a_model_to_try_is_named_by_its_id_too(hub: Hub, config, home, capsys):
    with hub.used_here(home), _model_folder(Path("org/model")) as folder:
        assert (folder / "model.safetensors").is_file()
    out, err = capsys.readouterr()
    assert out == "", "standard output is the model's"
    assert "downloaded org/model@" in err


def test_rows_to_answer_need_their_split_named(hub: Hub, config, home):
    with hub.used_here(home), pytest.raises(ConfigError, match="which split of org/rows is meant"):
        prepare(override(config, ["evaluation.data=org/rows"]))


def test_the_token_stands_in_no_file_and_no_output(hub: Hub, config, home, capsys):
    hub.add("org/model", {}, private=True)
    with hub.used_here(home, READER):
        folder, _ = begun(config)
    files = [path for path in (*folder.rglob("*"), *home.rglob("*")) if path.is_file()]
    assert files
    assert not [path for path in files if READER.encode() in path.read_bytes()]
    assert READER not in "".join(capsys.readouterr())


def test_what_is_wrong_with_an_id_is_one_sentence(hub: Hub, config, home, tmp_path, capsys):
    def said(*changes: str) -> str:
        with hub.used_here(home):
            assert run_command(["config", "validate", str(tmp_path / "run.yaml"), *changes]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    assert "has no model org/modle that you may read. It has org/model." in said("models.actor=org/modle")
    assert "has no revision 'v7'. It has main." in said("models.actor=org/model@v7")
    assert "org/rows has no split 'dev'. Its splits are train, test." in said("data.train=org/rows:dev")
    assert "has no data set org/none that you may read" in said("data.train=org/none")
    pasted = "https://huggingface.co/datasets/org/rows"
    for key in ("data.train", "evaluation.data"):
        assert f"{pasted}: neither a name of a data set nor a path. A data set on the" in said(
            f"{key}={pasted}"
        )
    assert "https://huggingface.co/org/model" in (
        err := said("models.actor=https://huggingface.co/org/model")
    )
    assert "is named ORG/NAME." in err
