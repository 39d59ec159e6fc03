"""The Dask cluster of a run: ranks and a controller, made here or found by address.

One made here has its scheduler and nannies inside this process, so it dies with it. One found by address is
checked first: its unsafe settings are refused by name. A *member* is a worker seen as rank or controller; it
keeps its name when its process is replaced, and changes its address.
"""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from itertools import groupby
from pathlib import Path
from platform import python_version
from typing import Any, cast
from uuid import uuid4

import dask
from distributed import Client, Nanny, Scheduler, Security, SpecCluster, Worker

from rlhf_tasks.config import ConfigError
from rlhf_tasks.worker_process import CONTROLLER_RESOURCE, RANK_RESOURCES, ProcessPlugin

SETTINGS = {
    "distributed.scheduler.allowed-failures": 0,  # a task whose worker died is not run again behind our back
    "distributed.scheduler.worker-ttl": "10 minutes",  # a rank may hold the GIL for long
    "distributed.deploy.lost-worker-timeout": "600s",  # nannies bring workers back; nobody else removes them
    "distributed.worker.daemon": False,  # ranks may start child processes
    "distributed.worker.memory.terminate": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.spill": False,
    "distributed.comm.timeouts.connect": "30s",
}
MIN_WORKER_TTL_S = 120.0  # shorter: a long call that holds the GIL would count as a dead worker
START_DEADLINE_S = 120.0
CLOSE_S = 8.0  # workers end in half a second
CONTROLLER_THREADS = 64  # Prefect tasks wait in them: two iterations of a plan of up to 32 nodes at once
SAME_VERSIONS = ("distributed", "prefect", "prefect-dask", "torch", "transformers")


class ClusterError(ConfigError):
    """A cluster that cannot serve the run; the message names what to change."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as rank or controller.

    name     stable over restarts: its own name, or its nanny's address where nobody gave it one
    address  of the worker process now
    host     as the scheduler sees it; ranks are grouped by it
    """

    name: str
    address: str
    host: str


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks (position = global rank = device id) and the controller of a cluster that was found fit.

    environment  what the controller needs to report to the run's Prefect server; None: it has it already
    """

    scheduler_address: str
    ranks: tuple[Member, ...]
    controller: Member
    security: Security
    environment: Mapping[str, str] | None = None

    @property
    def connection_args(self) -> dict[str, Any]:
        """What a connection to a worker needs: certificates, where TLS is used."""
        return self.security.get_connection_args("client")


@contextmanager
def local_cluster(
    n_ranks: int, environment: Mapping[str, str], *, gpus: bool = False, folder: Path
) -> Iterator[Cluster]:
    """A cluster of our own on this host: `n_ranks` workers rank-0 .. and the worker `controller`, on loopback.

    environment  for all workers: the Prefect server's address and login
    gpus         each rank sees one GPU (its number = the rank) and offers `GPU`; otherwise it sees none and
                 offers `slot`
    folder       where workers keep scratch files
    All processes are gone when the context ends. Raises TimeoutError when they are not up in time.
    """
    threads = max(1, (os.cpu_count() or 1) // n_ranks)
    # An HTTP server starts all the same: not on port 8787 of every interface, its default.
    no_dashboard = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
    common = {
        "host": "127.0.0.1",
        "memory_limit": 0,
        "local_directory": str(folder),
        **no_dashboard,
        "silence_logs": logging.ERROR,
    }
    with _environment(environment), dask.config.set(SETTINGS):
        workers = {
            f"rank-{rank}": {
                "cls": Nanny,
                "options": {
                    **common,
                    "nthreads": 1,
                    "resources": {"GPU" if gpus else "slot": 1},
                    "env": {
                        "OMP_NUM_THREADS": str(threads),
                        "CUDA_VISIBLE_DEVICES": str(rank) if gpus else "",
                        **({} if gpus else {"GLOO_SOCKET_IFNAME": "lo"}),
                    },
                },
            }
            for rank in range(n_ranks)
        }
        workers["controller"] = {
            "cls": Nanny,
            "options": {
                **common,
                "nthreads": CONTROLLER_THREADS,
                "resources": {CONTROLLER_RESOURCE: 1},
                "env": {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            },
        }
        scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, **no_dashboard}}
        cluster = SpecCluster(workers, scheduler, name="prefect-rlhf", silence_logs=cast(bool, logging.ERROR))
        try:
            with Client(cluster, set_as_default=False) as client:
                yield form_cluster(client, n_ranks)
        finally:
            _close(cluster)


def _close(cluster: SpecCluster) -> None:
    """End scheduler and workers. A nanny lets a worker that only just starts finish that first: those that are not
    gone in time are killed."""

    def kill_workers() -> None:
        for nanny in list(cluster.workers.values()):
            if nanny.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(nanny.pid, signal.SIGKILL)

    overdue = threading.Timer(CLOSE_S, kill_workers)
    overdue.start()
    try:
        cluster.close()
    finally:
        overdue.cancel()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that worker processes inherit from this one, now and when a nanny replaces one.

    A nanny's own `env` comes too late: a spawned process first imports the main module of its parent, and if
    that imports Prefect, Prefect has read its settings.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def found_cluster(
    address: str,
    n_ranks: int,
    *,
    folder: Path,
    devices_per_host: int = 1,
    environment: Mapping[str, str] | None = None,
    security: Security | None = None,
    deadline_s: float = START_DEADLINE_S,
) -> Iterator[Cluster]:
    """A cluster that runs already, by its scheduler's address; it is left as it was found.

    folder            the run folder: every host must see it
    devices_per_host  ranks of the plan that must share a host
    environment       the Prefect server's address and login, which the controller reports to as soon as the
                      run holds its lease
    security          certificates for a tls:// address
    deadline_s        how long to wait for enough workers
    Raises ClusterError naming the setting, the version or the number of workers to change.
    """
    with Client(address, set_as_default=False, timeout=30, security=security) as client:
        refuse_unsafe(client)
        cluster = form_cluster(client, n_ranks, devices_per_host, deadline_s)
        _refuse_exposed(client, cluster)
        _refuse_private_folder(client, cluster, folder)
        yield replace(cluster, environment=environment)


def form_cluster(
    client: Client, n_ranks: int, devices_per_host: int = 1, deadline_s: float = START_DEADLINE_S
) -> Cluster:
    """Choose ranks and controller among a cluster's workers, and make them what they are.

    Ranks are the workers that offer one `GPU` or `slot`, sorted by host, then by name; the first `n_ranks` of
    those that form whole hosts of the plan serve. The controller is the worker that offers `controller`.
    Raises ClusterError when they are not there within the deadline.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        offered, controllers = members(client.scheduler_info()["workers"])
        ranks = whole_hosts(offered, devices_per_host)
        if len(ranks) >= n_ranks and controllers:
            break
        if time.monotonic() > deadline:
            raise ClusterError(
                _too_few(_address(client), n_ranks, devices_per_host, offered, ranks, controllers)
            )
        time.sleep(0.1)
    _refuse_other_versions(client, ranks[:n_ranks] + controllers[:1])
    client.register_plugin(ProcessPlugin())
    return Cluster(
        _address(client),
        tuple(ranks[:n_ranks]),
        controllers[0],
        client.security,
    )


