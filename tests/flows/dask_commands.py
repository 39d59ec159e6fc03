"""Dask clusters started by commands, as a user types them."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from distributed import Client

ROOT = Path(__file__).parents[2]
SAFE = {
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "10 minutes",
}
LOOPBACK = ("--host", "127.0.0.1")
CONTROLLER = ("--nthreads", "1", "--resources", "controller=1", "--name", "boss")
RANK = ("--nthreads", "1", "--resources", "slot=1")


@contextmanager
def dask_command(*arguments, inside=(), **environment):
    """A `dask` command as a user types it. `inside` stands before it (tests/flows/two_hosts.py)."""
    command = [*inside, sys.executable, "-m", "dask", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def dask_scheduler(folder, *, host=LOOPBACK, port=0, **environment):
    """A scheduler started by command; its address."""
    file = folder / "scheduler.json"
    file.unlink(missing_ok=True)
    options = [*host, "--port", str(port), "--no-dashboard", "--scheduler-file", str(file)]
    with dask_command("scheduler", *options, **environment) as scheduler:
        deadline = time.monotonic() + 300
        while (address := _address_in(file)) is None:
            assert scheduler.poll() is None, "the scheduler has ended"
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with Client(address, set_as_default=False, timeout=300):
            yield address


def _address_in(file):
    """The address in a scheduler's file; None as long as it is not wholly written."""
    with suppress(FileNotFoundError, ValueError):
        return json.loads(file.read_text())["address"]
    return None


def dask_worker(address, folder, *options):
    """A worker started by command."""
    common = ["worker", address, "--no-dashboard", "--memory-limit", "0", "--local-directory", str(folder)]
    return dask_command(*common, *options)
