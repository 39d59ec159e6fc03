"""Measured profiles on disk: one JSON file for each model shape and kind of device, named after them."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from planner.plan.mesh import Cluster
from planner.plan.workload import RoleModel
from planner.pricing.kept_figures import read_kept, write_kept
from planner.pricing.measured import MeasuredProfile, ProfileError
from rlhf_tasks.config.files import read_document
from rlhf_tasks.parallel.layout.shape import ModelShape

_PROFILES = TypeAdapter(tuple[MeasuredProfile, ...])


def cache_file(folder: Path, device: str, cluster: Cluster, model: ModelShape, itemsize: int) -> Path:
    """The path of a model's profile. Its name contains a hash of everything that the profile depends on.

    itemsize  bytes of a parameter
    """
    subject = {"device": device, "cluster": str(cluster), "model": asdict(model), "itemsize": itemsize}
    digest = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()
    return folder / f"{device}-{model.family}-{digest[:16]}.json"


def store(profile: MeasuredProfile, folder: Path) -> Path:
    """Write a profile to the cache atomically. Returns its path."""
    cluster = Cluster(profile.n_hosts, profile.devices_per_host)
    path = cache_file(folder, profile.device, cluster, profile.model, profile.itemsize)
    folder.mkdir(parents=True, exist_ok=True)
    write_profiles([profile], path)
    return path


def cached(
    folder: Path,
    device: str,
    cluster: Cluster,
    models: Mapping[str, RoleModel],
    itemsize: int,
    threads: int = 0,
) -> tuple[tuple[MeasuredProfile, ...], tuple[str, ...]]:
    """The cached profiles of a run's models, one for each shape, and a warning for each file that was put aside or
    left out.

    A file is put aside when its profile is incomplete or is not the one that its name says. It is left out when its
    ranks computed with another number of threads.
    itemsize  bytes of a parameter
    threads   of the run's ranks; 0: any
    """
    profiles: list[MeasuredProfile] = []
    warnings: list[str] = []

    def read(path: Path) -> tuple[MeasuredProfile, ...]:
        found = read_profiles(path)
        for profile in found:
            if lacking := profile.lacking():
                raise ProfileError(f"{path} has no figures for {lacking}.")
            its_cluster = Cluster(profile.n_hosts, profile.devices_per_host)
            named = cache_file(folder, profile.device, its_cluster, profile.model, profile.itemsize)
            if named.name != path.name:
                raise ProfileError(f"{path} has a profile of another model, device or cluster.")
        return found

    for shape in dict.fromkeys(model.shape for model in models.values()):
        path = cache_file(folder, device, cluster, shape, itemsize)
        if path.exists():
            found, refused = read_kept(path, read, ())
            warnings += refused
            other = next((p.threads for p in found if threads and p.threads not in (0, threads)), 0)
            if other:
                warnings.append(
                    f"{path} is not used: its ranks computed with {other} threads, those of this run have {threads}. "
                    "Measure again with prefect-rlhf profile."
                )
            else:
                profiles += found
    return tuple(profiles), tuple(warnings)


def write_profiles(profiles: Iterable[MeasuredProfile], path: Path) -> None:
    """Write profiles as a JSON list, atomically."""
    write_kept(path, json.dumps([p.model_dump(mode="json") for p in profiles]).encode())


def read_profiles(path: Path) -> tuple[MeasuredProfile, ...]:
    """The profiles in a file of `write_profiles`. Raises ProfileError, which names the file and what is wrong."""
    return read_document(
        path, _PROFILES, "no profile", ProfileError, "Measure again with prefect-rlhf profile."
    )
