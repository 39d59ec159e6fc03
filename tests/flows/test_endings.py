"""However a run ends, nothing that it started is left, and what it committed stays."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
ENDED_S = 60.0  # on a starved machine; a run that continues would take five minutes


@contextmanager
def running(prefect, folder, iterations, fault=""):
    """A run in its own process group, past its first commit; (its process, the processes that it started)."""
    environment = {**os.environ, **prefect.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        str(Path(__file__).with_name("fake_run.py")),
        str(folder),
        str(iterations),
        fault,
    ]
    errors = (folder / "errors.txt").open("w")
    with (
        errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as run,
    ):
        try:
            if not any(line.startswith("READY") for line in run.stdout):
                pytest.fail(f"no commit:\n{(folder / 'errors.txt').read_text()}")
            started = psutil.Process(run.pid).children(recursive=True)
            assert len(started) >= 3  # two ranks and the controller
            yield run, started
        finally:
            run.kill()


def wait_gone(processes, seconds):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for process in alive:
        process.kill()
    assert not alive, f"left after {seconds} s: {alive}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGINT, signal.SIGTERM],
    ids=["killed", "interrupted", "terminated"],
)
def test_a_run_that_is_ended_leaves_no_process_and_can_go_on(prefect, tmp_path, number):
    with running(prefect, tmp_path, 1000) as (run, started):
        # Ctrl-C reaches every process of the terminal's foreground group.
        (os.killpg if number == signal.SIGINT else os.kill)(run.pid, number)
        run.wait(ENDED_S)
        wait_gone(started, ENDED_S)
    newest = max(tmp_path.glob("step-*.json"), key=lambda path: int(path.stem.removeprefix("step-")))
    assert set(json.loads(newest.read_text())["roles"]) == {"actor", "critic"}


@pytest.mark.whole
def test_a_run_that_fails_says_why_and_leaves_no_process(prefect, tmp_path):
    with running(prefect, tmp_path, 1000, "raise") as (run, started):
        run.wait(300)
        wait_gone(started, ENDED_S)
    errors = (tmp_path / "errors.txt").read_text()
    assert run.returncode != 0
    assert "rank 0, call generate, iteration 2: ValueError: told to fail" in errors
    assert "1 iterations are committed; resume" in errors
