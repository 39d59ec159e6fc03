"""A series' run before it starts: which rows are new, and every refusal in one sentence."""

import json
import shutil
import time
from pathlib import Path

import pytest
import yaml
from prefect import flow, states
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.flows.recurring import champions
from prefect_rlhf.flows.recurring.beginning import begin_run, check_series, open_series
from prefect_rlhf.flows.run.run_folder import taken
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.algorithms.series import make_series
from prefect_rlhf.rlhf_tasks.config.data import DataConfig
from prefect_rlhf.rlhf_tasks.data.dataset import data_set
from tests.tiny_runs import write_model, write_prompts


@pytest.fixture
def document(tmp_path):
    write_model(tmp_path / "base")
    write_prompts(tmp_path / "prompts.jsonl", 30)
    (tmp_path / "judge.py").write_text("def right(completions):\n    return [1.0] * len(completions)\n")
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "a.jsonl", range(8))
    return {
        "type": "series",
        "name": "mine",
        "output_dir": str(tmp_path / "runs"),
        "training": {
            "type": "sft",
            "models": {"actor": str(tmp_path / "base")},
            "data": {"train": str(tmp_path / "rows")},
            "batch_size": 4,
            "total_iterations": 2,
        },
        "evaluation": {
            "type": "evaluate",
            "data": {"train": str(tmp_path / "prompts.jsonl")},
            "sampling": {"max_completion_length": 4},
            "rewards": [{"function": f"{tmp_path / 'judge.py'}:right"}],
        },
    }


def write(path, numbers):
    path.write_text("".join(json.dumps({"prompt": f"{i}>", "completion": "ab"}) + "\n" for i in numbers))


