"""`prefect-rlhf replay`: what is no dump of this version is refused; a whole run that has stopped is replayed."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.flows.commands.replays import line_of, replay
from prefect_rlhf.rlhf_tasks.checkpoint.dumps import dumps_of, read_dump
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import MANIFEST, _checksum, write_manifest
from prefect_rlhf.rlhf_tasks.rank.anomalies import PACKAGE
from prefect_rlhf.rlhf_tasks.rank.replay import StepPair
from tests.committed import last_step
from tests.flows.marked_command import ROOT, outcome
from tests.rlhf_tasks.algorithms.registered import installed
from tests.rlhf_tasks.rank.test_anomalies import alone, prepared_run, site  # noqa: F401 - a fixture


@pytest.mark.parametrize(
    ("manifest", "sentence"),
    [
        (None, "is no dump: it has no manifest.json. Name a folder in anomalies/ of a run folder."),
        ({"schema_version": 7}, "manifest.json: schema 7; this version of prefect-rlhf reads 1."),
        ({"schema_version": 1}, "manifest.json: not a manifest: "),
    ],
)
def test_what_is_no_dump_of_this_version_is_refused_in_a_sentence(tmp_path, capsys, manifest, sentence):
    if manifest is not None:
        data = json.dumps(manifest).encode()
        (tmp_path / MANIFEST).write_bytes(data)
        (tmp_path / "manifest.json.sha256").write_bytes(_checksum(data))
    assert run_command(["replay", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert sentence in said


def test_a_line_has_each_value_once_or_recorded_and_replayed_with_the_first_that_differs():
    was = {"loss": 0.5, "grad_norm": 2.0, "skipped": 0.0}
    assert (
        line_of(StepPair(0, was, None, ""), 1e-4)
        == "step 0 (before the dump): loss 0.5  grad_norm 2  skipped 0"
    )
    same = line_of(StepPair(1, was, {**was, "loss": 0.500001}, ""), 1e-4)
    assert same == "step 1: loss 0.5 -> 0.500001  grad_norm 2  skipped 0"
    off = line_of(StepPair(1, was, {**was, "grad_norm": float("nan"), "skipped": 1.0}, "the loss"), 1e-4)
    assert off.endswith("grad_norm 2 -> nan  skipped 0 -> 1  DIFFERS: grad_norm  not finite: the loss")


def test_steps_metrics_and_the_anomaly_are_compared_too(site, tmp_path, capsys):  # noqa: F811
    with installed(site):
        *_, folder = of_run = prepared_run(tmp_path, 1, "0")
        alone(*of_run)
        (place,) = dumps_of(Path(folder))
        dump = read_dump(place, version(PACKAGE))
        assert dump.metrics
        for sentence, change in {
            "The first that is not as recorded: loss/tuned, ": {
                "metrics": {**dump.metrics, "loss/tuned": 9.0}
            },
            "The first that is not as recorded: the number of steps, 4 instead of 3.": {
                "steps": dump.steps[:3]
            },
            "The first that is not as recorded: the anomaly.": {"anomaly": f"{dump.anomaly[:-1]}1."},
            "All values are as recorded": {},
        }.items():
            write_manifest(place, dump.model_copy(update=change))
            replay(place)
            said = " ".join("".join(capsys.readouterr()).split())
            assert sentence in said
            assert "Replayed: iteration 1: actor: optimizer step 1 has loss nan" in said


def test_a_dump_of_another_version_one_that_has_changed_and_one_whose_code_is_gone_say_so_in_a_sentence(
    site,  # noqa: F811
    tmp_path,
    capsys,
):
    def said() -> str:
        assert run_command(["replay", str(place)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        return said

    with installed(site):
        *_, folder = of_run = prepared_run(tmp_path, 1, "0")
        alone(*of_run)
        (place,) = dumps_of(Path(folder))
        dump = read_dump(place, version(PACKAGE))
        write_manifest(place, dump.model_copy(update={"version": "9.9"}))
        assert "was written by prefect-rlhf 9.9, and this is " in said()
        write_manifest(place, dump.model_copy(update={"call": "gone"}))
        assert (
            "cannot be imported: AttributeError: module 'tuned.functions' has no attribute 'gone'" in said()
        )
        write_manifest(place, dump)
        (tmp_path / "actor").rename(tmp_path / "elsewhere")
        assert str(tmp_path / "actor") in said()
        (tmp_path / "elsewhere").rename(tmp_path / "actor")
        state = next(place.glob("state.*"))
        whole = state.read_bytes()
        state.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert f"{state}: its content has changed since it was written." in said()
        state.unlink()
        assert f"{state}: missing, or not a plain file." in said()


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_run_that_an_anomaly_stops_is_replayed_to_its_values(site, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    document = {
        "type": "tuned",
        "dtype": "float32",
        "models": {"actor": "actor"},
        "data": {"train": "rows.jsonl"},
        "batch_size": 12,
        "num_mini_batches": 4,
        "total_iterations": 3,
        "on_anomaly": "stop",
        "optimizer": {"learning_rate": 1e-3},
        "cluster": {"devices_per_host": 2},
        "plan": {"actor_train": "0-1 d2 m2"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    both = {"PYTHONPATH": f"{site}:{ROOT}"}
    run = ("run", "tuned", "--config", "run.yaml", "name=mine")
    status, said = outcome(tmp_path / "run.log", *run, **both)
    assert status != 0
    folder = tmp_path / "runs" / "mine"
    (dumped,) = dumps_of(folder)
    assert "iteration 1: actor: optimizer step 1 has loss nan" in said
    assert str(dumped) in said.replace("\n", "")
    assert last_step(folder) == 1
    status, said = outcome(tmp_path / "replay.log", "replay", str(dumped), **both)
    assert status == 0, said
    assert "step 0 (before the dump)" in said
    assert "All values are as recorded" in said
    assert "The first that is not finite: the loss, of finite outputs, in step 1." in said

    resumed = ("run", "tuned", "--resume", str(folder), "on_anomaly=skip")
    status, said = outcome(tmp_path / "resumed.log", *resumed, **both)
    assert status == 0, said
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped_steps/actor"] for row in rows] == [0, 1, 0]
