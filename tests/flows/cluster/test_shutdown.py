"""A signal ends a run in time: also one whose exception was swallowed, and also a run that will not be cancelled."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_rlhf.flows import pipeline
from prefect_rlhf.flows.cluster import shutdown as ending
from prefect_rlhf.flows.cluster.shutdown import ending_in_time, leave_if_cancelled, patient, run_in_thread
from prefect_rlhf.flows.run import runs, training
from tests.flows.cluster.signals import Raised, handled_as_by_prefect, lose_a_signal
from tests.tiny_runs import ppo_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
STUBBORN = """
    import asyncio, subprocess, sys
    from prefect_rlhf.flows.cluster.shutdown import ending_in_time

    async def run(watch):
        watch.run = asyncio.current_task()
        child = subprocess.Popen(["sleep", "600"])
        print(child.pid, flush=True)
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                print("CANCELLED", flush=True)

    with ending_in_time(end_s=float(sys.argv[1])) as watch:
        watch.last_words = "the last words"
        asyncio.run(run(watch))
"""


def python(program, *arguments, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def soon():
    """Sends this process a signal shortly after."""
    threads = []

    def send(number, *delays_s):
        for delay_s in delays_s:
            threads.append(threading.Timer(delay_s, os.kill, (os.getpid(), number)))
            threads[-1].start()

    yield send
    for thread in threads:
        thread.join()


def until_called_off(called_off):
    while not called_off():
        time.sleep(0.01)
    return "what there is"


def test_work_beside_gives_its_result_or_its_error():
    assert run_in_thread(lambda _: threading.current_thread()) is not threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        run_in_thread(lambda _: 1 / 0)


def test_ctrl_c_ends_work_beside_early_and_gives_what_there_is(soon):
    told = []
    soon(signal.SIGINT, 0.2)
    assert run_in_thread(until_called_off, ending=lambda: told.append("ending")) == "what there is"
    assert told == ["ending"]


def test_ctrl_c_leaves_work_beside_that_nobody_waits_for(soon):
    ended = threading.Event()
    soon(signal.SIGINT, 0.2)
    with pytest.raises(KeyboardInterrupt):
        run_in_thread(lambda called_off: [until_called_off(called_off), ended.set()])
    assert ended.wait(60)


def test_a_second_ctrl_c_leaves_work_that_does_not_end(soon, monkeypatch):
    monkeypatch.setattr(ending, "SOON_S", 0.1)
    release = threading.Event()
    soon(signal.SIGINT, 0.2, 0.6)
    with pytest.raises(KeyboardInterrupt):
        run_in_thread(lambda _: release.wait(60), ending=lambda: None)
    release.set()


COMMAND = """
    import asyncio, sys
    from pathlib import Path
    from types import SimpleNamespace
    from prefect_rlhf.flows.commands import local_run as session
    from tests.flows.cluster.signals import handled_as_by_prefect, lose_a_signal

    async def run_as_flow(folder, prepared):
        await lose_a_signal()

    session.run_as_flow = run_as_flow
    with handled_as_by_prefect():
        session.run_here(Path("mine"), SimpleNamespace(config=SimpleNamespace(type="ppo")))
"""


def test_a_command_whose_signal_was_swallowed_ends_and_says_how_to_go_on():
    with python(COMMAND, PREFECT_API_URL="http://127.0.0.1:9/api") as command:
        out, errors = command.communicate(timeout=500)
    assert command.returncode == 128 + signal.SIGTERM, errors
    assert "To continue: prefect-rlhf run ppo --resume mine" in out


WHILE_ITS_SERVER_STARTS = """
    import os, sys, time
    from contextlib import contextmanager, nullcontext
    from pathlib import Path
    from types import SimpleNamespace
    from prefect_rlhf.flows.commands import local_run as session

    @contextmanager
    def starting(folder):
        try:
            os.kill(os.getpid(), int(sys.argv[1]))
            time.sleep(400)
            yield
        finally:
            print("the server is gone")

    session.prefect_server = starting
    try:
        session.run_here(Path("mine"), SimpleNamespace(config=SimpleNamespace(type="ppo")))
    except KeyboardInterrupt:  # as the command line does
        sys.exit(130)
