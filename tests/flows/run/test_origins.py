"""Which rows taught a model, and which models saw a row: by what a run has written, with no list in each commit."""

import json
import re
import shutil
from collections import Counter

import pytest

from prefect_rlhf.flows.pushes import push_model
from prefect_rlhf.flows.run.origins import leave_origin, lessons_of
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.reporting import write_report
from prefect_rlhf.flows.run.run_folder import new_run_folder
from prefect_rlhf.flows.run.run_identity import accept_changes, keep_identity
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.checkpoint.commits import Commit, step_folder
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import read_manifest
from prefect_rlhf.rlhf_tasks.config.models import HubPush
from tests.adapter_folders import commit_of, write_adapter
from tests.flows.run.test_run_identity import commit, snapshots_of
from tests.loopback_hub import WRITER
from tests.ppo_calls import PPO_CALLS
from tests.rlhf_tasks.algorithms.one_rank import world_of_one
from tests.tiny_runs import ppo_config, write_model


def write(path, letters):
    path.write_text("".join(json.dumps({"prompt": letter * 3}) + "\n" for letter in letters))


@pytest.fixture
def run(document, tmp_path):
    """The folder of a run that has committed two iterations of 8 samples on 5 rows."""
    write(tmp_path / "prompts.jsonl", "abcde")
    document |= {"name": "mine", "total_iterations": 9}
    document["rewards"][0]["function"] = f"{tmp_path / 'rewards.py'}:good"
    prepared = prepare(make_config(document))
    folder = new_run_folder(prepared.config)
    keep_identity(folder, prepared)
    prepared.keep_rows(folder)
    snapshots = snapshots_of(folder, prepared)
    snapshots.latest()
    for step in range(3):
        commit(snapshots, prepared, folder, step)
    return folder


def expected(prepared, samples):
    return Counter(prepared.config.row_of(prepared.rows, sample) for sample in samples)


def test_the_rows_are_those_that_the_samples_mean(run, call, tmp_path):
    prepared = prepare(make_config(json.loads((run / "config.json").read_text())), run)
    (lesson,) = lessons_of(run)
    assert dict(enumerate(lesson.times)) == expected(prepared, range(16))
    keep_identity(run, prepared)
    assert len((run / "origins.jsonl").read_text().splitlines()) == 1, "nothing has changed"
    status, out, err = call("lineage", str(run), "--out", str(tmp_path / "rows"))
    assert status == 0, err
    assert "samples 0 to 15 of 5 of 5 rows" in out
    assert "rewards.py:good: sha256" in out
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["row"] for row in rows] == [f"{tmp_path / 'prompts.jsonl'}:{line}" for line in range(1, 6)]
    assert sum(row["times"] for row in rows) == 16
    assert len({row["hash"] for row in rows}) == 5


def test_a_row_is_looked_for_in_the_runs_whose_models_a_run_began_with(run, call, document, tmp_path):
    shutil.copytree(tmp_path / "model", run / "model")
    folder = began_with(run / "model", document, tmp_path)
    (lesson,) = lessons_of(run)
    row = f"{tmp_path / 'prompts.jsonl'}:1"
    status, out, err = call("lineage", "--row", row, str(folder))
    assert status == 0, err
    assert f"{folder}: has not learned from it\n" in out
    assert f"{folder}: its actor began as the model of {run}\n" in out
    assert f"{run}: learned {lesson.times[0]} times from {row}" in out
    status, out, _ = call("lineage", str(folder))
    assert f"its actor began as the model of {run}\n" in out
    assert "samples 0 to 15 of 5 of 5 rows" in out, "and what has taught that one"
    (run / "format").write_text("3")
    for asked in (("--row", row, str(folder)), (str(folder),)):
        status, out, _ = call("lineage", *asked)
        assert status == 0, "one that another version has written is told, and no reason to end"
        assert f"the model of {run}; what has taught it is not known: {run} has the format 3" in out
    shutil.rmtree(run)
    status, out, _ = call("lineage", "--row", "0" * 32, str(folder))
    assert f"its actor began as {run / 'model'}, which is gone: not known who made it" in out