def refuse_unsafe(client: Client) -> None:
    """Raises ClusterError for a scheduler whose settings make a run unsafe, naming the setting and the safe
    value."""
    address = _address(client)
    settings = cast(dict[str, Any], client.run_on_scheduler(_scheduler_settings))
    _refuse_reachable(f"the scheduler {address}", settings["listens_on"])
    if settings["allowed_failures"] != 0:
        raise ClusterError(
            f"distributed.scheduler.allowed-failures is {settings['allowed_failures']} on {address}: the "
            "scheduler would run finished calls again when a worker dies. Start it with "
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=0."
        )
    ttl_s = settings["worker_ttl"]
    if ttl_s is not None and ttl_s < MIN_WORKER_TTL_S:
        raise ClusterError(
            f"distributed.scheduler.worker-ttl is {ttl_s:g} s on {address}: a rank inside a long call would "
            "count as dead. Start the scheduler with DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL='10 minutes'."
        )


def members(workers: Mapping[str, Mapping[str, Any]]) -> tuple[list[Member], list[Member]]:
    """(ranks, controllers) among the workers that a scheduler describes, each by host, then name."""
    ranks, controllers = [], []
    for address, worker in workers.items():
        resources = worker["resources"]
        name = worker["name"] if worker["name"] != address else worker["nanny"] or address
        member = Member(str(name), address, worker["host"])
        if resources.get(CONTROLLER_RESOURCE, 0) > 0:
            controllers.append(member)
            continue
        for resource in RANK_RESOURCES:
            if resources.get(resource, 0) > 1:
                raise ClusterError(
                    f"worker {name} offers {resource}={resources[resource]:g}: a rank drives one device. "
                    f"Start one worker per device, each with --resources {resource}=1."
                )
        if any(resources.get(resource, 0) for resource in RANK_RESOURCES):
            ranks.append(member)
    return sorted(ranks, key=_order), sorted(controllers, key=_order)


