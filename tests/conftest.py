"""What tests share for a whole session since it takes long to start: gloo ranks, a Prefect server, a cluster."""

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

# Only the Hub of a test's own is asked (the fixture `hub`): no test needs the network.
os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)  # tiny tensors: more threads only cost, and change the last digits
# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# No example may fail for its seconds: neither a test's own, nor those in which its data was drawn.
settings.register_profile(
    "seeded", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("seeded")

SIZE = (
    4  # ranks of the cluster, and mostly of the pool: more than that on two cores only measures the scheduler
)
MOST = 6  # rank processes: three data-parallel ranks of two devices each
START_S = 200.0  # to import torch on a busy machine; not counted in a run's timeout
NO_GROUP = ("the ranks have not found each other", "Gloo connectFullMesh failed")
"""Of tests/rank_process.py, where the world is joined; and gloo's, where a group within it is built."""
GRACE_S = 5.0  # for the peers of a rank that failed to notice it


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need a server or a cluster: `make test` runs them one by one, the rest beside them. What
    only continuous integration runs is slow."""
    for item in items:
        if item.get_closest_marker("whole"):
            item.add_marker(pytest.mark.slow)
        if "prefect" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cluster)


def pytest_collection_finish() -> None:
    """Garbage is collected seldom, and without a look at the millions of objects of what is imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


class Nursery:
    """The process that forks ranks (tests/rank_process.py); started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def fork(self, pipe: Connection, store_port: int) -> int:
        """The pid of a new rank process at the other end of a pipe."""
        with ExitStack() as interrupted:
            interrupted.callback(self.close)  # its answer would be taken for a later one's
            if self._process is None:
                self._start()
            socket.send_fds(self._orders, [str(store_port).encode()], [pipe.fileno()])
            pid = int(self._orders.recv(64))
            interrupted.pop_all()
        return pid

    def _start(self) -> None:
        self._orders, theirs = socket.socketpair()
        root = Path(__file__).parents[1]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(root)}
        command = [sys.executable, str(Path(__file__).with_name("rank_process.py")), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
        self._orders.settimeout(START_S)

    def close(self) -> None:
        """End it, and with it the ranks."""
        if self._process is not None:
            self._orders.close()
            self._process.kill()
            self._process.wait()
            self._process = None


class RankPool:
    """Up to `MOST` rank processes, each started when a test first needs it."""

    def __init__(self, nursery: Nursery) -> None:
        self.nursery = nursery
        self._store: dist.TCPStore | None = None
        self._ranks: list[tuple[int, Connection]] = []
        self._runs = 0

    def run(self, n: int, function: Callable, *args: Any, timeout: float = 250.0) -> list[Any]:
        """Call `function(rank, world, *args)` on n ranks and return their results in rank order.

        The default process group is set up afresh for each call. The function's own module travels by value
        (so a test file's functions work); what it imports must be importable.
        Raises RuntimeError with the failing ranks' tracebacks, the first to fail first; TimeoutError after
        `timeout` seconds.
        """
        try:
            return self._run(n, function, args, timeout)
        except RuntimeError as error:
            if not any(words in str(error) for words in NO_GROUP):
                raise
        self.close()  # one of another test's processes may have called at a port of gloo's: once more, on new ranks
        return self._run(n, function, args, timeout)

    def _run(self, n: int, function: Callable, args: tuple[Any, ...], timeout: float) -> list[Any]:
        assert 1 <= n <= MOST, f"{n} ranks; the pool has {MOST}"
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        call = cloudpickle.dumps((function, args))
        with ExitStack() as interrupted:
            # A test's timeout may strike anywhere: what is then still to come must not be read as a later answer.
            interrupted.callback(self.close)
            self._start(n)
            self._runs += 1
            for rank in range(n):
                self._ranks[rank][1].send_bytes(pickle.dumps((self._runs, rank, n, timeout, call)))
            results, failures, stuck = self._collect(n, timeout)
            if not stuck:
                interrupted.pop_all()
        if failures:
            raise RuntimeError("\n".join(failures))
        if stuck:
            raise TimeoutError(f"ranks {stuck} of {n} gave no result in {timeout} s (stacks on stderr)")
        return results

    def close(self) -> None:
        """End every rank."""
        for pid, pipe in self._ranks:
            pipe.close()
            with suppress(ProcessLookupError):  # the nursery has ended, and it with it
                os.kill(pid, signal.SIGKILL)
        self._ranks.clear()
        self._store = None

    def _start(self, n: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        started = range(len(self._ranks), n)
        while len(self._ranks) < n:
            ours, theirs = Pipe()
            with theirs:
                self._ranks.append((self.nursery.fork(theirs, self._store.port), ours))
        for rank in started:
            if not self._ranks[rank][1].poll(START_S):
                raise TimeoutError(f"rank process {rank} did not start within {START_S} s")
            assert self._ranks[rank][1].recv_bytes() == b"ready"

    def _collect(self, n: int, timeout: float) -> tuple[list[Any], list[str], list[int]]:
        """Results in rank order, what failed, and the ranks that are of no use any more: stuck or dead."""
        waiting = {self._ranks[rank][1]: rank for rank in range(n)}
        results: list[Any] = [None] * n
        failures: list[str] = []
        deadline = time.monotonic() + timeout
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), remaining):
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    done, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    done, value = False, "the process died"
                    deadline = 0.0  # its place must be filled anew
                    waiting[pipe] = rank  # type: ignore[index]
                results[rank] = value
                if not done:
                    failures.append(f"rank {rank} of {n}: {value}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        stuck = sorted(waiting.values())
        if stuck:
            self._dump_stacks(stuck)
        return results, failures, stuck

    def _dump_stacks(self, stuck: list[int]) -> None:
        for rank in stuck:
            os.kill(self._ranks[rank][0], signal.SIGUSR1)
        time.sleep(0.5)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks.run(n, function, *args, timeout=250.0)`; see RankPool.run."""
    nursery = Nursery()
    pool = RankPool(nursery)
    yield pool
    pool.close()
    nursery.close()


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Prefect server."""
    from prefect_rlhf.flows.cluster.server import (
        own_server,  # here, since it takes seconds and most tests do without
    )

    with own_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session")
def started_cluster(prefect: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The cluster when it was started."""
    from prefect_rlhf.flows.cluster.cluster import local_cluster
    from tests.rlhf_tasks.settings import STARTUP_S

    folder = tmp_path_factory.mktemp("dask")
    with local_cluster(SIZE, folder=folder, deadline_s=STARTUP_S) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(started_cluster: Any) -> Any:
    """`SIZE` ranks and a controller that report to `prefect`. A process that a test kills comes back elsewhere."""
    from distributed import Client

    from prefect_rlhf.flows.cluster.cluster import form_cluster
    from tests.rlhf_tasks.settings import STARTUP_S

    with Client(started_cluster.scheduler_address, set_as_default=False) as client:
        return form_cluster(client, SIZE, deadline_s=STARTUP_S)


@pytest.fixture(scope="session")
def second_user(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The files of `tests/second_user.py`, made once: change copies only; each run is to have an `output_dir`."""
    from tests.second_user import second_user as make

    return make(tmp_path_factory.mktemp("second_user"))


@pytest.fixture
def hub() -> Iterator[Any]:
    """A Hub on loopback, empty: see `tests/loopback_hub.py`."""
    from tests.loopback_hub import Hub

    server = Hub()
    yield server
    server.close()
