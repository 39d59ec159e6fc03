"""A cluster described in a YAML file: how many hosts and devices, and what one device and its links can do."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from planner.mesh import Cluster
from planner.profile import DeviceProfile, preset
from rlhf_tasks.config import FIGURES
from rlhf_tasks.config_files import ConfigError, first_fault, read_yaml
from rlhf_tasks.spec import Frozen

PLAUSIBLE_BYTES_PER_S = (1e7, 1e13)
"""What memory and links have today, from a slow network to ten times an H200's memory. A figure outside is more
likely one in GB/s or in bits."""


class Hardware(NamedTuple):
    """A cluster and its devices; warnings: figures that are hardly true, a sentence each."""

    cluster: Cluster
    device: DeviceProfile
    warnings: tuple[str, ...] = ()


class ClusterFile(Frozen):
    """What a cluster file may say.

    device         a preset's name, or figures of a DeviceProfile; with `like: PRESET` only those that differ
    inside_host, between_hosts  {bytes_per_s, latency_s} of the links where they differ from the device's
    """

    n_hosts: int = Field(gt=0)
    devices_per_host: int = Field(gt=0)
    device: str | dict[str, Any]
    inside_host: dict[str, float] = Field(default_factory=dict)
    between_hosts: dict[str, float] = Field(default_factory=dict)


def read_cluster(path: Path) -> Hardware:
    """Read a cluster file. Raises ConfigError with one sentence naming file, field and value."""
    try:
        stated = ClusterFile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_fault(error, ClusterFile)}") from None
    figures = {"like": stated.device} if isinstance(stated.device, str) else stated.device
    links = {"inside_host": stated.inside_host, "between_hosts": stated.between_hosts}
    figures = _merged(figures, {link: changes for link, changes in links.items() if changes})
    device = _profile(figures, f"{path}: device")
    cluster = Cluster(stated.n_hosts, stated.devices_per_host)
    return Hardware(cluster, device, tuple(_implausible(device, str(path))))


def read_device(name: str) -> DeviceProfile:
    """A device by the name of its preset, or from a YAML file with its figures. Raises ConfigError."""
    if not name.endswith(FIGURES):
        return _profile({"like": name}, "planning.device")
    return _profile(read_yaml(Path(name)), name)


def _profile(figures: Mapping[str, Any], where: str) -> DeviceProfile:
    """A profile from its figures, or from a preset's (`like`) with some changed."""
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
        raise ConfigError(f"{where}: {first_fault(error, DeviceProfile)}") from None


def _merged(known: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The known figures with the changed ones; links are changed figure by figure."""
    merged = dict(known)
    for key, value in changes.items():
        old = known.get(key)
        merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _implausible(device: DeviceProfile, where: str) -> Iterator[str]:
    low, high = PLAUSIBLE_BYTES_PER_S
    figures = {
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "inside_host.bytes_per_s": device.inside_host.bytes_per_s,
        "between_hosts.bytes_per_s": device.between_hosts.bytes_per_s,
        "host_copy_bytes_per_s": device.host_copy_bytes_per_s,
    }
    for name, value in figures.items():
        if not low <= value <= high:
            yield (
                f"{where}: {name}={value:g} is hardly true; it is in bytes per second "
                f"(200 Gb/s are 25e9), and devices have {low:g} to {high:g}."
            )
