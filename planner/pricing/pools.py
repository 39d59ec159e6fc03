"""Pools: named sets of devices for calls, which every plan of a problem respects."""

from collections.abc import Mapping
from typing import NamedTuple

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.rlhf_tasks.config.cluster import PoolConfig, ranges
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError


class Pool(NamedTuple):
    """The devices of some calls."""

    name: str
    devices: frozenset[int]

    def __str__(self) -> str:
        return f"pool {self.name!r} ({_listed(self.devices)})"


def pools_of(pools: Mapping[str, PoolConfig], graph: DataflowGraph, cluster: Cluster) -> dict[str, Pool]:
    """Call -> its pool.

    Pools that ask for a number of devices get the first free ones, in the order of the pools: inside a host, or whole
    hosts, as meshes are.
    Raises ConfigError for pools that overlap, devices that are not there, too few of them, and names that are no
    call's.
    """
    taken: dict[int, str] = {}
    filled: dict[str, Pool] = {}
    for name, pool in sorted(
        pools.items(), key=lambda item: item[1].number > 0
    ):  # those with named devices first
        devices = pool.named(cluster.devices_per_host) or _free(name, pool.number, taken, cluster)
        for device in devices:
            if device >= cluster.n_devices:
                raise ConfigError(
                    f"planning.pools.{name} names device {device}; the cluster has 0 to {cluster.n_devices - 1}. "
                    "Choose others, or enlarge the cluster."
                )
            if device in taken:
                raise ConfigError(
                    f"planning.pools.{taken[device]} and planning.pools.{name} both have device {device}. Give it to "
                    "one of them."
                )
            taken[device] = name
        filled[name] = Pool(name, frozenset(devices))
    placed: dict[str, Pool] = {}
    for name, pool in pools.items():
        for member in pool.calls:
            calls = [call.name for call in graph.calls if member in (call.name, call.role)]
            if not calls:
                names = ", ".join([*graph.roles, *(call.name for call in graph.calls)])
                raise ConfigError(
                    f"planning.pools.{name}.calls has {member!r}, which is neither a role nor a call: {names}."
                )
            for call in calls:
                if call in placed and placed[call].name != name:
                    raise ConfigError(
                        f"{call} is in planning.pools.{placed[call].name} and in planning.pools.{name}. Leave it out "
                        "of one of them."
                    )
                placed[call] = filled[name]
    return placed


def _free(name: str, number: int, taken: Mapping[int, str], cluster: Cluster) -> range:
    """The first free devices that can be one mesh."""
    per_host = cluster.devices_per_host
    step = min(number, per_host) if per_host % number == 0 or number > per_host else 1
    for first in range(0, cluster.n_devices - number + 1, step):
        devices = range(first, first + number)
        inside = first // cluster.devices_per_host == devices[-1] // cluster.devices_per_host
        if not taken.keys() & set(devices) and (inside or number % cluster.devices_per_host == 0):
            return devices
    if number > per_host and number % per_host:
        raise ConfigError(
            f"planning.pools.{name} asks for any {number} devices; a host has {per_host}. Ask for whole hosts "
            f"(a multiple of {per_host}), or for at most one."
        )
    raise ConfigError(
        f"planning.pools.{name} asks for any {number} devices, but the cluster has {cluster.n_devices}, of which "
        f"{len(taken)} are in other pools. Ask for fewer, or enlarge the cluster."
    )


def _listed(devices: frozenset[int]) -> str:
    return f"device{'s' * (len(devices) > 1)} {','.join(ranges(tuple(sorted(devices))))}"
