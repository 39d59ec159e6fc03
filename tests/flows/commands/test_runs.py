"""`prefect-rlhf run` before anything is started: its folder, and which run it continues with."""

import asyncio
import sys
from pathlib import Path

import pytest

from prefect_rlhf.flows.run import prepare, runs
from prefect_rlhf.flows.run.run_folder import new_run_folder
from prefect_rlhf.flows.run.run_identity import compared, keep_identity
from prefect_rlhf.flows.run.runs import carry_out
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from tests.flows.checked_files import refused


def test_a_run_name_in_use_is_refused_with_the_way_to_go_on(call, document, tmp_path):
    document["name"] = "mine"
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    refused(call, "name='mine' is in use", f"--resume {tmp_path / 'runs' / 'mine'}")


def test_a_run_name_in_use_is_refused_before_seconds_of_importing_prefect(
    call, document, tmp_path, monkeypatch
):
    document["name"] = "mine"
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "prefect_rlhf.flows.commands.local_run", None)  # importing it fails
    refused(call, "name='mine' is in use")


@pytest.mark.parametrize(
    ("named", "parts"),
    [
        ("dr-grpo", ("is of type 'ppo', not 'dr_grpo'", "`prefect-rlhf run ppo`", "type: dr_grpo")),
        ("orpo", ("there is no algorithm 'orpo'; registered are ppo, ",)),
    ],
)
def test_another_algorithm_than_the_files_is_refused_with_both_ways_to_correct_it(call, named, parts):
    refused(call, *parts, command=("run", named, "--config", "FILE"))


def test_another_algorithm_than_the_resumed_runs_is_refused_with_the_right_command(call, document):
    folder = new_run_folder(make_config({**document, "name": "mine"}))
    status, _, err = call("run", "grpo", "--resume", str(folder))
    assert status == 2
    assert "mine is of type 'ppo', not 'grpo'. Use `prefect-rlhf run ppo --resume`." in err


def test_a_folder_that_is_no_run_cannot_be_resumed(call, tmp_path):
    refused(call, "is not a run folder", command=("run", "ppo", "--resume", str(tmp_path)))


def test_a_resumed_run_takes_no_other_settings_than_its_cluster(call, document, tmp_path, monkeypatch):
    began = make_config({**document, "name": "mine"})
    folder = new_run_folder(began)
    resume = ("run", "ppo", "--resume", str(folder))
    refused(call, "batch_size=16 would change it", command=(*resume, "batch_size=16"))
    ran = []
    monkeypatch.setattr(
        "prefect_rlhf.flows.commands.local_run.run_here", lambda *arguments: ran.append(arguments)
    )
    status, _, err = call(*resume, "cluster.address=tcp://127.0.0.1:8786")
    assert status == 0, err
    ((place, prepared),) = ran
    moved = began.cluster.model_copy(update={"address": "tcp://127.0.0.1:8786"})
    assert (place, prepared.config.cluster) == (folder, moved)
    assert compared(prepared.config) == compared(began) | {"dtype": "float32"}


@pytest.fixture
def preparations(monkeypatch):
    """What was prepared, one after the other."""
    made, prepare_once = [], prepare._prepare
    monkeypatch.setattr(prepare, "_prepare", lambda *a: made.append(prepare_once(*a)) or made[-1])
    return made


@pytest.fixture
def carried_out(monkeypatch):
    """(folder, what was prepared) of each run whose ranks would start, in a flow without a server."""
    begun = []

    async def run_prepared(folder, prepared, blocks, rebuilds):
        keep_identity(folder, prepared)
        begun.append((folder, prepared))
        return {}

    monkeypatch.setattr(runs, "run_prepared", run_prepared)
    monkeypatch.setattr(runs.flow_run, "id", "0")
    return begun


@pytest.mark.parametrize("plan", ["heuristic", "auto"])
def test_a_command_hands_what_it_prepared_to_its_flow(call, document, monkeypatch, preparations, plan):
    document |= {"plan": plan, "name": "mine"}
    ran = []
    monkeypatch.setattr(
        "prefect_rlhf.flows.commands.local_run.run_here", lambda *arguments: ran.append(arguments)
    )
    status, _, err = call("run", "ppo", "--config", "FILE")
    assert status == 0, err
    ((folder, prepared),) = ran
    assert folder == Path(document["output_dir"], "mine")
    assert preparations == [prepared]


def test_a_flow_prepares_a_new_run_and_one_that_it_goes_on_with_once(document, preparations, carried_out):
    config = make_config({**document, "name": "mine"})
    asyncio.run(carry_out("ppo", config))
    asyncio.run(carry_out("ppo", None, str(carried_out[0][0])))
    assert [prepared for _, prepared in carried_out] == preparations
    assert len(preparations) == 2


def test_ctrl_c_before_there_is_a_run_folder_names_none_and_leaves_none(call, tmp_path, monkeypatch, capsys):
    """While Prefect is imported, for which there are seconds."""

    class Importing:
        @property
        def run_here(self):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "prefect_rlhf.flows.commands.local_run", Importing())
    with pytest.raises(SystemExit) as ended:
        call("run", "ppo", "--config", "FILE")
    assert ended.value.code == 130
    assert "continue" not in "".join(capsys.readouterr())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("resume", ["auto", "FOLDER"])
def test_resume_in_the_configuration_goes_on_with_that_run(call, document, monkeypatch, resume):
    began = make_config({**document, "name": "mine"})
    folder = new_run_folder(began)
    document |= {"name": "mine", "resume": resume.replace("FOLDER", str(folder)), "total_iterations": 9}
    ran = []
    monkeypatch.setattr(
        "prefect_rlhf.flows.commands.local_run.run_here", lambda *arguments: ran.append(arguments)
    )
    status, _, err = call("run", "ppo", "--config", "FILE")
    assert status == 0, err
    ((place, prepared),) = ran
    assert place == folder
    assert compared(prepared.config) == compared(began) | {"dtype": "float32"}
    assert "2 iterations." in call("config", "validate", "FILE")[1]


@pytest.mark.parametrize("command", [("run", "ppo", "--config", "FILE"), ("config", "validate", "FILE")])
def test_a_folder_to_resume_that_is_no_run_is_refused(call, document, command):
    document["resume"] = "/nowhere"
    refused(call, "/nowhere is not a run folder", command=command)


@pytest.mark.parametrize(
    "command",
    [
        ("run", "ppo", "--config", "FILE"),
        ("config", "validate", "FILE"),
        ("demo", "--folder", "HERE/prompts.jsonl/in"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(call, document, tmp_path, command):
    pytest.importorskip("reasoning_gym")
    document["output_dir"] = str(tmp_path / "prompts.jsonl" / "in")
    command = tuple(part.replace("HERE", str(tmp_path)) for part in command)
    refused(
        call, "prompts.jsonl/in cannot be written to: Not a directory. Name another folder.", command=command
    )


def test_config_and_resume_exclude_each_other(call):
    refused(call, "--config FILE", "--resume FOLDER", command=("run", "ppo"))
