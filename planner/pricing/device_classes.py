"""The device class of each host of a cluster: one class on all hosts, or several.

The search's proofs assume this price of a mesh with several classes:
- Each operation of a call (a layer's pass, an update, a collective) is priced by the mesh's slowest class
  (planner/pricing/rooflines.py, `Slowest`): ranks wait for each other at every collective, and work is split as if
  all devices were alike. A save is priced likewise.
- Memory is each device's own, without what its context, communicators and allocator keep.
- A move is priced by the larger latency and the smaller bandwidth of its two meshes' links.
- The dispatch of a node, and a move's work besides its messages, are priced by the slowest class of the cluster.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.plan.mesh import Cluster
from planner.pricing.devices import DeviceProfile
from planner.pricing.resharding import Wires


class DeviceClassError(ValueError):
    """The device classes do not make up a cluster; the message names the values and what to change."""


def _check_hosts(cluster: Cluster, n_hosts: int) -> None:
    if n_hosts != cluster.n_hosts:
        raise DeviceClassError(
            f"n_hosts={cluster.n_hosts}, but device classes are given for {n_hosts} hosts. "
            "Change n_hosts, or the numbers of hosts of the classes."
        )


@dataclass(frozen=True)
class DeviceClasses:
    """The classes of a cluster's devices. A class's number is its index in `profiles`.

    profiles  figures of a device of each class; their names differ
    of_host   [hosts] number of each host's class
    Raises DeviceClassError when hosts are missing or left over, and for two classes of one name.
    """

    cluster: Cluster
    profiles: tuple[DeviceProfile, ...]
    of_host: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_hosts(self.cluster, len(self.of_host))
        names = [profile.name for profile in self.profiles]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DeviceClassError(
                f"Two device classes with different figures are both named {twice!r}. "
                "Give one of them a name of its own: device: {like: ..., name: ...}."
            )

    @staticmethod
    def alike(cluster: Cluster, device: DeviceProfile) -> "DeviceClasses":
        """All hosts have devices of one class."""
        return DeviceClasses(cluster, (device,), (0,) * cluster.n_hosts)

    @staticmethod
    def host_by_host(cluster: Cluster, devices: Sequence[DeviceProfile]) -> "DeviceClasses":
        """Classes from the device of each host; equal devices are one class."""
        profiles = list(dict.fromkeys(devices))
        number = {profile: i for i, profile in enumerate(profiles)}
        return DeviceClasses(cluster, tuple(profiles), tuple(number[device] for device in devices))

    @staticmethod
    def by_hosts(cluster: Cluster, parts: Sequence[tuple[int, DeviceProfile]]) -> "DeviceClasses":
        """Classes from (number of hosts, device) pairs in the order of the hosts; equal devices are one class."""
        _check_hosts(cluster, sum(n_hosts for n_hosts, _ in parts))  # first: a wrong number may be huge
        return DeviceClasses.host_by_host(cluster, [device for n, device in parts for _ in range(n)])

    def part(self, number: int) -> Cluster:
        """The hosts of one class as a cluster."""
        return Cluster(self.of_host.count(number), self.cluster.devices_per_host)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first device, class) of each maximal run of consecutive devices of one class, ascending."""
        per_host = self.cluster.devices_per_host
        return tuple(
            (host * per_host, number)
            for host, number in enumerate(self.of_host)
            if host == 0 or self.of_host[host - 1] != number
        )

    @cached_property
    def _starts(self) -> list[int]:
        return [first for first, _ in self.runs]

    def layout(self, first: int, size: int) -> tuple[tuple[int, int], ...]:
        """(offset, class) of each run of one class among devices first .. first + size - 1.

        Meshes with equal size and layout cost the same.
        """
        if len(self.runs) == 1:
            return ((0, 0),)
        low = bisect_right(self._starts, first) - 1
        high = bisect_right(self._starts, first + size - 1)
        return tuple((max(start - first, 0), number) for start, number in self.runs[low:high])

    def within(self, first: int, size: int) -> tuple[int, ...]:
        """The classes of devices first .. first + size - 1, ascending."""
        return tuple(sorted({number for _, number in self.layout(first, size)}))

    def profile(self, device: int) -> DeviceProfile:
        """The profile of a device."""
        return self.profiles[self.of_host[self.cluster.host(device)]]

    @cached_property
    def rooms(self) -> tuple[int, ...]:
        """[classes] bytes for tensors on a device: its memory less what is kept of it."""
        return tuple(profile.room_bytes(self.cluster.n_devices) for profile in self.profiles)

    def room_bytes(self, device: int) -> int:
        """Bytes for tensors on a device."""
        return self.rooms[self.of_host[self.cluster.host(device)]]

    def host_profile(self, host: int) -> DeviceProfile:
        """The profile of a host's devices."""
        return self.profiles[self.of_host[host]]

    def host_room_bytes(self, host: int) -> float:
        """Bytes of a host's memory for what a plan keeps there; infinite where no figure bounds them."""
        return self.cluster.devices_per_host * self.host_profile(host).host_room_bytes

    @property
    def dispatch_s(self) -> float:
        """Seconds of a plan node besides its work: those of the slowest class."""
        return max(profile.dispatch_s for profile in self.profiles)

    def wires(self, classes: Iterable[int]) -> Wires:
        """The links of devices of some classes: in latency and in bandwidth those of the slowest one."""
        found = [self.profiles[number] for number in classes]
        slowest = list[float]()
        for crosses in (False, True):
            links = [(profile.link(crosses), profile.link_efficiency) for profile in found]
            slowest.append(max(link.latency_s for link, _ in links))
            slowest.append(max(1 / (link.bytes_per_s * efficiency) for link, efficiency in links))
        return Wires(*slowest)

    def reallocation_overhead_s(self, layers: int) -> float:
        """Seconds of a reallocation of `layers` layers besides its messages: those of the slowest class."""
        return layers * max(profile.reallocation_overhead_s for profile in self.profiles)

    def transfer_overhead_s(self, values: int) -> float:
        """Seconds of a transfer besides its messages: those of the slowest class. values: samples x keys."""
        return values * max(profile.transfer_overhead_s for profile in self.profiles)

    def host_copy_s(self, size_bytes: float, classes: Iterable[int]) -> float:
        """Seconds in which devices of these classes each copy size_bytes to their host's memory, or back."""
        return size_bytes / min(self.profiles[number].host_copy_bytes_per_s for number in classes)

    def name(self, classes: Iterable[int]) -> str:
        """The names of classes, as in `a100-80g-sxm + h100-sxm`."""
        return " + ".join(self.profiles[number].name for number in classes)

    def __str__(self) -> str:
        """As in `8x8 a100-80g-sxm`, or `8x8 (hosts 0-3 h100-sxm, 4-7 a100-80g-sxm)`."""
        if len(self.runs) == 1:
            return f"{self.cluster} {self.profiles[0].name}"
        per_host = self.cluster.devices_per_host
        ends = [*self._starts[1:], self.cluster.n_devices]
        parts: list[str] = []
        for (start, number), end in zip(self.runs, ends, strict=True):
            first, last = start // per_host, end // per_host - 1
            hosts = str(first) if first == last else f"{first}-{last}"
            parts.append(f"{hosts} {self.profiles[number].name}")
        return f"{self.cluster} (hosts {', '.join(parts)})"