def whole_hosts(ranks: Sequence[Member], devices_per_host: int) -> list[Member]:
    """The ranks, sorted by host, that fill hosts of the plan: each run of `devices_per_host` is on one host. What
    is left over on a host does not serve."""
    whole: list[Member] = []
    for _, group in groupby(ranks, key=lambda rank: rank.host):
        there = list(group)
        whole += there[: len(there) // devices_per_host * devices_per_host]
    return whole


def _order(member: Member) -> tuple[str, list[str | int]]:
    """By host, then by name with its numbers compared as numbers: rank-10 follows rank-9."""
    parts = re.split(r"(\d+)", member.name)  # text and numbers alternate
    return member.host, [int(part) if i % 2 else part for i, part in enumerate(parts)]


def _too_few(
    address: str,
    n_ranks: int,
    devices_per_host: int,
    offered: Sequence[Member],
    ranks: Sequence[Member],
    controllers: Sequence[Member],
) -> str:
    here = "" if address.startswith("tls://") else " --host 127.0.0.1"
    if not controllers:
        return (
            f"the cluster at {address} has no controller. "
            f"Start one: dask worker {address}{here} --name controller --nthreads {CONTROLLER_THREADS} "
            f"--resources controller=1"
        )
    found = f"{len(offered)} (workers with a GPU or slot resource)"
    if len(ranks) < len(offered):
        found += f", {len(ranks)} of them {devices_per_host} to a host as cluster.devices_per_host wants it"
    return (
        f"the plan needs {n_ranks} ranks; the cluster at {address} offers {found}. "
        f"Start {n_ranks - len(ranks)} more: dask worker {address}{here} --nthreads 1 --resources slot=1"
    )


def _refuse_reachable(who: str, listens_on: Sequence[str]) -> None:
    """Raises ClusterError for a process that others than this host reach without TLS."""
    for address in listens_on:
        host = address.split("://")[-1].rsplit(":", 1)[0].strip("[]")
        if not address.startswith("tls://") and host != "localhost" and not ip_address(host).is_loopback:
            raise ClusterError(
                f"{who} listens on {address} without TLS: whoever reaches it can run code. Start it with "
                "--host 127.0.0.1, or scheduler and workers with certificates (tls://)."
            )


def _refuse_exposed(client: Client, cluster: Cluster) -> None:
    """What holds for the scheduler holds for the workers: they run what they are sent."""
    members = (*cluster.ranks, cluster.controller)
    found = cast(
        dict[str, list[str]], client.run(_worker_listeners, workers=[member.address for member in members])
    )
    for member in members:
        _refuse_reachable(f"worker {member.name}", found[member.address])


def _refuse_private_folder(client: Client, cluster: Cluster, folder: Path) -> None:
    """Every member must find a token file in the run folder. Raises ClusterError naming a host that does not."""
    members = (*cluster.ranks, cluster.controller)
    token = folder / f"token-{uuid4().hex}"
    token.touch()
    try:
        workers = [member.address for member in members]
        seen = cast(dict[str, bool], client.run(os.path.exists, str(token), workers=workers))
    finally:
        token.unlink()
    for member in members:
        if not seen[member.address]:
            raise ClusterError(
                f"worker {member.name} on host {member.host} does not see the run folder {folder}. "
                "Choose a folder that all hosts share."
            )


def _refuse_other_versions(client: Client, members: list[Member]) -> None:
    """Raises ClusterError for a worker that runs other versions than this process."""
    here = _versions()
    found = cast(
        dict[str, dict[str, str]], client.run(_versions, workers=[member.address for member in members])
    )
    for address, there in found.items():
        for package, ours in here.items():
            if there[package] != ours:
                raise ClusterError(
                    f"worker {address} has {package} {there[package]}; this process has {ours}. "
                    "Install the same versions on all hosts (requirements.lock)."
                )


def _versions() -> dict[str, str]:
    """Package -> installed version, "none" where it is not installed; Python too, without its patch level."""
    found = {"python": python_version().rsplit(".", 1)[0]}
    for package in SAME_VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def _address(client: Client) -> str:
    assert client.scheduler is not None, "the client is connected"
    return str(client.scheduler.address)


def _scheduler_settings(dask_scheduler: Scheduler) -> dict[str, Any]:
    return {
        "allowed_failures": dask_scheduler.allowed_failures,
        "worker_ttl": dask_scheduler.worker_ttl,
        "listens_on": [listener.listen_address for listener in dask_scheduler.listeners],
    }


def _worker_listeners(dask_worker: Worker) -> list[str]:
    return [str(listener.listen_address) for listener in dask_worker.listeners]