def began_with(model, document, tmp_path, **changes):
    """The folder of a run that has committed an iteration on other rows, and began with a model."""
    write(tmp_path / "others.jsonl", "xyz")
    models = {"models": {"actor": str(model)}, "data": {"train": str(tmp_path / "others.jsonl")}}
    prepared = prepare(make_config({**document, "name": "later", **models, **changes}))
    folder = new_run_folder(prepared.named)
    keep_identity(folder, prepared)
    prepared.keep_rows(folder)
    snapshots = snapshots_of(folder, prepared)
    snapshots.latest()
    for step in range(2):
        commit(snapshots, prepared, folder, step)
    return folder


def exported(run, step, model, to):
    """A copy of a model as the export of a commit of a run."""
    shutil.copytree(model, to)
    leave_origin(run, Commit(step, run, read_manifest(step_folder(run, step))), to)
    return to


def test_an_exported_model_names_the_run_that_made_it_wherever_it_lies(run, call, document, tmp_path):
    model = exported(run, 1, tmp_path / "model", tmp_path / "exported")
    folder = began_with(model, document, tmp_path)
    (lesson,) = lessons_of(run, 8)
    row = f"{tmp_path / 'prompts.jsonl'}:{lesson.times.argmax() + 1}"
    status, out, err = call("lineage", str(folder))
    assert status == 0, err
    assert f"{folder}: its actor began as the model of {run} after 1 iterations\n" in out
    assert "from iteration 1: samples 0 to 7 of" in out, "not what has taught that run later"
    assert f"{run}: its actor began as {tmp_path / 'model'}: not known who made it\n" in out
    assert call("lineage", "--row", row, str(folder))[1].count(f"learned {lesson.times.max()} times") == 1
    first, *others = (run / "origins.jsonl").read_text().splitlines()
    (run / "origins.jsonl").write_text("\n".join([first.replace('"seed": 0', '"seed": 1'), *others, ""]))
    assert f"{run} is another run than the one that made it." in call("lineage", str(folder))[1]
    shutil.rmtree(run)
    out = call("lineage", str(folder))[1]
    assert f"what has taught it is not known: {run} is not a run folder" in out
    (model / "origin.json").write_text("{}")
    assert "origin.json: not as an export wrote it" in call("lineage", str(folder))[1]


def test_a_run_that_was_renamed_is_known_by_what_has_taught_it(run, call, document, tmp_path):
    folder = began_with(exported(run, 1, tmp_path / "model", tmp_path / "exported"), document, tmp_path)
    renamed = run.rename(run.with_name("renamed"))
    (run.parent / "damaged").mkdir()
    (run.parent / "damaged" / "origins.jsonl").write_text("no\n")
    out = call("lineage", str(folder))[1]
    assert f"{folder}: its actor began as the model of {renamed} after 1 iterations\n" in out
    assert "samples 0 to 7 of" in out
    shutil.copytree(renamed, run.with_name("copy"))
    out = call("lineage", str(folder))[1]
    assert f"what has taught it is not known: {run} is not a run folder" in out, "of two, neither is chosen"


def test_two_models_of_one_run_are_told_of_each(run, call, document, tmp_path):
    models = {
        role: str(exported(run, step, tmp_path / "model", tmp_path / role))
        for step, role in ((1, "actor"), (2, "ref"))
    }
    out = call("lineage", str(began_with(models["actor"], document, tmp_path, models=models)))[1]
    for step, role in ((1, "actor"), (2, "ref")):
        assert f": its {role} began as the model of {run} after {step} iterations\n" in out


def test_an_export_into_the_folder_of_its_run_or_of_another_is_what_it_says(run, call, document, tmp_path):
    early = exported(run, 1, tmp_path / "model", run / "early")
    other = began_with(early, document, tmp_path)
    assert f"its actor began as the model of {run} after 1 iterations\n" in call("lineage", str(other))[1]
    there = exported(run, 2, tmp_path / "model", other / "there")
    third = began_with(there, document, tmp_path, name="third")
    assert f"its actor began as the model of {run} after 2 iterations\n" in call("lineage", str(third))[1]
    run.rename(tmp_path / "moved")
    moved = began_with(tmp_path / "moved" / "early", document, tmp_path, name="fourth")
    assert f"began as the model of {tmp_path / 'moved'} after 1 iterations" in call("lineage", str(moved))[1]


