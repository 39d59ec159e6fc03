"""Processes of a user's code: whatever state they and their keepers are in, none outlives those above it."""

import signal
import subprocess
import time
import venv
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from prefect_rlhf.rlhf_tasks.system.child_processes import kept_call, kept_call_of

SLEEPS = "sleep 600 & sleep 600"


def sleeping(keeper: psutil.Process) -> list[psutil.Process]:
    """The processes below a keeper: its own, that of the call, a shell, and two that sleep."""
    deadline = time.monotonic() + 60
    while len(below := keeper.children(recursive=True)) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(below) == 5
    return below


@pytest.mark.parametrize("killed", ["one above", "one below"])
def test_a_keeper_that_is_killed_leaves_nothing_even_if_all_others_are_stopped(killed: str):
    with subprocess.Popen(kept_call("os:system", SLEEPS), stdin=subprocess.PIPE) as process:
        keeper = psutil.Process(process.pid)
        below = sleeping(keeper)
        for one in below:
            one.suspend()
        (keeper if killed == "one above" else below[0]).kill()
        _, left = psutil.wait_procs(below, timeout=60)
        assert left == []
        assert process.wait(60) != 0


def test_a_call_that_is_given_up_ends_though_its_keeper_was_stopped():
    with subprocess.Popen(kept_call("os:system", SLEEPS), stdin=subprocess.PIPE) as process:
        below = sleeping(psutil.Process(process.pid))
        for one in below:
            one.suspend()
        process.send_signal(signal.SIGSTOP)
        process.kill()
        _, left = psutil.wait_procs(below, timeout=60)
    assert left == []


@pytest.mark.parametrize(("module", "status"), [("prefect_rlhf.rlhf_tasks.system.reading", 0), ("numpy", 1)])
def test_what_starts_in_another_environment_sees_this_package_and_nothing_else_from_here(
    tmp_path, module: str, status: int
):
    """As vLLM starts its workers: by multiprocessing, in new interpreters."""
    venv.create(tmp_path, symlinks=True)
    (installed,) = tmp_path.glob("lib/python*/site-packages")
    (installed / "psutil").symlink_to(Path(psutil.__file__).parent)  # of the keeper, as vLLM has it
    code = f"""
        import multiprocessing, os
        process = multiprocessing.get_context("spawn").Process(target=__import__, args=({module!r},))
        process.start()
        process.join()
        os._exit(process.exitcode)
    """
    call = kept_call_of(str(tmp_path / "bin" / "python"), "builtins:exec", dedent(code))
    with subprocess.Popen(call, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/") as process:
        assert process.wait(60) == status
