"""Clusters and device meshes: the sets of devices that a call may use."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefect_rlhf.rlhf_tasks.parallel.layout.topology import check_count


class MeshError(ValueError):
    """The devices do not form a device mesh of the cluster."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of n_hosts hosts with devices_per_host devices each. Devices are numbered from 0, host by host."""

    n_hosts: int
    devices_per_host: int

    def __post_init__(self) -> None:
        for field in ("n_hosts", "devices_per_host"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise MeshError(f"{field}={value!r} is not a positive whole number.")
        try:
            check_count(self.n_hosts, self.devices_per_host)
        except ValueError as error:
            raise MeshError(str(error)) from None

    @property
    def n_devices(self) -> int:
        return self.n_hosts * self.devices_per_host

    def host(self, device: int) -> int:
        """The host of a device."""
        return device // self.devices_per_host

    def __str__(self) -> str:
        return f"{self.n_hosts}x{self.devices_per_host}"


@dataclass(frozen=True, slots=True, order=True)
class DeviceMesh:
    """Devices first .. first + size - 1: whole consecutive hosts, or an aligned part of one host.

    The size of a part divides the host's size, and the part starts at a multiple of its size. So two meshes of one
    cluster are equal, disjoint or nested, unless both span several hosts.
    Raises MeshError for any other devices.
    """

    cluster: Cluster
    first: int
    size: int

    def __post_init__(self) -> None:
        cluster, per_host = self.cluster, self.cluster.devices_per_host
        if self.size < 1 or self.first < 0 or self.first + self.size > cluster.n_devices:
            raise MeshError(_outside(self._range(), cluster))
        if self.size > per_host and (self.size % per_host or self.first % per_host):
            raise MeshError(
                f"devices {self._range()} are not whole hosts of {per_host} devices. "
                "A mesh on several hosts holds all their devices."
            )
        if self.size <= per_host and (per_host % self.size or self.first % self.size):
            raise MeshError(
                f"devices {self._range()} are not an aligned part of a host of {per_host} devices. "
                f"A part's size divides {per_host}, and its first device is a multiple of its size."
            )

    def _range(self) -> str:
        return f"{self.first} to {self.first + self.size - 1}" if self.size > 1 else f"[{self.first}]"

    @staticmethod
    def of(cluster: Cluster, devices: Sequence[int]) -> "DeviceMesh":
        """The mesh of devices given in any order. Raises MeshError when they do not form one."""
        ordered = sorted(devices)
        if ordered and (ordered[0] < 0 or ordered[-1] >= cluster.n_devices):
            outside = [device for device in ordered if not 0 <= device < cluster.n_devices]
            raise MeshError(_outside(str(outside), cluster))
        if not ordered or ordered != list(range(ordered[0], ordered[-1] + 1)):
            raise MeshError(f"devices {list(devices)} are not consecutive and distinct. A mesh has no gaps.")
        return DeviceMesh(cluster, ordered[0], len(ordered))

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.first + self.size))

    def __str__(self) -> str:
        return f"{self._range()} of {self.cluster}"


def _outside(devices: str, cluster: Cluster) -> str:
    return (
        f"devices {devices} are outside the cluster, which has devices 0 to {cluster.n_devices - 1} "
        f"({cluster}). Choose other devices or enlarge the cluster."
    )


def meshes(cluster: Cluster) -> Iterator[DeviceMesh]:
    """Every device mesh of a cluster, smallest first."""
    per_host = cluster.devices_per_host
    for size in range(1, per_host + 1):
        if per_host % size == 0:
            for first in range(0, cluster.n_devices, size):
                yield DeviceMesh(cluster, first, size)
    for n_hosts in range(2, cluster.n_hosts + 1):
        for host in range(cluster.n_hosts - n_hosts + 1):
            yield DeviceMesh(cluster, host * per_host, n_hosts * per_host)


def meshes_from_start(cluster: Cluster) -> Iterator[DeviceMesh]:
    """The meshes that begin with the first device, largest first."""
    per_host = cluster.devices_per_host
    for n_hosts in range(cluster.n_hosts, 1, -1):
        yield DeviceMesh(cluster, 0, n_hosts * per_host)
    for size in range(per_host, 0, -1):
        if per_host % size == 0:
            yield DeviceMesh(cluster, 0, size)
