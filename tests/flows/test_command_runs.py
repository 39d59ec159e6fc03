"""`prefect-rlhf run` as a process: Ctrl-C says how to go on and leaves nothing behind; going on ends the run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest
import yaml

from tests.tiny_runs import ppo_config

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def with_mark(mark: str) -> list[str]:
    """Command lines of the live processes whose environment has the mark: a run and all that it started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def assert_gone(mark: str) -> None:
    """No process with the mark is left 10 s after the command has ended; some end by themselves a moment later."""
    deadline = time.monotonic() + 10
    while (left := with_mark(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_ctrl_c_names_the_way_to_go_on_which_finishes_the_run(tmp_path):
    document = ppo_config(tmp_path, name="mine", total_iterations=40).model_dump(mode="json")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    mark, log, folder = uuid4().hex, tmp_path / "log", tmp_path / "runs" / "mine"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    environment |= {"PYTHONPATH": str(ROOT), "MARK": mark, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "flows.cli", "run", "ppo"]
    first = [*command, "--config", str(tmp_path / "run.yaml")]
    with log.open("w") as out:
        run = subprocess.Popen(first, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            deadline = time.monotonic() + 400
            while "iteration 1 of 40" not in log.read_text():
                assert run.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            os.kill(run.pid, signal.SIGINT)
            assert run.wait(120) == 130, log.read_text()
        finally:
            run.kill()
            run.wait()
    assert f"To go on: prefect-rlhf run ppo --resume {folder}" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert_gone(mark)
    # The run that goes on is the one written down; fewer iterations make the test short.
    settings = json.loads((folder / "config.json").read_text())
    done = max(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
    assert 1 <= done < 40
    (folder / "config.json").write_text(json.dumps({**settings, "total_iterations": done + 1}))
    again = subprocess.run(
        [*command, "--resume", str(folder)], env=environment, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stdout + again.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["iterations"] == done + 1
    assert (folder / "model" / "model.safetensors").exists()
    assert_gone(mark)
