"""Checks of a cluster that others have started.

Refused are unsafe settings, listening on a network without TLS, other versions, and other devices than planned for.
"""

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from platform import python_version
from typing import Any, cast
from uuid import uuid4

from distributed import Client, Scheduler, Worker

from flows.cluster.this_machine import device_here
from flows.cluster.workers import ClusterError, Member
from planner.pricing.devices import PRESETS, DeviceProfile

MIN_WORKER_TTL_S = 120.0  # with less, a worker whose call holds the GIL for long would count as dead
SAME_VERSIONS = ("distributed", "prefect", "torch", "transformers")


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
    found = cast(
        dict[str, list[str]], client.run(_worker_listeners, workers=[member.address for member in members])
    )
    for member in members:
        _refuse_reachable(f"worker {member.name}", found[member.address])


def refuse_private_folder(client: Client, members: Sequence[Member], folder: Path) -> None:
    """Raises ClusterError for a host that does not see the run folder, tested with a token file."""
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


def refuse_other_versions(client: Client, members: Sequence[Member]) -> None:
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
    workers = [rank.address for rank in ranks]
    found = cast(dict[str, DeviceProfile], client.run(device_here, devices_per_host, workers=workers))
    for number, rank in enumerate(ranks):
        there, needed_bytes = found[rank.address], needs.get(number, 0)
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


def _versions() -> dict[str, str]:
    """Package -> installed version, or "none"; also Python's version without its patch level."""
    found = {"python": python_version().rsplit(".", 1)[0]}
    for package in SAME_VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


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