def test_what_an_accepted_change_teaches_later_is_no_part_of_an_earlier_export(run, call, document, tmp_path):
    model = exported(run, 2, tmp_path / "model", tmp_path / "exported")
    write(tmp_path / "prompts.jsonl", "cdx")
    accept_changes(run, prepare(make_config(json.loads((run / "config.json").read_text())), run))
    folder = began_with(model, document, tmp_path)
    assert f"its actor began as the model of {run} after 2 iterations\n" in call("lineage", str(folder))[1]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
def test_an_adapters_base_is_followed_too(run, call, document, tmp_path):
    base = exported(run, 2, write_model(tmp_path / "base"), tmp_path / "exported")
    write_adapter(tmp_path / "adapter", base)
    folder = began_with(tmp_path / "adapter", document, tmp_path)
    out = call("lineage", str(folder))[1]
    assert f"{folder}: its actor began as {tmp_path / 'adapter'}: not known who made it\n" in out
    assert f"{folder}: its actor's base began as the model of {run} after 2 iterations\n" in out


def test_the_command_exports_a_model_with_its_origin(call, document, tmp_path):
    alone = {"plan": dict.fromkeys(PPO_CALLS, "0"), "cluster": {"devices_per_host": 1}}
    config = ppo_config(tmp_path / "ppo", name="mine", lora={"rank": 4, "alpha": 6.0}, **alone)
    prepared = prepare(config)
    run = new_run_folder(prepared.config)
    keep_identity(run, prepared)
    prepared.keep_rows(run)
    with world_of_one():
        commit_of(config, prepared.plan, run)  # step 1, after 16 samples
    status, _, err = call("export", str(run), str(tmp_path / "out"))
    assert status == 0, err
    folder = began_with(tmp_path / "out", document, tmp_path)
    out = call("lineage", str(folder))[1]
    assert f"its actor began as the model of {run} after 1 iterations\n" in out
    assert "samples 0 to 15 of" in out
    assert f"{folder}: its actor's base began as {config.models.actor}: not known who made it\n" in out


def test_a_model_from_the_hub_names_its_maker_where_that_lies_beside_the_run(
    run, call, hub, document, tmp_path
):
    model = exported(run, 2, tmp_path / "model", tmp_path / "exported")
    with hub.used_here(tmp_path / "home", WRITER):
        push_model(model, HubPush(repo="org/mine"), "after 2 iterations")
        assert json.loads(hub.files("org/mine")["origin.json"])["run"] == "mine", "no folder of this machine"
        folder = began_with("org/mine", document, tmp_path)
        out = call("lineage", str(folder))[1]
        assert f"{folder}: its actor began as the model of {run} after 2 iterations\n" in out
        shutil.rmtree(run)
        assert f"the model of {run} after 2 iterations; what" in call("lineage", str(folder))[1]
        hub.add_folder("org/other", tmp_path / "model")
        shutil.rmtree(folder)
        folder = began_with("org/other", document, tmp_path)
        assert "its actor began as org/other: not known who made it\n" in call("lineage", str(folder))[1]


def test_the_report_says_which_rows_have_taught_the_model(run, tmp_path):
    text = re.sub("<[^>]*>", "|", write_report(run).read_text())
    (lesson,) = lessons_of(run)
    assert "What taught it" in text
    assert "5 of 5" in text
    assert f"{tmp_path / 'prompts.jsonl'}:{lesson.times.argmax() + 1}|" in text


