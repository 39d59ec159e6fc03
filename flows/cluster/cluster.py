"""The Dask cluster of a run: ranks and a controller, started here or found by address.

A cluster started here has its scheduler and nannies inside this process, so it ends with the process. It uses TLS
with keys made for it, so no other account of this host can connect. A cluster found by address is checked first. It
is refused for unsafe settings, for listening on a network without TLS, for other versions, and for devices other than
the planned ones.

A member is a worker as rank or controller. When its process is replaced, its name stays and its address changes.
"""

import asyncio
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from itertools import groupby
from pathlib import Path
from platform import python_version
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast
from uuid import uuid4

import dask
from distributed import Client, Nanny, Scheduler, Security, SpecCluster, Worker
from distributed.core import Status, rpc
from distributed.utils import get_mp_context

from prefect_rlhf.flows.cluster import forks
from prefect_rlhf.flows.cluster.shutdown import deaf_to_ctrl_c, leave_if_cancelled
from prefect_rlhf.flows.cluster.this_machine import THREADS, allow_open_files, device_here
from prefect_rlhf.planner.pricing.devices import PRESETS, DeviceProfile
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.rank.host import CONTROLLER_RESOURCE, RANK_RESOURCES, ProcessPlugin

T = TypeVar("T")
logger = logging.getLogger(__name__)
SETTINGS = {
    "distributed.scheduler.allowed-failures": 0,  # Dask must not rerun a task whose worker died
    "distributed.scheduler.worker-ttl": "10 minutes",  # a rank may hold the GIL for long
    "distributed.deploy.lost-worker-timeout": "600s",  # nannies restart workers; Dask must not remove them
    "distributed.worker.daemon": False,  # ranks may start child processes
    "distributed.worker.memory.terminate": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.spill": False,
    "distributed.comm.timeouts.connect": "30s",
    # With a value malloc no longer learns which sizes recur: every tensor above 128 KiB would be mapped and unmapped.
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": None,
    # Scheduler, nannies and workers each keep twenty figures of every half second: for an hour if this is not set.
    "distributed.admin.system-monitor.log-length": 10,
    "distributed.admin.system-monitor.interval": "5s",
    # Each of them would look fifty times a second whether its event loop is late.
    "distributed.admin.tick.interval": "500ms",
    # Each worker would look at its threads' stacks a hundred times a second, and keep what it saw for an hour.
    "distributed.worker.profile.enabled": False,
    # The HTTP servers of scheduler and workers have no login, so they serve nothing.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}
START = "distributed.worker.multiprocessing-method"
CONNECT_S = 30.0  # to a scheduler
LOOK_EVERY_S = 0.1
BACK_EVERY_S = 5.0  # at a scheduler, for workers that are back
BACK_ANSWER_S = 5.0  # within which a worker that is back answers; the scheduler lists lost ones for minutes
BACK_LOOKS = 2  # in a row that must see one
NANNIES_EVERY_S = 2.0
ENDED = (Status.closed, Status.failed)  # of a nanny
CLOSE_S = 8.0  # workers usually end in half a second
# An HTTP server starts anyway; without this it would be on port 8787 of every interface.
NO_DASHBOARD = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
MIN_WORKER_TTL_S = 120.0  # with less, a worker whose call holds the GIL for long would count as dead
SAME_VERSIONS = ("distributed", "prefect", "torch", "transformers")


class ClusterError(ConfigError):
    """A cluster that cannot serve the run; the message names what to change."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that is a rank or the controller.

    name     the same after a restart: its given name, or else its nanny's address
    address  of the current worker process
    host     as the scheduler sees it; ranks are grouped by it
    """

    name: str
    address: str
    host: str


def ranks_and_controllers(workers: Mapping[str, Mapping[str, Any]]) -> tuple[list[Member], list[Member]]:
    """(ranks, controllers) among the workers that a scheduler lists, each sorted by host, then by name."""
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
    """The ranks, sorted by host, in groups of `devices_per_host` that share a host. Those left over are not used."""
    whole: list[Member] = []
    for _, group in groupby(ranks, key=lambda rank: rank.host):
        there = list(group)
        whole += there[: len(there) // devices_per_host * devices_per_host]
    return whole


def _order(member: Member) -> tuple[str, list[str | int]]:
    """Sort key: host, then name, with numbers in it compared as numbers: rank-10 follows rank-9."""
    parts = re.split(r"(\d+)", member.name)  # text and numbers alternate
    return member.host, [int(part) if i % 2 else part for i, part in enumerate(parts)]


@dataclass(frozen=True, slots=True)
class DaskCluster:
    """The ranks (position = global rank = device id) and the controller of a cluster that passed the checks."""

    scheduler_address: str
    ranks: tuple[Member, ...]
    controller: Member
    security: Security

    @property
    def connection_args(self) -> dict[str, Any]:
        """The arguments of a connection to a worker: certificates, where TLS is used."""
        return self.security.get_connection_args("client")


@contextmanager
def local_cluster(
    n_ranks: int,
    *,
    gpus: Sequence[str] = (),
    folder: Path,
    deadline_s: float,
) -> Iterator[DaskCluster]:
    """A cluster of our own on this host: workers rank-0, rank-1, ... and the worker `controller`, on loopback.

    gpus        the GPUs by rank, each as CUDA_VISIBLE_DEVICES names it: a rank sees only its own, and offers `GPU`.
                Without them ranks see none, and offer `slot`
    folder      for the workers' scratch files and the cluster's keys
    deadline_s  seconds to wait for the workers
    Inside the context, clients of this process need only the cluster's address: its keys are in Dask's configuration.
    All processes are gone when the context ends. Raises ClusterError when the workers are not up in time, ConfigError
    where this process may not open as many files as they need.
    """
    allow_open_files(n_ranks)
    nannies: list[Nanny] = []

    def nanny(*arguments: Any, **options: Any) -> Nanny:
        nannies.append(Nanny(*arguments, **options))
        return nannies[-1]

    variables = forks.inherited(n_ranks)
    settings = {**SETTINGS, START: "forkserver" if not gpus and forks.begin_to_load(n_ranks) else "spawn"}
    with forks.environment(variables), _own_keys(folder) as keys, dask.config.set({**settings, **keys}):
        get_mp_context()  # the first call names other modules, for a server that is started again
        forks.name_modules()
        security = Security(require_encryption=True)
        encrypted = {"protocol": "tls", "security": security}
        options = {"host": "127.0.0.1", "port": 0, **encrypted, **NO_DASHBOARD}
        with deaf_to_ctrl_c():  # for the cluster's event loop thread, which starts the workers
            cluster = SpecCluster(
                {},
                {"cls": Scheduler, "options": options},
                security=security,
                name="prefect-rlhf",
                silence_logs=cast(bool, logging.ERROR),
            )
        try:
            cluster.worker_spec.update(_worker_spec(n_ranks, gpus, folder, encrypted, variables, nanny))
            _wait_up(cluster, n_ranks, deadline_s)
            with _nannies_replaced(cluster), Client(cluster, set_as_default=False) as client:
                yield form_cluster(client, n_ranks, deadline_s)
        finally:
            _close(cluster, nannies)


@contextmanager
def _own_keys(folder: Path) -> Iterator[dict[str, str]]:
    """A key and a certificate for one cluster, as settings of Dask's configuration.

    Their files are in a private folder below `folder`. Only this account can read it, and the context removes it.
    """
    made = Security.temporary()
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="tls-", dir=folder) as private:  # mode 0700
        key, certificate = Path(private, "key.pem"), Path(private, "certificate.pem")
        for file, text in ((key, made.tls_worker_key), (certificate, made.tls_worker_cert)):
            file.touch(mode=0o600)
            file.write_text(text)
        tls = "distributed.comm.tls"
        members = ("client", "scheduler", "worker")
        yield {
            f"{tls}.ca-file": str(certificate),  # self-signed: who has its key belongs to the cluster
            **{f"{tls}.{member}.cert": str(certificate) for member in members},
            **{f"{tls}.{member}.key": str(key) for member in members},
        }


def _worker_spec(
    n_ranks: int,
    gpus: Sequence[str],
    folder: Path,
    encrypted: Mapping[str, Any],
    variables: Mapping[str, str],
    nanny: Callable[..., Nanny],
) -> dict[str, dict[str, Any]]:
    """The workers for `SpecCluster`: `n_ranks` ranks with a device each, and the controller without one.

    variables  environment variables of all. They are passed with this process's own, since the fork server has those
               of its own start
    """
    common = {
        "host": "127.0.0.1",
        "memory_limit": 0,
        "local_directory": str(folder),
        **encrypted,
        **NO_DASHBOARD,
        "silence_logs": logging.ERROR,
    }

    def worker(resource: str, **environment: str) -> dict[str, Any]:
        env = {**os.environ, **variables, **environment}
        options = {**common, "nthreads": 1, "resources": {resource: 1}, "env": env}
        return {"cls": nanny, "options": options}

    ranks = {
        f"rank-{rank}": worker(
            "GPU" if gpus else "slot",
            CUDA_VISIBLE_DEVICES=gpus[rank] if gpus else "",
            GLOO_SOCKET_IFNAME="lo",
        )
        for rank in range(n_ranks)
    }
    controller = worker(CONTROLLER_RESOURCE, **dict.fromkeys(THREADS, "1"), CUDA_VISIBLE_DEVICES="")
    return {**ranks, "controller": controller}


def _wait_up(cluster: SpecCluster, n_ranks: int, deadline_s: float) -> None:
    """Start the workers of a cluster of ours. Raises ClusterError when they are not up in time."""

    async def start() -> None:
        await cluster

    started = asyncio.run_coroutine_threadsafe(start(), cast(Any, cluster.loop).asyncio_loop)
    deadline = time.monotonic() + deadline_s
    while not started.done() and time.monotonic() < deadline:
        leave_if_cancelled()
        wait([started], LOOK_EVERY_S)
    try:
        started.result(0)
    except TimeoutError:
        came = len(cast(Scheduler, cluster.scheduler).workers)
        raise ClusterError(
            f"{came} of {n_ranks + 1} workers ({n_ranks} ranks and a controller) came up within "
            f"{deadline_s:g} s. Raise patience, or end other work that keeps this machine busy."
        ) from None


@contextmanager
def _nannies_replaced(cluster: SpecCluster) -> Iterator[None]:
    """Inside, a worker whose nanny has ended gets another nanny.

    A nanny restarts a worker that dies. But it ends itself if the next worker fails while it starts, e.g. because the
    machine was so busy that its connection to the scheduler timed out.
    """

    async def look() -> None:
        while True:
            await asyncio.sleep(NANNIES_EVERY_S)
            workers = cast(dict[str, Nanny], cluster.workers)
            for name in [name for name, nanny in workers.items() if nanny.status in ENDED]:
                logger.warning("the nanny of worker %s has ended: another one takes its place", name)
                del workers[name]
            if cluster.worker_spec.keys() - workers.keys():
                cluster.scale(len(cluster.worker_spec))  # starts what is missing

    looking = asyncio.run_coroutine_threadsafe(look(), cast(Any, cluster.loop).asyncio_loop)
    try:
        yield
    finally:
        looking.cancel()


def _close(cluster: SpecCluster, nannies: Sequence[Nanny]) -> None:
    """End scheduler and workers; kill workers that are not gone within CLOSE_S.

    A nanny ends a starting worker only after that worker is up.
    """

    def kill_workers() -> None:
        for nanny in nannies:
            if nanny.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(nanny.pid, signal.SIGKILL)
        waiting = [nanny.process for nanny in nannies if nanny.process is not None and nanny.pid is None]
        if any(process.status is Status.starting for process in waiting):
            forks.kill_server()  # it does not fork; the forks of other clusters of this process end, too

    overdue = threading.Timer(CLOSE_S, kill_workers)
    overdue.start()
    try:
        cluster.close()
    finally:
        overdue.cancel()


@contextmanager
def found_cluster(
    address: str,
    n_ranks: int,
    *,
    folder: Path,
    deadline_s: float,
    devices_per_host: int = 1,
    assumed: DeviceProfile | None = None,
    needs: Mapping[int, float] | None = None,
    again: bool = False,
    least: int | None = None,
) -> Iterator[DaskCluster]:
    """A running cluster, found by its scheduler's address. It keeps running afterwards.

    folder            the run folder, which every host must see
    devices_per_host  ranks of the plan that must share a host
    deadline_s        seconds to wait for enough workers
    assumed           the device that the plan assumed because planning.device was not set; None where it was
    needs             rank -> bytes of tensors that the plan needs there
    again             the cluster has been used before and lost its scheduler or controller: waits for both
    least             as `form_cluster` takes it
    Certificates for a tls:// address are those of Dask's own configuration, `distributed.comm.tls`. Raises
    ClusterError naming the address, the setting, the version or the number of workers to change.
    """
    with _connected(address, deadline_s if again else min(deadline_s, CONNECT_S)) as client:
        refuse_unsafe(client)
        cluster = form_cluster(client, n_ranks, deadline_s, devices_per_host, least)
        serving = (*cluster.ranks, cluster.controller)
        refuse_exposed(client, serving)
        refuse_private_folder(client, serving, folder)
        if assumed is not None:
            refuse_other_devices(client, cluster.ranks, assumed, devices_per_host, needs or {})
        yield cluster


def _connected(address: str, deadline_s: float) -> Client:
    """A client of a scheduler. Raises ClusterError when none answers, or it refuses our certificates."""
    try:
        return Client(address, set_as_default=False, timeout=deadline_s)
    except (OSError, ValueError, TypeError) as error:  # no scheduler, no such address, no certificates
        raise ClusterError(
            f"no Dask scheduler answers at cluster.address={address}: {str(error) or type(error).__name__}. Start "
            "it, or correct the address; for tls:// set distributed.comm.tls.* of Dask's configuration."
        ) from None


def form_cluster(
    client: Client, n_ranks: int, deadline_s: float, devices_per_host: int = 1, least: int | None = None
) -> DaskCluster:
    """Choose ranks and controller among a cluster's workers, and register the plugin that sets them up.

    Ranks are the workers that offer one `GPU` or `slot`, sorted by host, then by name. Of those that fill whole hosts
    of the plan, the first `n_ranks` are used. The controller is the worker that offers `controller`.

    least  of a run that continues with fewer ranks than it should have: so many are enough at once, and any at the
           deadline. None: it needs all
    Raises ClusterError when they are not there within `deadline_s` seconds.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        offered, controllers = ranks_and_controllers(client.scheduler_info()["workers"])
        ranks = whole_hosts(offered, devices_per_host)
        late = time.monotonic() > deadline
        enough = n_ranks if least is None else 1 if late else least
        if least is not None and controllers and len(offered) >= enough:
            there = _answering(client, offered)
            whole = whole_hosts(there, devices_per_host)
            ranks = whole if len(whole) >= n_ranks else there
        if len(ranks) >= enough and controllers:
            break
        if late:
            lack = _too_few(address_of(client), n_ranks, devices_per_host, offered, ranks, controllers)
            raise ClusterError(f"{lack} (waited for {deadline_s:g} s; raise patience to wait longer)")
        leave_if_cancelled()
        time.sleep(LOOK_EVERY_S)
    serving = (*ranks[:n_ranks], controllers[0])
    refuse_other_versions(client, serving)
    client.register_plugin(ProcessPlugin())
    return DaskCluster(address_of(client), serving[:-1], serving[-1], client.security)


def _answering(client: Client, ranks: Sequence[Member]) -> list[Member]:
    """Those that answer: a scheduler lists workers for minutes after their host was cut off."""
    answers = client.run(os.getpid, workers=[rank.address for rank in ranks], on_error="ignore")
    return [rank for rank in ranks if rank.address in cast(dict[str, int], answers)]


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
            f"Start one: dask worker {address}{here} --name controller --nthreads 1 "
            f"--resources controller=1"
        )
    offer = f"{len(offered)} (workers with a GPU or slot resource)"
    if len(ranks) < len(offered):
        offer += (
            f", of which {len(ranks)} are on hosts with cluster.devices_per_host={devices_per_host} of them"
        )
    return (
        f"the plan needs {n_ranks} ranks; the cluster at {address} offers {offer}. "
        f"Start {n_ranks - len(ranks)} more: dask worker {address}{here} --nthreads 1 --resources slot=1"
    )


# --- ranks that are lost and come back ---


def slots_of(ranks: Sequence[Member], n_hosts: int, per_host: int) -> list[Member | None]:
    """[devices of the whole cluster] the rank of each, None where there is none: ranks by host, as they are sorted.

    Where some are missing, nobody knows which: those of the last hosts, and the last of a host, count as lost.
    """
    slots = list[Member | None]()
    for _, group in groupby(ranks, key=lambda rank: rank.host):
        there = list(group)
        for first in range(0, len(there), per_host):
            of_host = there[first : first + per_host]
            slots += [*of_host, *[None] * (per_host - len(of_host))]
    n_devices = n_hosts * per_host
    return [*slots, *[None] * n_devices][:n_devices]


async def another_rank(cluster: DaskCluster, known: Container[str]) -> str:
    """Wait until the scheduler has a worker for a rank that answers and has none of the known names. Its name."""
    name, seen = "", 0
    while seen < BACK_LOOKS:
        await asyncio.sleep(BACK_EVERY_S)
        name = await _another(cluster, known)
        seen = seen + 1 if name else 0
    return name


async def _another(cluster: DaskCluster, known: Container[str]) -> str:
    with suppress(OSError, ClusterError):  # no scheduler answers; workers that offer several devices
        workers = (await _identity(cluster, cluster.scheduler_address))["workers"]
        for rank in ranks_and_controllers(workers)[0]:
            if rank.name not in known:
                with suppress(OSError):
                    await _identity(cluster, rank.address)
                    return rank.name
    return ""


async def _identity(cluster: DaskCluster, address: str) -> Any:
    """What a scheduler or worker says of itself. Raises OSError where it does not answer."""
    async with rpc(address, connection_args=cluster.connection_args) as connection:
        return await asyncio.wait_for(connection.identity(), BACK_ANSWER_S)


# --- checks of a cluster that others have started ---


def refuse_unsafe(client: Client) -> None:
    """Raises ClusterError, naming the setting and a safe value, where a scheduler's settings make a run unsafe."""
    address = address_of(client)
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


def _refuse_reachable(who: str, listens_on: Sequence[str]) -> None:
    """Raises ClusterError for a process that other hosts can reach without TLS."""
    for address in listens_on:
        host = address.split("://")[-1].rsplit(":", 1)[0].strip("[]")
        if not address.startswith("tls://") and host != "localhost" and not ip_address(host).is_loopback:
            raise ClusterError(
                f"{who} listens on {address} without TLS: whoever reaches it can run code. Start it with "
                "--host 127.0.0.1, or scheduler and workers with certificates (--protocol tls --tls-ca-file "
                "--tls-cert --tls-key) and this process with distributed.comm.tls.* of Dask's own configuration."
            )


def refuse_exposed(client: Client, members: Sequence[Member]) -> None:
    """Raises ClusterError for a worker that other hosts can reach without TLS: workers run any code they are sent."""
    for member, listens_on in zip(members, _on_each(client, members, _worker_listeners), strict=True):
        _refuse_reachable(f"worker {member.name}", listens_on)


def refuse_private_folder(client: Client, members: Sequence[Member], folder: Path) -> None:
    """Raises ClusterError for a host that does not see the run folder, tested with a token file."""
    token = folder / f"token-{uuid4().hex}"
    token.touch()
    try:
        seen = _on_each(client, members, os.path.exists, str(token))
    finally:
        token.unlink()
    for member, sees in zip(members, seen, strict=True):
        if not sees:
            raise ClusterError(
                f"worker {member.name} on host {member.host} does not see the run folder {folder}. "
                "Choose a folder that all hosts share."
            )


def refuse_other_versions(client: Client, members: Sequence[Member]) -> None:
    """Raises ClusterError for a worker that runs other versions than this process."""
    here = _versions()
    for member, there in zip(members, _on_each(client, members, _versions), strict=True):
        for package, ours in here.items():
            if there[package] != ours:
                raise ClusterError(
                    f"worker {member.address} has {package} {there[package]}; this process has {ours}. "
                    "Install the same versions on all hosts (requirements.lock)."
                )


def refuse_other_devices(
    client: Client,
    ranks: Sequence[Member],
    assumed: DeviceProfile,
    devices_per_host: int,
    needs: Mapping[int, float],
) -> None:
    """Raises ClusterError for a rank whose device is not the planned one or has too little memory for the plan.

    assumed  the device that planning assumed for all ranks: this machine's
    needs    rank -> peak bytes of tensors on its device, by the plan
    """
    devices = _on_each(client, ranks, device_here, devices_per_host)
    for number, (rank, there) in enumerate(zip(ranks, devices, strict=True)):
        needed_bytes = needs.get(number, 0)
        where = f"worker {rank.name} on host {rank.host}"
        if there.name != assumed.name:
            name = there.name if there.name in PRESETS else "a YAML file with its figures"
            raise ClusterError(
                f"{where} has a {there.name}, but the plan was made for {assumed.name}, this machine's device. Set "
                f"planning.device={name}."
            )
        if needed_bytes > (room := there.room_bytes(len(ranks))):
            raise ClusterError(
                f"{where} has {room} bytes for tensors, but the plan, made for the memory of this "
                f"machine, needs {needed_bytes:.0f} there. Set planning.device to a YAML file with "
                f"{{like: {there.name}, memory_bytes: {there.memory_bytes}}}."
            )


def _on_each(
    client: Client, members: Sequence[Member], function: Callable[..., T], *arguments: Any
) -> list[T]:
    """What a function returns on each member, in their order."""
    results = client.run(function, *arguments, workers=[member.address for member in members])
    return [cast(dict[str, T], results)[member.address] for member in members]


def _versions() -> dict[str, str]:
    """Package -> installed version, or "none"; also Python's version without its patch level."""
    versions = {"python": python_version().rsplit(".", 1)[0]}
    for package in SAME_VERSIONS:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    return versions


def address_of(client: Client) -> str:
    """The address of the scheduler that a client is connected to."""
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
