"""The device class of each host of a cluster, one on all hosts or several; and clusters described in YAML files.

The search's bounds assume this price of a mesh with several classes:
- Each operation of a call (a layer's pass, an update, a collective) is priced by the mesh's slowest class
  (planner/pricing/rooflines.py, `Slowest`): ranks wait for each other at every collective, and work is split as if
  all devices were alike. A save is priced likewise.
- Memory is each device's own, without what its context, communicators and allocator keep.
- A move is priced by the larger latency and the smaller bandwidth of its two meshes' links.
- The dispatch of a node, and a move's work besides its messages, are priced by the slowest class of the cluster.

Implausible figures in a file, mostly right numbers in a wrong unit, give warnings.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError

from prefect_rlhf.planner.plan.mesh import Cluster, MeshError
from prefect_rlhf.planner.pricing.devices import PRESETS, DeviceProfile, preset
from prefect_rlhf.planner.pricing.resharding import Wires
from prefect_rlhf.rlhf_tasks.algorithms.configurations import FIGURES
from prefect_rlhf.rlhf_tasks.config.files import faults_of, read_yaml
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import MAX_DEVICES
from prefect_rlhf.rlhf_tasks.spec import Frozen
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, shown


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


class Hardware(NamedTuple):
    """A cluster's devices by class; warnings: one sentence for each implausible figure."""

    classes: DeviceClasses
    warnings: tuple[str, ...] = ()

    @property
    def cluster(self) -> Cluster:
        return self.classes.cluster


ONE_DEVICE = f"a preset's name ({', '.join(PRESETS)}) or figures ({{like: PRESET, memory_bytes: 40e9}})"
"""What a file may give as a device, for messages."""


def _stated(value: object) -> object:
    if isinstance(value, str | dict):
        return cast(object, value)
    raise ValueError(f"give {ONE_DEVICE}, found {shown(value)}")


def _stated_by_hosts(value: object) -> object:
    if isinstance(value, str | dict | list | tuple):
        return cast(object, value)
    raise ValueError(f"give {ONE_DEVICE}, or by hosts [{{n_hosts, device}}], found {shown(value)}")


class HostsFile(Frozen):
    """Consecutive hosts with the same device; the fields are as in ClusterFile."""

    n_hosts: int = Field(gt=0, le=MAX_DEVICES)
    device: Annotated[str | dict[str, Any], BeforeValidator(_stated)]


def _form(value: Any) -> str:
    return "path" if isinstance(value, str) else "inline" if isinstance(value, list | tuple) else "figures"


class ClusterFile(Frozen):
    """The fields of a cluster file.

    device         a preset's name, or figures of a DeviceProfile; with `like: PRESET` only those that differ from
                   the preset. If hosts have different devices: a list of {n_hosts, device} in the order of the hosts
    inside_host, between_hosts  {bytes_per_s, latency_s} of all links, where they differ from the devices' figures
    """

    n_hosts: int = Field(gt=0, le=MAX_DEVICES)
    devices_per_host: int = Field(gt=0, le=MAX_DEVICES)
    device: Annotated[
        Annotated[str, Tag("path")]
        | Annotated[tuple[HostsFile, ...], Tag("inline")]
        | Annotated[dict[str, Any], Tag("figures")],
        Discriminator(_form),
        BeforeValidator(_stated_by_hosts),
    ]
    inside_host: dict[str, float] = Field(default_factory=dict)
    between_hosts: dict[str, float] = Field(default_factory=dict)


def read_cluster(path: Path) -> Hardware:
    """Read a cluster file. Raises ConfigError; its sentence names the file, the field and the value."""
    try:
        stated = ClusterFile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {faults_of(error, ClusterFile, 'figures')}") from None
    cluster = cluster_of(stated.n_hosts, stated.devices_per_host, str(path))
    links = {"inside_host": stated.inside_host, "between_hosts": stated.between_hosts}
    changed = {link: changes for link, changes in links.items() if changes}

    def device_of(device: str | dict[str, Any], where: str) -> DeviceProfile:
        figures = {"like": device} if isinstance(device, str) else device
        return _profile(_merged(figures, changed), where)

    if isinstance(stated.device, str | dict):
        classes = DeviceClasses.alike(cluster, device_of(stated.device, f"{path}: device"))
    else:
        parts = [
            (part.n_hosts, device_of(part.device, f"{path}: device.{i}.device"))
            for i, part in enumerate(stated.device)
        ]
        classes = _by_hosts(cluster, parts, f"{path}: device")
    warnings = (
        sentence
        for device in classes.profiles
        for sentence in implausible(
            device, f"{path}: {device.name}" if isinstance(stated.device, tuple) else str(path)
        )
    )
    return Hardware(classes, tuple(warnings))


def cluster_of(n_hosts: int, devices_per_host: int, where: str) -> Cluster:
    """A cluster of a user's numbers. Raises ConfigError; its sentence begins with `where`, their place."""
    try:
        return Cluster(n_hosts, devices_per_host)
    except MeshError as error:
        raise ConfigError(f"{where}: {error}") from None


def named_hardware(cluster: Cluster, device: str | Sequence[tuple[int, str]]) -> Hardware:
    """A cluster whose devices are given by name: a preset's, or that of a YAML file with figures.

    device  one name for all hosts, or (number of hosts, name) pairs in the order of the hosts
    Raises ConfigError.
    """
    stated = [(cluster.n_hosts, device)] if isinstance(device, str) else device
    read = {name: _read_device(name) for _, name in stated}
    if isinstance(device, str):
        classes = DeviceClasses.alike(cluster, read[device])
    else:
        classes = _by_hosts(cluster, [(n_hosts, read[name]) for n_hosts, name in device], "planning.device")
    return Hardware(classes, tuple(s for name, found in read.items() for s in implausible(found, name)))


