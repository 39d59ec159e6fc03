"""Run folders: a name is used once, fresh names never clash, one process writes at a time."""

import asyncio
import json
import os
import shutil
import stat
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from prefect_rlhf.flows.commands.runs import export, run, ui
from prefect_rlhf.flows.pipeline import Demo, settle_seed
from prefect_rlhf.flows.run.run_folder import (
    existing_run_folder,
    exported_step,
    new_run_folder,
    open_run,
    run_folder_of,
    taken,
)
from prefect_rlhf.flows.run.runs import carry_out
from prefect_rlhf.flows.run.training import Restarts, next_attempt
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config


def config(tmp_path, **more):
    fields = {
        "type": "sft",
        "models": {"actor": "m"},
        "data": {"train": "d.jsonl"},
        "total_iterations": 1,
        "output_dir": str(tmp_path / "runs"),
    }
    return make_config({**fields, **more})


def test_a_name_in_use_is_refused_with_the_way_to_go_on(tmp_path):
    folder = new_run_folder(config(tmp_path, name="a"))
    with pytest.raises(ConfigError, match=r"name='a' is in use.*--resume"):
        new_run_folder(config(tmp_path, name="a"))
    assert existing_run_folder(folder) == (folder, config(tmp_path, name="a"))
    assert [path.name for path in folder.parent.iterdir()] == ["a"]


WRITTEN_BEFORE = {
    "type": "sft",
    "models": {"actor": "m"},
    "data": {"train": "d.jsonl", "column_map": {}, "max_prompt_tokens": 1024, "on_bad_row": "refuse"},
    "snapshot_every": "auto",
    "snapshot_max_s": 1800.0,
    "runtime": {"deadline_floor_s": 120.0, "deadline_factor": 20.0, "io_floor_s": 300.0},
    "total_iterations": 1,
}
"""Some of what commit 747d428a has written into config.json."""


def test_a_run_folder_of_before_is_refused_with_the_version_that_resumes_it(tmp_path):
    folder = new_run_folder(config(tmp_path, name="a"))
    (folder / "format").unlink()
    (folder / "config.json").write_text(json.dumps(WRITTEN_BEFORE))
    refused = "has the format 1 of run folders, .* exports format 4. Use prefect-rlhf as of commit 747d428a"
    for open_it in (existing_run_folder, lambda folder: open_run(None, str(folder))):
        with pytest.raises(ConfigError, match=refused):
            open_it(folder)
    with pytest.raises(ConfigError, match=refused):
        open_run(config(tmp_path, name="a", resume="auto"))
    with pytest.raises(ConfigError, match=refused):
        run("sft", resume=folder)
    with pytest.raises(ConfigError, match=refused):
        export(folder, tmp_path / "model")


def test_a_run_folder_of_format_2_names_the_version_with_those_keys(tmp_path):
    folder = new_run_folder(config(tmp_path, name="a"))
    (folder / "format").write_text("2\n")
    with pytest.raises(
        ConfigError, match=r"has the format 2 of run folders, .* as of commit cafffedf, or start"
    ):
        existing_run_folder(folder)


@pytest.mark.parametrize("number", ["5", "", "x" * 99])
def test_a_run_folder_of_a_later_version_is_refused(tmp_path, number):
    folder = new_run_folder(config(tmp_path, name="a"))
    (folder / "format").write_text(number)
    with pytest.raises(
        ConfigError, match=f"Use prefect-rlhf whose run folders have format {number[:9]}, or start"
    ):
        existing_run_folder(folder)


