"""Processes of a user's code: whatever state they and their keepers are in, none outlives those above it."""

import signal
import subprocess
import time

import psutil
import pytest

from prefect_rlhf.rlhf_tasks.system.child_processes import kept_call

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