def _by_hosts(cluster: Cluster, parts: Sequence[tuple[int, DeviceProfile]], where: str) -> DeviceClasses:
    try:
        return DeviceClasses.by_hosts(cluster, parts)
    except DeviceClassError as error:
        raise ConfigError(f"{where}: {error}") from None


def _read_device(name: str) -> DeviceProfile:
    if not name.endswith(FIGURES):
        return _profile({"like": name}, "planning.device")
    return _profile(read_yaml(Path(name)), name)


def _profile(figures: Mapping[str, Any], where: str) -> DeviceProfile:
    """A profile from its figures, or from those of a preset (`like`) with some changed."""
    figures = dict(figures)
    if "like" in figures:
        try:
            known = preset(str(figures.pop("like")))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        figures = _merged(known.model_dump(), figures)
    try:
        return DeviceProfile.model_validate(figures)
    except ValidationError as error:
        raise ConfigError(f"{where}: {faults_of(error, DeviceProfile)}") from None


def _merged(known: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The known figures with the changes applied; of a link, only the figures that `changes` names change."""
    merged = dict(known)
    for key, value in changes.items():
        old = known.get(key)
        merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


BYTES_PER_S: Mapping[str, float] = {
    "GB/s": 1e9,
    "Gb/s": 1e9 / 8,
    "bits per second": 1 / 8,
    "TB/s": 1e12,
    "MB/s": 1e6,
}
FLOPS_PER_S: Mapping[str, float] = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "PFLOP/s": 1e15}
BYTES: Mapping[str, float] = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
SECONDS: Mapping[str, float] = {"microseconds": 1e-6, "milliseconds": 1e-3}


class Range(NamedTuple):
    """The plausible values of a figure, from a slow host's to several times a large GPU's.

    unit    of the figure
    others  units that are mistaken for it, the likeliest first, and their size in `unit`
    """

    low: float
    high: float
    unit: str
    others: Mapping[str, float]

    def holds(self, value: float) -> bool:
        """Whether a value is plausible."""
        return self.low <= value <= self.high


BETWEEN_HOSTS = 9.9e10
"""The largest plausible bytes_per_s of a link between hosts. An 800 Gb/s adapter (ConnectX-8) for each GPU sends
nearly 100e9; the 400 Gb/s one of DGX H100, H200 and B200 (8 for 8 GPUs) sends 50e9. A value from 100e9 on is far more
likely 100, 200, 400 or 800 Gb/s given in bits."""

RANGES: Mapping[str, Range] = {
    "flops_per_s": Range(1e9, 1e16, "FLOP/s", FLOPS_PER_S),
    "memory_bytes_per_s": Range(1e8, 5e13, "bytes per second", BYTES_PER_S),
    "memory_bytes": Range(1e8, 1e13, "bytes", BYTES),
    "host_memory_bytes": Range(1e8, 1e13, "bytes", BYTES),
    "inside_host.bytes_per_s": Range(1e7, 2e12, "bytes per second", BYTES_PER_S),
    "inside_host.latency_s": Range(1e-7, 1e-2, "seconds", SECONDS),
    "between_hosts.bytes_per_s": Range(1e7, BETWEEN_HOSTS, "bytes per second", BYTES_PER_S),
    "between_hosts.latency_s": Range(1e-7, 1e-2, "seconds", SECONDS),
    "host_copy_bytes_per_s": Range(1e7, 1e12, "bytes per second", BYTES_PER_S),
    "layer_overhead_s": Range(1e-7, 1e-1, "seconds", SECONDS),
    "decode_overhead_s": Range(1e-7, 1e-1, "seconds", SECONDS),
    "expert_overhead_s": Range(1e-8, 1e-2, "seconds", SECONDS),
    "optimizer_overhead_s": Range(1e-7, 1.0, "seconds", SECONDS),
    "reallocation_overhead_s": Range(1e-7, 1e-1, "seconds", SECONDS),
    "transfer_overhead_s": Range(1e-9, 1e-3, "seconds", SECONDS),
    "dispatch_s": Range(1e-7, 1.0, "seconds", SECONDS),
}
"""Figure of a DeviceProfile -> its range. 0 seconds is allowed too: it says that something costs nothing. So is a
host_memory_bytes of 0, or none."""


def implausible(device: DeviceProfile, where: str) -> Iterator[str]:
    """A sentence for each figure outside its range, with the unit that was probably meant.

    where  the file; the sentences begin with it
    """
    for name, known in RANGES.items():
        value = _figure(device, name)
        if known.holds(value) or (value == 0 and (known.unit == "seconds" or name == "host_memory_bytes")):
            continue
        sentence = (
            f"{where}: {name}={value:g} is implausible: it is in {known.unit}, "
            f"and devices have {known.low:g} to {known.high:g}"
        )
        likely = [
            f"in {unit}, write {value * size:.6g}"
            for unit, size in known.others.items()
            if known.holds(value * size)
        ]
        if likely:
            sentence += f"; if it is {', if '.join(likely[:2])}"
        yield f"{sentence}."


def _figure(device: DeviceProfile, name: str) -> float:
    """A figure by its name, `link.figure` for a link's; 0 for an unknown one."""
    found: object = device
    for part in name.split("."):
        found = getattr(found, part) or 0.0
    assert isinstance(found, int | float), f"{name} is no figure"
    return float(found)