def test_only_its_owner_reads_a_run_folder(tmp_path):
    folder = new_run_folder(config(tmp_path, name="a"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another account")
@pytest.mark.parametrize("theirs", ["folder", "config"])
def test_a_run_folder_of_another_account_is_not_resumed_and_opens_no_server(tmp_path, theirs):
    folder = new_run_folder(config(tmp_path, name="a"))
    assert open_run(None, str(folder))[0] == folder
    os.chown(folder / {"folder": ".", "config": "config.json"}[theirs], 65534, 65534)
    words = r"belongs to another account \(user id 65534\), and a run folder names code .* copy the folder \(cp -r\)"
    with pytest.raises(ConfigError, match=words):
        open_run(None, str(folder))
    with pytest.raises(ConfigError, match=words):
        open_run(config(tmp_path, name="a", resume="auto"))
    (folder / "prefect").mkdir()
    with pytest.raises(ConfigError, match=words):
        ui(folder)
    with pytest.raises(ConfigError, match=words):
        run("sft", resume=folder)
    shutil.copytree(folder, tmp_path / "mine")
    assert open_run(None, str(tmp_path / "mine"))[0] == tmp_path / "mine"


def test_a_run_folder_appears_with_its_configuration(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        new_run_folder(config(tmp_path, name="a"))
    assert not list((tmp_path / "runs").iterdir())


def test_runs_without_a_name_get_fresh_folders_even_in_one_second(tmp_path):
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    folders = [new_run_folder(config(tmp_path), now) for _ in range(3)]
    assert [f.name for f in folders] == [f"sft-20260102-030405{end}" for end in ("", "-1", "-2")]


def test_only_one_run_holds_a_folder(tmp_path):
    folder = new_run_folder(config(tmp_path))
    with taken(folder), pytest.raises(ConfigError, match="in use by a run"), taken(folder):
        pass
    with taken(folder):
        pass


def test_a_run_goes_on_as_it_began_but_on_the_cluster_that_is_there_now(tmp_path):
    began = config(tmp_path, name="a", cluster={"address": "tcp://127.0.0.1:1111"})
    folder = new_run_folder(began)
    now = config(tmp_path, name="a", total_iterations=9, cluster={"address": "tcp://127.0.0.1:2222"})
    assert open_run(now, str(folder)) == (folder, began.model_copy(update={"cluster": now.cluster}))
    assert open_run(None, str(folder)) == (folder, began)


@pytest.mark.parametrize("resume", ["auto", "FOLDER"])
def test_a_configuration_may_name_the_run_to_go_on_with(tmp_path, resume):
    began = config(tmp_path, name="a")
    now = config(tmp_path, name="a", resume=resume.replace("FOLDER", str(tmp_path / "runs" / "a")))
    moved = now.model_copy(
        update={"cluster": now.cluster.model_copy(update={"address": "tcp://127.0.0.1:1"})}
    )
    if resume == "auto":
        assert open_run(moved)[0] is None  # there is no such run yet
    folder = new_run_folder(began)
    assert open_run(moved) == (folder, began.model_copy(update={"cluster": moved.cluster}))


def test_a_demo_of_another_seed_is_not_taken_for_this_one(tmp_path):
    assert settle_seed(tmp_path, 1) == 1
    assert settle_seed(tmp_path, 1) == settle_seed(tmp_path, None) == 1
    with pytest.raises(ConfigError, match=r"holds the demo of seed 1\. For seed 0 name another folder"):
        settle_seed(tmp_path, 0)


def refused(tmp_path, folder, begun):
    """A run that is refused, before or after its first attempt; gives its folder."""
    with suppress(ConfigError), run_folder_of(config(tmp_path, name="a"), folder) as place:
        if begun:
            next_attempt(place)
        raise ConfigError("no such cluster")
    return place


def test_a_stray_file_among_the_attempts_is_none(tmp_path):
    assert next_attempt(tmp_path) == 1
    (tmp_path / "attempts" / ".DS_Store").touch()
    assert next_attempt(tmp_path) == 2


@pytest.mark.parametrize("text", ["", "[", "{}", "null", '{"iterations": "x"', "\ud800"])
def test_damaged_records_of_a_run_count_as_none(tmp_path, text):
    for name in ("restarts.json", "summary.json"):
        (tmp_path / name).write_bytes(text.encode(errors="surrogatepass"))
    assert Restarts(tmp_path, 3).begin(started_again=True) == 1
    assert exported_step(tmp_path) is None


def test_a_damaged_demo_says_which_file_to_mend(tmp_path):
    (tmp_path / "seed").write_text("one")
    with pytest.raises(ConfigError, match=r"seed: not the seed of a demo: .*Remove it"):
        settle_seed(tmp_path, 1)
    summary = tmp_path / "stages" / "sft" / "summary.json"
    summary.parent.mkdir(parents=True)
    summary.write_text("{")
    stage = config(tmp_path, name="sft", output_dir=str(tmp_path / "stages"))
    with pytest.raises(ConfigError, match=r"summary\.json:1: not valid JSON.*Remove it"):
        asyncio.run(Demo(tmp_path, 1, "").run(stage))


def test_only_a_new_run_that_never_began_leaves_no_folder(tmp_path):
    assert not refused(tmp_path, None, begun=False).exists()
    began = refused(tmp_path, None, begun=True)
    assert (began / "config.json").exists()
    interrupted = new_run_folder(config(tmp_path, name="b"))
    assert refused(tmp_path, interrupted, begun=False).exists()


def test_a_faulty_configuration_leaves_no_run_folder(tmp_path):
    with pytest.raises(ConfigError, match="Name a Hugging Face model folder"):
        asyncio.run(carry_out("sft", config(tmp_path, name="a")))
    assert not (tmp_path / "runs").exists()


def test_a_run_of_another_type_is_not_continued(tmp_path):
    folder = new_run_folder(config(tmp_path, name="a"))
    with pytest.raises(
        ConfigError, match=r"runs/a is a run of type 'sft', and this flow carries out 'ppo'\. Continue"
    ):
        asyncio.run(carry_out("ppo", None, str(folder)))


def test_a_new_folder_that_another_run_has_resumed_already_is_not_removed(tmp_path):
    def begin():
        with run_folder_of(config(tmp_path), None) as folder:
            made.append(folder)
            other.enter_context(taken(folder))
            with taken(folder):
                pytest.fail("two have it")

    made = []
    with ExitStack() as other:
        with pytest.raises(ConfigError, match="in use"):
            begin()
        assert made[0].is_dir()
