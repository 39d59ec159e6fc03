"""What a Dask worker process of ours is: a rank, or the controller.

`process` is the one module attribute that is set at run time: the `EngineHost` of a rank, the `Controller` of
the controller's worker, None elsewhere. The plugin sets it on every worker that offers one of the resources,
also on a restarted one. The plugin carries nothing of a run: a host learns its rank, and who its controller
is, by the controller's first request.

Torch-free: `tasks` and the flows import this module, a worker loads what it needs in `setup`.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

from rlhf_tasks.kept_process import die_with_parent

CONTROLLER_RESOURCE = "controller"
RANK_RESOURCES = ("GPU", "slot")
CLASSES = {
    CONTROLLER_RESOURCE: "rlhf_tasks.controller:Controller",
    **dict.fromkeys(RANK_RESOURCES, "rlhf_tasks.host:EngineHost"),
}

process: Any = None


class ProcessPlugin(WorkerPlugin):
    """Makes a worker that offers a resource of CLASSES what it is; registered once per cluster,
    idempotently."""

    name = "prefect-rlhf"
    idempotent = True

    async def setup(self, worker: Worker) -> None:
        global process  # the exception that this module is for
        kind = offered(worker.state.total_resources)
        if kind is not None:
            starter = multiprocessing.parent_process()
            if worker.nanny and starter is not None and starter.pid is not None:
                # Dask's own thread that ends a worker when its nanny has gone cannot run while the worker is stopped.
                # The thread that the nanny started it by lives as long as it does (distributed.process.AsyncProcess).
                die_with_parent(starter.pid)
            if worker.nanny and threading.current_thread() is threading.main_thread():
                # Ctrl-C in a terminal reaches every process; the flow decides, and ends us through the nanny.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                # Taking torch and Prefect apart, object by object, costs a core more than a second; the nanny kills
                # a process that is not gone in four. At this point the worker is closed and its streams are flushed.
                atexit.register(os._exit, 0)
            process = resolve_name(CLASSES[kind])(worker)
            worker.handlers.update(process.handlers)

    async def teardown(self, worker: Worker) -> None:
        if process is not None:
            await process.close()


def offered(resources: Mapping[str, float]) -> str | None:
    """The first resource of CLASSES that a worker offers; None when it offers none."""
    return next((name for name in CLASSES if resources.get(name, 0) > 0), None)


def report_to(environment: Mapping[str, str]) -> None:
    """Make a Prefect server this process' own, as if it had been started with these variables.

    Without PREFECT_API_URL Prefect's background threads would start a server of their own beside the first task.
    """
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    prefect_context = sys.modules.get("prefect.context")
    if prefect_context is not None:
        prefect_context.refresh_global_settings_context()
