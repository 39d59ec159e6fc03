"""The fork server: what its forks have, and what becomes of a call in one."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from distributed import Client

from prefect_rlhf.flows.cluster.cluster import local_cluster
from prefect_rlhf.flows.cluster.forks import begin_to_load, in_fork
from tests.flows.dask_commands import ROOT
from tests.rlhf_tasks.settings import STARTUP_S
from tests.tiny_runs import ppo_config


@pytest.mark.whole
def test_a_call_in_a_fork_returns_its_value_and_raises_its_error():
    assert in_fork("math:factorial", 5) == 120
    with pytest.raises(ValueError, match="factorial"):
        in_fork("math:factorial", -1)


def test_a_fork_server_that_cannot_have_a_socket_is_done_without(tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    program = "from prefect_rlhf.flows.cluster.forks import *; print(begin_to_load(1), in_fork('math:factorial', 3))"
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
    (tmp_path / "prefect_rlhf.py").write_text("raise SystemExit('a module of the working folder was loaded')")
    program = tmp_path / "elsewhere" / "program.py"
    program.parent.mkdir()
    program.write_text(
        "from prefect_rlhf.flows.cluster.forks import in_fork\n"
        "if __name__ == '__main__': "
        "print(in_fork('prefect_rlhf.rlhf_tasks.controller.fork_server:LOADED.__len__') > 0)"
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
        "import sys\nfrom pathlib import Path\nfrom prefect_rlhf.flows.cluster.cluster import local_cluster\n"
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
    assert "came up within 5 s. Raise patience" in said
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


CALL = "from prefect_rlhf.flows.cluster.forks import refuse_unguarded_script as call\n"
SENTENCE = "a flow is called outside a main guard, and each worker process would call it again"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("call()", 2),
        ("def train():\n    call()\n\nif 1 > 0:\n    train()", 6),
        ("from concurrent.futures import ThreadPoolExecutor as Pool\nPool(1).submit(call).result()", 3),
        ("if __name__ == '__main__':\n    call()", None),
        (
            "import sys\nif 'x' in sys.argv or __name__ == '__main__':\n    for _ in range(2):\n        call()",
            None,
        ),
        ("import multiprocessing\nif multiprocessing.parent_process() is None:\n    call()", None),
        ("__name__ == '__main__' and call()", None),
        ("call() if __name__ == '__main__' else None", None),
        ("if __name__ != '__main__':\n    raise SystemExit\ncall()", None),
        ("if __name__ == '__main__':\n    print()\ncall()", 4),
    ],
)
def test_the_line_that_calls_a_flow_must_be_below_a_main_guard(tmp_path, text, line):
    script = tmp_path / "train.py"
    script.write_text(CALL + text)
    ended = run(str(script))
    if line is None:
        assert ended.returncode == 0, ended.stderr
        return
    assert ended.returncode == 1
    assert f"ConfigError: {script}:{line}: {SENTENCE}" in ended.stderr
    assert "Put the call below `if __name__ == '__main__':`" in ended.stderr


def test_what_no_worker_imports_needs_no_guard(tmp_path):
    """A command, as a prompt is; a package; and a module that a guarded script calls."""
    assert run("-c", f"{CALL}call()").returncode == 0
    (tmp_path / "__main__.py").write_text(f"{CALL}call()")
    assert run(str(tmp_path)).returncode == 0
    (tmp_path / "mine.py").write_text(f"{CALL}call()")
    (tmp_path / "train.py").write_text("if __name__ == '__main__':\n    import mine")
    ended = run(str(tmp_path / "train.py"))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.whole
@pytest.mark.cluster
def test_a_script_without_a_guard_leaves_no_folder_and_trains_when_it_has_one(tmp_path):
    config = ppo_config(tmp_path, name="mine", total_iterations=1)
    (tmp_path / "run.json").write_text(config.model_dump_json())
    imports = (
        "import asyncio, json\nfrom prefect_rlhf.flows.ppo import rlhf_ppo\n"
        "from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config\n"
        f"config = make_config(json.load(open({str(tmp_path / 'run.json')!r})))\n"
    )
    script = tmp_path / "train.py"
    script.write_text(f"{imports}asyncio.run(rlhf_ppo(config=config))\n")
    ended = run(str(script))
    assert ended.returncode == 1
    assert f"ConfigError: {script}:5: {SENTENCE}" in ended.stderr
    assert "Nanny" not in ended.stderr
    assert not (tmp_path / "runs").exists()
    script.write_text(f"{imports}if __name__ == '__main__':\n    asyncio.run(rlhf_ppo(config=config))\n")
    ended = run(str(script))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "runs" / "mine" / "summary.json").exists()
