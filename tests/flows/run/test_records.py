"""What run folders say of their runs: records, and comparisons of several."""

import json

import pytest

from prefect_rlhf.flows.run.records import comparison, record_of, records_in
from prefect_rlhf.flows.run.run_folder import CONFIG, taken
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.flows.run_folders import write_run


def test_a_record_says_how_far_a_run_is_and_what_it_has_reached(document):
    record = record_of(write_run({**document, "name": "mine"}, [0.25, 0.5]))
    assert (record.name, record.algorithm, record.state) == ("mine", "ppo", "finished")
    assert (record.done, record.total, record.headline, record.seconds) == (2, 2, ("reward", 0.5), 5.0)
    assert record.model == document["models"]["actor"]


def test_a_run_that_was_interrupted_has_ended_and_one_that_a_process_holds_is_running(document):
    folder = write_run({**document, "name": "mine"}, [0.25], finished=False)
    assert (record_of(folder).state, record_of(folder).done, record_of(folder).seconds) == ("ended", 1, 2.0)
    with taken(folder):
        assert record_of(folder).state == "running"


def test_a_summary_of_before_the_run_went_further_does_not_make_it_finished(document):
    folder = write_run({**document, "name": "mine"}, [0.25])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 1, "reward": 0.5}) + "\n")
    assert record_of(folder).state == "ended"


def test_a_line_of_metrics_that_is_being_written_is_left_out_and_another_bad_one_refused(document):
    folder = write_run({**document, "name": "mine"}, [0.25], finished=False)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"iteration": 1, "rew')
    assert record_of(folder).done == 1
    metrics.write_text('{"iteration": 0}\n7\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl:2: is no row of metrics: 7"):
        record_of(folder)


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("config.json", '{"models": [1, 2]}', r"models must be a mapping, found \[1, 2\]"),
        ("config.json", "{", "config.json:1: not valid JSON"),
        (
            "metrics.jsonl",
            '{"iteration": 0, "reward": "high"}\n',
            "metrics.jsonl:1: the metric 'reward' is no",
        ),
        ("metrics.jsonl", '{"iteration": 0, "rew\n{}\n', "metrics.jsonl:1: is no row of metrics"),
        ("summary.json", '{"seconds": "long"}', "seconds must be a number, found 'long'"),
        ("summary.json", '{"calls": {"generate": 3}}', "calls must have the seconds of each call"),
    ],
)
def test_a_damaged_run_is_refused_and_hides_no_other_in_a_list(document, tmp_path, file, content, why):
    write_run({**document, "name": "sound"}, [0.25])
    damaged = write_run({**document, "name": "mine"}, [0.25])
    (damaged / file).write_text(content)
    with pytest.raises(ConfigError, match=why):
        record_of(damaged)
    states = {record.name: (record.state, record.damage) for record in records_in(tmp_path / "runs")}
    assert states["sound"] == ("finished", "")
    state, damage = states["mine"]
    assert state == "damaged"
    assert damage.startswith(file)


def test_runs_are_listed_the_latest_first_with_the_stages_of_pipelines(document, tmp_path):
    first = write_run({**document, "name": "first"}, [0.25])
    stage = write_run({**document, "name": "stage", "output_dir": f"{document['output_dir']}/whole"}, [0.5])
    (tmp_path / "runs" / "notes").mkdir()
    (stage / "format").touch()
    names = [record.name for record in records_in(tmp_path / "runs")]
    assert names == ["whole/stage", "first"]
    assert first.name in names


def test_a_comparison_has_only_settings_that_differ_and_all_figures(document):
    one = write_run({**document, "name": "one"}, [0.25, 0.5])
    other = write_run({**document, "name": "other", "kl_coef": 0.2}, [0.25, 0.75], finished=False)
    compared = comparison([one, other])
    assert compared.settings == {"kl_coef": (0.05, 0.2)}
    assert compared.metrics == {"reward": (0.5, 0.75)}
    assert compared.seconds["all iterations"] == (5.0, 4.0)
    assert compared.seconds["generate"] == (1.5, None)
    assert compared.plan["generate"] == ("0-1 d2", "0-1 d2")


def test_arguments_of_a_users_code_are_in_no_comparison(document):
    """They may be secrets."""
    rewards = [{**document["rewards"][0], "kwargs": {"key": "hunter2"}}]
    one = write_run({**document, "name": "one"}, [0.25])
    other = write_run({**document, "name": "other", "rewards": rewards}, [0.25])
    assert "hunter2" in (other / CONFIG).read_text()
    assert "hunter2" not in str(comparison([one, other]).settings)


@pytest.mark.parametrize(("place", "why"), [("runs", "is not a run folder"), ("runs/gone", "is no folder")])
def test_what_is_no_run_is_refused(tmp_path, place, why):
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match=f"{place} {why}. `prefect-rlhf runs list`"):
        record_of(tmp_path / place)