"""


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.whole)],
    ids=["interrupted", "terminated"],
)
def test_a_command_whose_server_is_starting_cleans_up_and_says_how_to_go_on(number):
    with python(WHILE_ITS_SERVER_STARTS, str(int(number))) as command:
        out, errors = command.communicate(timeout=300)
    assert command.returncode == 128 + number, errors
    assert "the server is gone" in out
    assert out.endswith("stopped. To continue: prefect-rlhf run ppo --resume mine\n")


@pytest.mark.parametrize("place", ["a run", "the demo"])
def test_a_flow_whose_signal_was_swallowed_is_cancelled(tmp_path, monkeypatch, place):
    """As a deployment has it: there is no command around the flow."""

    @contextmanager
    def no_cluster(*_, **__):
        yield SimpleNamespace(scheduler_address="")

    async def begin(_):
        await lose_a_signal()

    async def flow():
        if place == "a run":
            await runs.carry_out("ppo", ppo_config(tmp_path))
        else:
            with pipeline.demo_at(tmp_path, seed=0):
                await lose_a_signal()

    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(uuid4()))
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "1")
    monkeypatch.setattr(runs, "cancelled_by_signals", lambda _: nullcontext())  # as for a worker's flow run
    monkeypatch.setattr(training, "cluster_of", no_cluster)
    monkeypatch.setattr(pipeline, "local_cluster", no_cluster)
    monkeypatch.setattr(runs.RunView, "begin", begin)
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        handled_as_by_prefect(),
        pytest.raises(asyncio.CancelledError),
    ):
        asyncio.run(flow())


async def run_for(seconds, patience_s):
    """A run that gets a SIGTERM as it begins, and ends by itself some seconds later."""
    with ending_in_time(asyncio.current_task()), patient(lambda: patience_s):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(seconds)
    return "its last commit"


def test_a_run_that_ends_soon_enough_after_a_workers_signal_ends_by_itself():
    with handled_as_by_prefect():
        assert asyncio.run(run_for(2.0, patience_s=60.0)) == "its last commit"


def test_a_workers_signal_takes_effect_when_patience_is_over():
    began = time.monotonic()
    with handled_as_by_prefect(), pytest.raises((Raised, asyncio.CancelledError)):
        asyncio.run(run_for(600.0, patience_s=1.0))
    assert time.monotonic() > began + 1.0
    with handled_as_by_prefect(), pytest.raises(Raised):
        os.kill(os.getpid(), signal.SIGTERM)  # the handler before is there again


@pytest.mark.parametrize(("end_s", "signals"), [("1", 1), ("600", 2)], ids=["in time", "asked twice"])
def test_what_does_not_end_is_killed_with_its_children(end_s, signals):
    with python(STUBBORN, end_s) as run:
        child = psutil.Process(int(run.stdout.readline()))
        try:
            run.send_signal(signal.SIGINT)
            assert run.stdout.readline() == "CANCELLED\n"
            if signals == 2:
                with pytest.raises(subprocess.TimeoutExpired):
                    run.wait(3)  # sooner, it would be the same signal
                run.send_signal(signal.SIGINT)
            _, errors = run.communicate(timeout=500)
            assert run.returncode == 128 + signal.SIGINT
            assert errors.endswith("the last words")
            gone, _ = psutil.wait_procs([child], timeout=60)
            assert gone
        finally:
            run.kill()
            if child.is_running():
                child.kill()


def test_a_wait_that_blocks_the_loop_is_left_when_its_task_was_told_to_end():
    async def waiting():
        leave_if_cancelled()
        asyncio.current_task().cancel()
        leave_if_cancelled()
        pytest.fail("it continued")

    leave_if_cancelled()  # there is no task here
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(waiting())


def test_signals_are_left_as_they_were():
    with ending_in_time() as outer:
        descriptor = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(descriptor)
        with ending_in_time() as inner:
            assert signal.set_wakeup_fd(descriptor) == descriptor
        assert inner is not outer
        assert signal.set_wakeup_fd(descriptor) == descriptor
    assert signal.set_wakeup_fd(-1) == -1