def unreadable(path):
    """A file whose first byte cannot be read, by root either."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def begin(document, asking=None):
    config = make_series(document)
    with taken(open_series(config)):
        return begin_run(config, asking)


def end(run, decision, document):
    """As the flow leaves a run."""
    model = champions.model_of(run.folder, run.name)
    shutil.copytree(document["training"]["models"]["actor"], model)
    champion = run.name if decision == champions.PROMOTED else run.begun["champion"]
    champions.decide(run.folder, run.name, {"decision": decision, "reason": "so", "champion": champion})


def rows_of(run):
    return sorted(
        json.loads(line)["prompt"] for line in (run.place / "rows" / "0.jsonl").read_text().splitlines()
    )


def test_a_run_takes_the_rows_that_no_champion_has_learned_from(document, tmp_path):
    first = begin(document)
    assert first.begun["rows"] == 8
    assert begin(document)[:4] == first[:4], "one that is not decided is continued"
    end(first, champions.PROMOTED, document)
    assert begin(document) is None, "nothing is new"

    (tmp_path / "rows" / "a.jsonl").unlink()
    write(tmp_path / "rows" / "b.jsonl", reversed(range(10)))
    second = begin(document)
    assert rows_of(second) == ["8>", "9>"], "the others are known, wherever they stand"
    assert second.begun["warnings"] == []
    places = [json.loads(line)[1] for line in (second.place / "rows" / "places").read_text().splitlines()]
    assert places == [f"{tmp_path / 'rows' / 'b.jsonl'}:{line}" for line in (1, 2)]
    assert second.stages["train"].models.actor == str(champions.model_of(first.folder, "0001"))
    end(second, champions.KEPT, document)
    assert begin(document) is None, "the same rows were tried"

    write(tmp_path / "rows" / "b.jsonl", range(9))
    assert begin(document) is None, "one of them is gone, and none is new"

    write(tmp_path / "rows" / "b.jsonl", [*range(3, 10), 10])
    third = begin(document)
    assert rows_of(third) == ["10>", "8>", "9>"], "a run that was not promoted has taught no champion"
    assert any("3 rows that champions have learned from are no longer in" in told for told in third.warnings)


def ask(run, timeout_s, asking):
    kept = {"decision": champions.KEPT, "reason": "nobody has answered", "champion": run.begun["champion"]}
    return champions.ask_until(run.folder, run.name, timeout_s, kept, asking)


def test_while_a_suspended_flow_run_waits_for_a_person_no_other_goes_on(document, monkeypatch):
    first = begin(document)
    assert 99 < ask(first, 100, "flow-run-1") <= 100
    assert begin(document) is None
    waits = "run 0001 waits for a person's word, in the flow run flow-run-1"
    assert champions.waiting_for(first.folder) == waits
    again = begin(document, "flow-run-1")
    assert again[:4] == first[:4], "the one that asks begins again when there is an answer"
    later = time.time() + 60
    monkeypatch.setattr(champions.time, "time", lambda: later)
    assert 39 < ask(again, 100, "flow-run-1") < 41, "the time began with the first question"


@flow
def asks():
    pass


@pytest.fixture
def asking(prefect):
    """(id, set state) of a flow run that is suspended."""
    with get_client(sync_client=True) as client:
        made = client.create_flow_run(asks, state=states.Suspended())
        yield str(made.id), lambda state: client.set_flow_run_state(made.id, state, force=True)


@pytest.mark.cluster
@pytest.mark.parametrize("ended", [False, True])
def test_without_an_answer_in_time_the_next_run_keeps_the_champion_and_takes_the_rows(
    document, monkeypatch, asking, ended
):
    flow_run, becomes = asking
    if ended:
        becomes(states.Crashed())
    first = begin(document)
    ask(first, 100, flow_run)
    later = time.time() + 101
    monkeypatch.setattr(champions.time, "time", lambda: later)
    assert begin(document, flow_run)[:4] == first[:4], "an answer of the last moment counts"
    assert begin(document) is None, "its rows were tried"
    assert champions.decision_of(first.folder, "0001")["reason"] == "nobody has answered"
    write(Path(document["training"]["data"]["train"]) / "b.jsonl", range(8, 12))
    assert begin(document).name == "0002"


@pytest.mark.cluster
@pytest.mark.parametrize("state", [states.Scheduled(name="Resuming"), states.Pending(), states.Running()])
def test_an_answer_in_time_counts_while_its_flow_run_waits_for_a_worker(document, monkeypatch, asking, state):
    flow_run, becomes = asking
    becomes(state)
    first = begin(document)
    ask(first, 100, flow_run)
    later = time.time() + 101
    monkeypatch.setattr(champions.time, "time", lambda: later)
    assert begin(document) is None
    assert champions.decision_of(first.folder, "0001") is None
    assert champions.waiting_for(first.folder).startswith("run 0001 waits")
    assert begin(document, flow_run)[:4] == first[:4]


def test_a_server_that_does_not_tell_whether_somebody_has_answered_decides_nothing(document, monkeypatch):
    first = begin(document)
    ask(first, 0, "00000000-0000-0000-0000-000000000000")
    later = time.time() + 101
    monkeypatch.setattr(champions.time, "time", lambda: later)
    with temporary_settings({PREFECT_API_URL: None}):
        assert begin(document) is None
    assert champions.decision_of(first.folder, "0001") is None


def test_a_process_that_was_killed_while_it_asked_asks_anew(document):
    first = begin(document)
    ask(first, 100, None)
    assert begin(document)[:4] == first[:4]


def test_with_a_limit_what_is_beyond_it_is_seen_and_not_used(document, tmp_path):
    document["training"]["data"]["max_rows"] = 4
    end(begin(document), champions.KEPT, document)
    assert begin(document) is None, "the rows beyond the limit are not new"
    write(tmp_path / "rows" / "b.jsonl", [20])
    second = begin(document)
    assert rows_of(second) == ["0>", "1>", "2>", "3>"]
    end(second, champions.PROMOTED, document)
    third = begin(document)
    assert rows_of(third) == ["4>", "5>", "6>", "7>"], "the new champion has not learned from them"


def test_of_rows_that_stand_twice_none_is_said_to_be_gone(document, tmp_path):
    write(tmp_path / "rows" / "a.jsonl", [*range(8), 7, 7])
    end(begin(document), champions.PROMOTED, document)
    write(tmp_path / "rows" / "b.jsonl", [8])
    assert begin(document).begun["warnings"] == []


@pytest.mark.parametrize("form", ["file", "glob", "two"])
def test_all_models_answer_the_held_out_rows_that_were_there_at_the_beginning(document, tmp_path, form):
    end(begin(document), champions.PROMOTED, document)
    write(tmp_path / "rows" / "b.jsonl", [8])
    write_prompts(tmp_path / "prompts2.jsonl", 40)
    files = [str(tmp_path / name) for name in ("prompts.jsonl", "prompts2.jsonl")]
    stated = {"file": files[0], "glob": str(tmp_path / "prompts*.jsonl"), "two": files}[form]
    document["evaluation"]["data"]["train"] = stated
    rows = [placed.raw for placed in data_set(DataConfig(train=stated))]
    begin(document)
    for path in files:
        write_prompts(Path(path), 50)
    stages = begin(document).stages
    for name in ("candidate", "champion"):
        assert [placed.raw for placed in data_set(stages[name].data)] == rows


def test_rows_that_are_not_answered_do_not_count_as_held_out(document, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 40)
    document["evaluation"]["data"]["max_rows"] = 29
    with pytest.raises(ConfigError, match=f"{tmp_path}/prompts.jsonl has 29 rows, too few"):
        begin(document)
    document["evaluation"]["data"]["max_rows"] = 30
    end(begin(document), champions.PROMOTED, document)
    write(tmp_path / "rows" / "b.jsonl", [8])
    document["evaluation"]["data"]["max_rows"] = 29
    with pytest.raises(ConfigError, match=f"{tmp_path}/prompts.jsonl has 29 rows, too few"):
        begin(document)


def test_rows_and_held_out_rows_may_be_on_a_hub(document, tmp_path, hub):
    hub.add("org/rows", {"train.jsonl": (tmp_path / "rows" / "a.jsonl").read_bytes()}, "dataset")
    hub.add("org/held", {"test.jsonl": (tmp_path / "prompts.jsonl").read_bytes()}, "dataset")
    document["training"]["data"]["train"] = "org/rows"
    document["evaluation"]["data"]["train"] = "org/held:test"
    with hub.used_here(tmp_path / "home"):
        assert check_series(make_series(document)) == []
        run = begin(document)
    assert run.begun["rows"] == 8
    assert len(list(data_set(run.stages["candidate"].data))) == 30
    assert "org/held" not in str(run.stages["candidate"].data.train)


def test_each_source_keeps_its_weight(document, tmp_path):
    write(tmp_path / "other.jsonl", range(20, 22))
    sources = {str(tmp_path / "rows"): 1.0, str(tmp_path / "other.jsonl"): 3.0}
    document["training"]["data"] = {"train": sources}
    run = begin(document)
    assert [source.weight for source in run.stages["train"].data.sources] == [1.0, 3.0]
    end(run, champions.PROMOTED, document)
    write(tmp_path / "other.jsonl", range(20, 25))
    assert begin(document).stages["train"].data.train == str(
        tmp_path / "runs" / "mine" / "0002" / "rows" / "1.jsonl"
    )


FAULTS = {
    "few held-out rows": (
        lambda d, f: write_prompts(f / "prompts.jsonl", 12),
        "prompts.jsonl has 12 rows, too few for any margin: an interval of mean differences needs at least 30.",
    ),
    "held-out rows that cannot be read": (
        lambda d, f: unreadable(f / "prompts.jsonl"),
        "prompts.jsonl: cannot be",
    ),
    "a model in the evaluation": (
        lambda d, f: d["evaluation"].update(models={"actor": "x"}),
        "evaluation: models are those that are compared. Leave it out.",
    ),
    "a name in the training": (
        lambda d, f: d["training"].update(name="x"),
        "training: name belongs to the series.",
    ),
    "no training": (lambda d, f: d["training"].update(type="evaluate"), "training: "),
    "an evaluation of another type": (
        lambda d, f: d["evaluation"].update(type="rollout"),
        "evaluation: its type is 'rollout', and a series compares scores. Give type: evaluate.",
    ),
    "a malformed row": (
        lambda d, f: (f / "rows" / "a.jsonl").write_text("{\n"),
        "a.jsonl:1: not valid JSON",
    ),
    "a missing reward": (
        lambda d, f: d["evaluation"].update(rewards=[{"function": "no_module_of_this_name:f"}]),
        "stage 'candidate': reward no_module_of_this_name:f: there is no module",
    ),
    "an unknown key": (lambda d, f: d.update(margni=1), "margni"),
    "a margin below 0": (lambda d, f: d.update(margin=-1), "margin"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_series_is_refused_in_one_sentence_and_leaves_no_run(document, tmp_path, capsys, fault):
    change, told = FAULTS[fault]
    change(document, tmp_path)
    (tmp_path / "series.yaml").write_text(yaml.safe_dump(document))
    for command in (("run", "series", "--config"), ("config", "validate")):
        if fault == "a malformed row" and command[0] == "config":
            continue  # it is checked when it is read
        assert run_command([*command, str(tmp_path / "series.yaml")]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert told in said
        assert "Traceback" not in said
        assert champions.runs_of(tmp_path / "runs" / "mine") == []


def test_a_sound_series_is_validated_and_makes_no_files(document, tmp_path, capsys):
    (tmp_path / "series.yaml").write_text(yaml.safe_dump(document))
    assert run_command(["config", "validate", str(tmp_path / "series.yaml")]) == 0
    assert "valid" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_without_new_rows_the_command_ends_well(document, tmp_path, capsys):
    end(begin(document), champions.PROMOTED, document)
    (tmp_path / "series.yaml").write_text(yaml.safe_dump(document))
    assert run_command(["run", "series", "--config", str(tmp_path / "series.yaml")]) == 0
    assert "no row is new since the last run: nothing to do" in capsys.readouterr().out


def test_of_two_runs_of_a_series_at_once_the_second_is_refused(document, tmp_path):
    config = make_series(document)
    with (
        taken(open_series(config)),
        pytest.raises(ConfigError, match=r"is in use by a run in progress \(process"),
    ):
        begin(document)


def test_a_champion_that_is_gone_is_named_before_anything_starts(document, tmp_path):
    run = begin(document)
    end(run, champions.PROMOTED, document)
    shutil.rmtree(champions.model_of(run.folder, "0001"))
    write(tmp_path / "rows" / "b.jsonl", range(20, 24))
    with pytest.raises(
        ConfigError,
        match=r"the champion of .*/mine is the model of run 0001, but .* is gone. Put it back, or begin another",
    ):
        begin(document)
    assert champions.runs_of(run.folder) == ["0001"]


def test_a_way_back_is_named_where_there_is_one(document, tmp_path):
    end(begin(document), champions.PROMOTED, document)
    write(tmp_path / "rows" / "b.jsonl", range(20, 24))
    run = begin(document)
    end(run, champions.PROMOTED, document)
    shutil.rmtree(champions.model_of(run.folder, "0002"))
    with pytest.raises(ConfigError, match="or take the champion before it: prefect-rlhf champion rollback"):
        begin(document)
    assert champions.roll_back(run.folder) == ("0002", "0001")


def test_champions_are_listed_and_rolled_back_by_commands(document, tmp_path, capsys):
    series = tmp_path / "runs" / "mine"
    assert run_command(["champion", "list", str(series)]) == 2
    assert "is not the folder of a series" in " ".join(capsys.readouterr().err.split())
    end(begin(document), champions.PROMOTED, document)
    assert run_command(["champion", "rollback", str(series)]) == 2
    assert "there is no earlier champion to roll back to" in " ".join(capsys.readouterr().err.split())
    write(tmp_path / "rows" / "b.jsonl", range(20, 24))
    end(begin(document), champions.PROMOTED, document)
    alias = series / "models" / "champion"
    assert alias.resolve() == champions.model_of(series, "0002")
    assert run_command(["champion", "rollback", str(series)]) == 0
    assert "the champion is 0001 again, in place of 0002" in " ".join(capsys.readouterr().out.split())
    assert alias.resolve() == champions.model_of(series, "0001")
    assert run_command(["champion", "list", str(series)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "0002 promoted: so" in said
    assert "0002 was rolled back, back to 0001" in said
    assert "champion: 0001" in said
    write(tmp_path / "rows" / "c.jsonl", range(30, 34))
    assert begin(document).begun["champion"] == "0001", "the next one is compared with the one that is used"
