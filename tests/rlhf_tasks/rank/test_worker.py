"""What every Dask worker process of ours does first."""

import asyncio
import logging
import logging.handlers
import multiprocessing
import os
import sys
import threading
import weakref
from contextlib import nullcontext
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from distributed import Scheduler, Worker
from distributed.comm import CommClosedError

from prefect_rlhf.flows.cluster.forks import begin_to_load
from prefect_rlhf.rlhf_tasks.rank import host
from prefect_rlhf.rlhf_tasks.rank.host import CLASSES, EngineHost, EngineThread, ProcessPlugin
from prefect_rlhf.rlhf_tasks.system.child_processes import end_with_starter


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_lives_however_its_nanny_starts_processes(method):
    """Of a fork server the starter is not the parent."""
    begin_to_load(1)  # else the session would keep a fork server that has loaded nothing
    process = multiprocessing.get_context(method).Process(target=end_with_starter)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_what_a_failed_job_held_is_free_when_the_next_one_runs():
    held = list[weakref.ref[Any]]()

    def fails() -> None:
        on_device = set[int]()
        held.append(weakref.ref(on_device))
        raise ValueError("told to fail")

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        thread, failed, looked = EngineThread(loop), asyncio.Event(), loop.create_future()
        thread.submit(fails, lambda _: failed.set())
        await failed.wait()
        thread.submit(lambda: held[0](), looked.set_result)
        return await looked

    assert asyncio.run(run()) is None


def test_a_rank_whose_abort_waits_without_end_ends_its_process_all_the_same(monkeypatch):
    over = threading.Event()
    rank = object.__new__(EngineHost)
    rank._executor = cast(Any, SimpleNamespace(abort=over.wait))
    rank._engine, rank._job = cast(Any, SimpleNamespace(finished=0)), ("call0-it0", 0.0)
    monkeypatch.setattr(host, "INTERRUPT_GRACE_S", 0.1)
    monkeypatch.setattr(host.os, "_exit", sys.exit)
    try:
        with pytest.raises(SystemExit):
            rank._abort(target=1)
    finally:
        over.set()


@pytest.mark.parametrize(("offers", "fails"), [("GPU", True), ("slot", False)])
def test_a_rank_of_a_gpu_that_torch_cannot_use_does_not_compute_on_the_cpu(monkeypatch, offers, fails):
    jobs, loaded = list[Any](), list[Any]()
    rank = object.__new__(EngineHost)
    rank.worker = cast(Any, SimpleNamespace(state=SimpleNamespace(total_resources={offers: 1})))
    rank._spec = cast(Any, SimpleNamespace(plan=SimpleNamespace(nodes=())))
    rank._executor = cast(Any, SimpleNamespace(load=loaded.append))
    monkeypatch.setattr(rank, "_submit", lambda key, job, ended: jobs.append(job))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rank._load(cast(Any, SimpleNamespace(key=None)))
    with (
        pytest.raises(RuntimeError, match=r"offers a GPU, and torch \S+ cannot use it")
        if fails
        else nullcontext()
    ):
        jobs[0]()
    assert loaded == ([] if fails else [rank._spec])


def part(worker):
    """What a worker becomes in the test below."""

    async def close():
        """Nothing to end."""

    return SimpleNamespace(worker=worker, handlers={}, close=close)


def test_a_heartbeat_that_is_lost_as_the_scheduler_ends_prints_no_traceback(monkeypatch):
    told = SimpleQueue[logging.LogRecord]()
    handler = logging.handlers.QueueHandler(told)
    logger = logging.getLogger(Worker.__module__)
    monkeypatch.setattr(host, "process", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setitem(CLASSES, "slot", f"{__name__}:part")
    monkeypatch.setattr(logger, "filters", [])
    logger.addHandler(handler)
    try:
        asyncio.run(_lose_a_heartbeat(monkeypatch))
    finally:
        logger.removeHandler(handler)
    messages = [told.get().getMessage() for _ in range(told.qsize())]
    assert "a line of another kind" in messages
    assert not [message for message in messages if "heartbeat" in message]


async def _lose_a_heartbeat(monkeypatch):
    async def lost(**figures):
        raise CommClosedError("closed")

    local = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    async with (
        Scheduler(port=0, **local) as scheduler,
        Worker(scheduler.address, resources={"slot": 1}, **local) as worker,
    ):
        await worker.plugin_add(ProcessPlugin())
        assert host.process.worker is worker
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""  # also where a user has named some
        with monkeypatch.context() as closed:
            closed.setattr(worker, "scheduler", SimpleNamespace(heartbeat_worker=lost))
            await worker.heartbeat()
        logging.getLogger(Worker.__module__).error("a line of another kind")
