"""The fork server: what its forks have, and what becomes of a call in one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from distributed import Client

from flows.cluster.cluster import local_cluster
from flows.cluster.forks import begin_to_load, in_fork
from tests.rlhf_tasks.settings import STARTUP_S

ROOT = Path(__file__).parents[3]


@pytest.mark.whole
def test_a_call_in_a_fork_returns_its_value_and_raises_its_error():
    assert in_fork("math:factorial", 5) == 120
    with pytest.raises(ValueError, match="factorial"):
        in_fork("math:factorial", -1)


def test_a_fork_server_that_cannot_have_a_socket_is_done_without(tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    program = "from flows.cluster.forks import *; print(begin_to_load(1), in_fork('math:factorial', 3))"
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["False", "6"]
    assert "a fork server cannot be started" in done.stderr


@pytest.mark.slow
def test_the_working_folder_is_not_searched_for_modules_unless_it_was_before(tmp_path):
    (tmp_path / "rlhf_tasks.py").write_text("raise SystemExit('a module of the working folder was loaded')")
    program = tmp_path / "elsewhere" / "program.py"
    program.parent.mkdir()
    program.write_text(
        "from flows.cluster.forks import in_fork\n"
        "if __name__ == '__main__': print(in_fork('rlhf_tasks.controller.fork_server:LOADED.__len__') > 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


@pytest.mark.cluster
@pytest.mark.parametrize("value", ["one", "other"])
def test_ranks_have_the_environment_of_the_moment_when_their_cluster_starts(tmp_path, monkeypatch, value):
    """The fork server was started before."""
    begin_to_load(1)
    monkeypatch.setenv("A_USERS_OWN", value)
    with (
        local_cluster(1, folder=tmp_path, deadline_s=STARTUP_S) as cluster,
        Client(cluster.scheduler_address, set_as_default=False) as client,
    ):
        told = client.run(lambda: (os.environ["A_USERS_OWN"], "PYTHONSAFEPATH" in os.environ))
    assert set(told.values()) == {(value, False)}


@pytest.mark.slow
@pytest.mark.cluster
def test_a_fork_server_that_is_stopped_does_not_hold_up_the_end_of_a_cluster(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\nfrom flows.cluster.cluster import local_cluster\n"
        "if __name__ == '__main__':\n"
        "    with local_cluster(1, folder=Path(sys.argv[1]), deadline_s=5.0): pass\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program), str(tmp_path)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as flow:
        server, deadline = None, time.monotonic() + 60
        while server is None and time.monotonic() < deadline:
            below = psutil.Process(flow.pid).children()
            server = next((one for one in below if "forkserver" in " ".join(one.cmdline())), None)
        assert server is not None
        server.send_signal(signal.SIGSTOP)
        try:
            _, said = flow.communicate(timeout=60)
        finally:
            flow.kill()
    assert "came up within 5 s. Raise runtime.patience" in said
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
