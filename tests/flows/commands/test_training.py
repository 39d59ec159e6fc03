"""`prefect-rlhf run` as a process: whenever it is told to end, nothing is left behind, and it can be resumed."""

import json
import signal
from pathlib import Path

import pytest
import yaml

from prefect_rlhf.rlhf_tasks.checkpoint.commits import newest_step
from tests.flows.marked_command import MarkedCommand
from tests.tiny_runs import ppo_config

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(900)]
ENDED_S = 120.0  # on a starved machine; flows/cluster/shutdown.py has the bound, and its tests
ITERATIONS = 3


def begin(folder: Path, **settings) -> tuple[list[str], Path]:
    """A run's command line and its folder."""
    document = ppo_config(folder, name="mine", **settings).model_dump(mode="json")
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    return ["run", "ppo", "--config", str(folder / "run.yaml")], folder / "runs" / "mine"


def go_on(run_folder: Path, log: Path, *more: str, environment=None) -> dict:
    """The summary of a run that was continued, to its end."""
    with MarkedCommand(
        log, "run", "ppo", "--resume", str(run_folder), *more, environment=environment
    ) as again:
        assert again.process.wait(600) == 0, again.output
        again.assert_gone()
    assert (run_folder / "model" / "model.safetensors").exists()
    return json.loads((run_folder / "summary.json").read_text())


def test_ctrl_c_names_the_way_to_go_on_which_finishes_the_run(tmp_path):
    command, folder = begin(tmp_path, total_iterations=40)
    with MarkedCommand(tmp_path / "log", *command) as run:
        run.wait_until(lambda: (newest_step(folder) or 0) >= 1)
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(ENDED_S) == 130, run.output
        assert f"To continue: prefect-rlhf run ppo --resume {folder}" in run.output
        assert "Traceback" not in run.output
        run.assert_gone()
    # The run that continues is the one written down; fewer iterations make the test short.
    done = newest_step(folder)
    assert 1 <= done < 40
    assert go_on(folder, tmp_path / "again", f"total_iterations={done + 1}")["iterations"] == done + 1


@pytest.mark.whole
def test_a_finished_run_that_goes_on_ends_as_one_that_was_longer_from_the_beginning(prefect, tmp_path):
    written = {}
    for name, iterations in (("short", 1), ("long", 3)):
        command, folder = begin(tmp_path / name, total_iterations=iterations)
        with MarkedCommand(tmp_path / f"{name}.log", *command, environment=prefect.environment) as run:
            assert run.process.wait(300) == 0, run.output
        if iterations == 1:
            again = go_on(folder, tmp_path / "again", "total_iterations=3", environment=prefect.environment)
            assert (again["iterations"], again["model_step"]) == (3, 3)
        written[name] = (folder / "model" / "model.safetensors").read_bytes()
    assert written["short"] == written["long"]


MOMENTS = {
    "its server starts": lambda run, folder: (folder / "prefect" / "api-url").exists(),
    "its cluster starts": lambda run, folder: "cluster ..." in run.output,
    "a commit is written": lambda run, folder: any(folder.glob("step-00000002.tmp-*")),
    "the model is exported": lambda run, folder: (folder / ".model.unfinished").exists(),
    "it ends": lambda run, folder: (folder / "summary.json").exists(),
}
OWN_SERVER = ("its server starts", "it ends")
LATE = ("the model is exported", "it ends")  # a run so near its end may come to it


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupted", "terminated"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_is_told_to_end_while(prefect, tmp_path, moment, number):
    environment = None if moment in OWN_SERVER else prefect.environment
    command, folder = begin(tmp_path, total_iterations=ITERATIONS)
    with MarkedCommand(tmp_path / "log", *command, environment=environment) as run:
        run.wait_until(lambda: MOMENTS[moment](run, folder))
        run.signal(number)
        status = run.process.wait(ENDED_S)
        run.assert_gone()
        if moment in LATE and (folder / "summary.json").exists():
            assert status in (0, 128 + number, -number), run.output
            assert json.loads((folder / "summary.json").read_text())["iterations"] == ITERATIONS
            assert (folder / "model" / "README.md").exists()
            return
        assert status in (128 + number, -number), run.output
        assert f"To continue: prefect-rlhf run ppo --resume {folder}" in run.output
        assert "Traceback" not in run.output
    assert go_on(folder, tmp_path / "again", environment=environment)["iterations"] == ITERATIONS


@pytest.mark.whole
def test_a_run_behind_a_dead_proxy_without_utf_8_in_a_folder_with_an_umlaut_ends_as_usual(tmp_path):
    command, folder = begin(tmp_path / "wörk dir", total_iterations=1)
    proxy = "http://127.0.0.1:9"
    environment = {
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), proxy),
        **{"LC_ALL": "C", "PYTHONUTF8": "0", "no_proxy": "", "NO_PROXY": ""},
    }
    with MarkedCommand(tmp_path / "log", *command, environment=environment) as run:
        assert run.process.wait(300) == 0, run.output
        assert "without the Prefect server" not in run.output
        run.assert_gone()
    assert json.loads((folder / "summary.json").read_text())["iterations"] == 1
