"""Makes a Dask worker process a rank or the controller.

`process` is the only module attribute that is set at run time: the `EngineHost` of a rank, the `Controller` of the
controller's worker, None elsewhere. The plugin sets it on every worker that offers one of the resources, also after a
restart. The plugin knows nothing of a run: a host learns its rank and its controller from the controller's first
request.

Torch-free: the flows import this module; a worker loads what it needs in `setup`.
"""

import atexit
import logging
import os
import signal
import threading
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from distributed import Worker
from distributed.comm import CommClosedError
from distributed.diagnostics.plugin import WorkerPlugin

from rlhf_tasks.system.child_processes import end_with_starter

CONTROLLER_RESOURCE = "controller"
RANK_RESOURCES = ("GPU", "slot")
CLASSES = {
    CONTROLLER_RESOURCE: "rlhf_tasks.controller.controller:Controller",
    **dict.fromkeys(RANK_RESOURCES, "rlhf_tasks.rank.host:EngineHost"),
}

process: Any = None


class ProcessPlugin(WorkerPlugin):
    """Makes a worker that offers a resource of CLASSES a rank or the controller. Registered once per cluster."""

    name = "prefect-rlhf"
    idempotent = True

    async def setup(self, worker: Worker) -> None:
        global process  # the only global that is set at run time; see the module's docstring
        kind = offered(worker.state.total_resources)
        if kind is not None:
            logging.getLogger(Worker.__module__).addFilter(is_news)
            if worker.nanny:
                end_with_nanny()
            if worker.nanny and threading.current_thread() is threading.main_thread():
                # Ctrl-C in a terminal reaches every process, and so does the SIGTERM of a worker of Prefect's. The
                # flow decides, and ends this one through the nanny.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, lambda *_: None)  # a handler is not inherited by other programs
                # Python's teardown of torch and Prefect takes a core more than a second, and the nanny kills a
                # process that is not gone after four. By now the worker is closed and its streams are flushed.
                atexit.register(os._exit, 0)
            process = resolve_name(CLASSES[kind])(worker)
            worker.handlers.update(process.handlers)

    async def teardown(self, worker: Worker) -> None:
        if process is not None:
            await process.close()


def end_with_nanny() -> None:
    """Make the kernel end this worker with its nanny. Dask's own thread for that cannot run in a stopped worker.

    The kernel watches the thread that started this process: the nanny's, which lives as long as the process does
    (distributed.process.AsyncProcess), or that of the fork server, which ends with the nanny's process. Where both
    have ended before, Dask's thread ends this worker.
    """
    end_with_starter()


def is_news(record: logging.LogRecord) -> bool:
    """A filter without the traceback of a heartbeat during which the scheduler has closed the connection.

    A cluster of ours closes it when a run ends. If it is lost before, the flow says so.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, CommClosedError) and "heartbeat" in str(record.msg))


def offered(resources: Mapping[str, float]) -> str | None:
    """The first resource of CLASSES that a worker offers; None when it offers none."""
    return next((name for name in CLASSES if resources.get(name, 0) > 0), None)
