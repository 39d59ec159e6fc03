"""A cluster described in a YAML file: how many hosts and devices, and what these and their links can do."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError

from planner.plan.mesh import Cluster, MeshError
from planner.pricing.device_classes import DeviceClassError, DeviceClasses
from planner.pricing.devices import PRESETS, DeviceProfile, preset
from planner.pricing.unit_checks import implausible
from rlhf_tasks.algorithms.configurations import FIGURES
from rlhf_tasks.config.files import first_fault, read_yaml
from rlhf_tasks.parallel.layout.topology import MAX_DEVICES
from rlhf_tasks.spec import Frozen
from rlhf_tasks.system.reading import ConfigError, shown


class Hardware(NamedTuple):
    """A cluster's devices by class; warnings: figures that are hardly true, a sentence each."""

    classes: DeviceClasses
    warnings: tuple[str, ...] = ()

    @property
    def cluster(self) -> Cluster:
        return self.classes.cluster


ONE_DEVICE = f"a preset's name ({', '.join(PRESETS)}) or figures ({{like: PRESET, memory_bytes: 40e9}})"
"""What may stand for a device."""


def _stated(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise ValueError(f"give {ONE_DEVICE}, found {shown(value)}")
    return value


def _stated_by_hosts(value: Any) -> Any:
    if not isinstance(value, str | dict | list | tuple):
        raise ValueError(f"give {ONE_DEVICE}, or by hosts [{{n_hosts, device}}], found {shown(value)}")
    return value


class HostsFile(Frozen):
    """Some consecutive hosts and their device, as in ClusterFile."""

    n_hosts: int = Field(gt=0, le=MAX_DEVICES)
    device: Annotated[str | dict[str, Any], BeforeValidator(_stated)]


def _form(value: Any) -> str:
    return "path" if isinstance(value, str) else "inline" if isinstance(value, list | tuple) else "figures"


class ClusterFile(Frozen):
    """What a cluster file may say.

    device         a preset's name, or figures of a DeviceProfile; with `like: PRESET` only those that differ;
                   where hosts have different ones, a list of {n_hosts, device} in the order of the hosts
    inside_host, between_hosts  {bytes_per_s, latency_s} of all links where they differ from the devices'
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
    """Read a cluster file. Raises ConfigError with one sentence naming file, field and value."""
    try:
        stated = ClusterFile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_fault(error, ClusterFile, 'figures')}") from None
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
    """A cluster of a user's numbers. Raises ConfigError, whose sentence begins with `where` they stand."""
    try:
        return Cluster(n_hosts, devices_per_host)
    except MeshError as error:
        raise ConfigError(f"{where}: {error}") from None


def named_hardware(cluster: Cluster, device: str | Sequence[tuple[int, str]]) -> Hardware:
    """A cluster whose devices have names: of presets, or of YAML files with their figures.

    device  one name for all hosts, or (hosts, name) of the first hosts, the next ones, ...
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
