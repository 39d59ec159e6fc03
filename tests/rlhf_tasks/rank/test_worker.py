"""What every Dask worker process of ours does first."""

import asyncio
import logging
import logging.handlers
import multiprocessing
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from distributed import Scheduler, Worker
from distributed.comm import CommClosedError

from prefect_rlhf.flows.cluster.forks import begin_to_load
from prefect_rlhf.rlhf_tasks.rank import host
from prefect_rlhf.rlhf_tasks.rank.host import CLASSES, ProcessPlugin
from prefect_rlhf.rlhf_tasks.system.child_processes import end_with_starter


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_lives_however_its_nanny_starts_processes(method):
    """Of a fork server the starter is not the parent."""
    begin_to_load(1)  # else the session would keep a fork server that has loaded nothing
    process = multiprocessing.get_context(method).Process(target=end_with_starter)
    process.start()
    process.join(60)
    assert process.exitcode == 0


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
        with monkeypatch.context() as closed:
            closed.setattr(worker, "scheduler", SimpleNamespace(heartbeat_worker=lost))
            await worker.heartbeat()
        logging.getLogger(Worker.__module__).error("a line of another kind")