def test_what_was_replaced_is_remembered_with_what_it_taught(run, call, tmp_path):
    before = prepare(make_config(json.loads((run / "config.json").read_text())), run)
    taught = expected(before, range(16))
    write(tmp_path / "prompts.jsonl", "cdx")
    prepared = prepare(before.config, run)
    accept_changes(run, prepared)
    prepared.keep_rows(run)
    snapshots = snapshots_of(run, prepared, attempt=1)
    snapshots.latest()
    commit(snapshots, prepared, run, 3)
    first, second = lessons_of(run)
    assert dict(enumerate(first.times)) == taught
    assert dict(enumerate(second.times)) == expected(prepared, range(16, 24))
    digests = dict(first.rows.identities())
    a_row = digests[f"{tmp_path / 'prompts.jsonl'}:1"]
    status, out, _ = call("lineage", str(run), "--row", a_row[:10])
    assert status == 0
    assert f"learned {taught[0]} times from" in out
    status, out, _ = call("lineage", str(run), "--row", "0" * 32)
    assert "has not learned from it" in out
    here = f"{tmp_path / 'prompts.jsonl'}:3"  # an x, and in the first stretch a c
    status, out, _ = call("lineage", str(run), "--row", here)
    assert out.count("times from") == 1
    assert f"learned {second.times[2]} times from {here}" in out
    write(tmp_path / "prompts.jsonl", "cdy")
    status, out, _ = call("lineage", str(run), "--row", here)
    assert (status, "has not learned from it" in out) == (0, True), "another row stands there now"


@pytest.mark.parametrize("each_part", [False, True])
def test_rows_that_a_decision_has_left_out_have_taught_nothing(run, document, tmp_path, each_part):
    """Of five rows the first iteration draws from two, the next from three; then it is not decided any more."""
    prepared = prepare(make_config({**document, "name": "curriculum"}))
    folder = new_run_folder(prepared.config)
    keep_identity(folder, prepared)
    prepared.keep_rows(folder)
    snapshots = snapshots_of(folder, prepared)
    snapshots.latest()
    commit(snapshots, prepared, folder, 0)
    for step, (before, value) in enumerate([(0.4, 0.6), (0.4 if each_part else 0.6, 0.2)], 1):
        made = {"before": before, "constants": {}, "ran": True, "value": value}
        details = {"decided": {"metrics": {"loss": 1.0}, "decided": {"rows": made}}}
        commit(snapshots, prepared, folder, step, details=details)
    commit(snapshots, prepared, folder, 3)
    (lesson,) = lessons_of(folder)
    taught = Counter()
    for iteration, share in enumerate((0.4, 0.6, 1.0)):
        rows, samples = prepared.rows.first(share), range(8 * iteration, 8 * iteration + 8)
        taught += Counter(prepared.config.row_of(rows, sample) for sample in samples)
    assert dict(enumerate(lesson.times)) == taught
    (of_the_first,) = lessons_of(folder, 8)
    assert list(of_the_first.times > 0) == [True, True, False, False, False]


def test_it_ends_with_the_commit_of_the_exported_model(run):
    (run / "summary.json").write_text(json.dumps({"model_step": 1}))  # as `evaluation.keep_best` exports
    (lesson,) = lessons_of(run)
    assert (lesson.end, lesson.times.sum()) == (8, 8)
    (run / "summary.json").write_text(json.dumps({"model_step": 7}))  # a commit that is gone
    (lesson,) = lessons_of(run)
    assert lesson.end == 16


def test_changed_code_of_a_reward_begins_another_stretch(run, tmp_path):
    (tmp_path / "rewards.py").write_text("def good(prompts, completions):\n    return [0.0] * len(prompts)\n")
    prepared = prepare(make_config(json.loads((run / "config.json").read_text())), run)
    keep_identity(run, prepared)
    first, second = (json.loads(line) for line in (run / "origins.jsonl").read_text().splitlines())
    assert first["rewards"] != second["rewards"]
    assert (second["step"], second["sample"]) == (2, 16)


FAULTS = {
    (): "Name one run",
    ("RUN", "RUN"): "Name one run",
    ("RUN", "--row", "abc"): "--row abc: neither FILE:LINE nor at least 8 digits of a hash",
    ("RUN", "--row", "no.jsonl:1"): "--row no.jsonl:1: there is no row at this place now",
    ("RUN", "--row", "RUN/config.json:999"): "config.json:999: there is no row at this place now",
    ("nowhere",): "nowhere is not a run folder",
}


@pytest.mark.parametrize("arguments", FAULTS)
def test_a_faulty_question_gets_one_sentence(run, call, arguments):
    status, _, err = call("lineage", *(argument.replace("RUN", str(run)) for argument in arguments))
    assert status == 2
    assert FAULTS[arguments] in " ".join(err.split())
