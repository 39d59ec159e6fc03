"""A configuration whose names on a Hugging Face Hub have become folders and files on this machine. Loads no torch."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from prefect_rlhf.flows.view.terminal import downloading
from prefect_rlhf.rlhf_tasks.algorithms.held_out import section_of
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.hub_names import ADAPTERS, HubName, hub_data, hub_model
from prefect_rlhf.rlhf_tasks.config.sampling import OnePass
from prefect_rlhf.rlhf_tasks.data.hub import Pin, fetch_data, fetch_model, read_pins
from prefect_rlhf.rlhf_tasks.data.hub_files import CARD
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    BESIDE_WEIGHTS,
    missing_base,
    refuse_links_out,
)
from prefect_rlhf.rlhf_tasks.system.durable import replace_file
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, read_json

REVISIONS = "revisions.json"  # in the run folder


class Fetched(NamedTuple):
    """A configuration whose models are folders, and whose data sets know their files.

    pins  kind and name on the Hub -> what it was resolved to
    """

    config: RunConfig
    pins: Mapping[str, Pin]


def fetched(config: RunConfig, folder: Path | None = None, weights: bool = True) -> Fetched:
    """Download what a configuration names on a Hub and the cache lacks.

    folder   of a run that may have begun: it keeps the commits that it began with
    weights  False: of models only what a planner reads
    Models become folders; data sets keep their names, and `DataConfig.files_of` has their files. Raises ConfigError.
    """
    known, pins = read_pins(folder / REVISIONS) if folder is not None else {}, dict[str, Pin]()
    models: dict[str, str] = {}
    for role in type(config.models).model_fields:
        text = getattr(config.models, role)
        if isinstance(text, str):
            models[role] = local_model(text, known, pins, weights)
    # Rows that a run trains on are mostly those of the split `train`; which ones it is to answer must be said.
    trains = not isinstance(config, OnePass)
    sources = {source.path: ("train",) if trains else () for source in config.data.sources}
    if (section := section_of(config)) is not None:
        sources[section.data] = ()
    files = dict[str, tuple[Path, ...]]()
    for text, splits in sources.items():
        files |= local_data(text, splits, known, pins)
    if not pins:
        return Fetched(config, pins)
    local = config.model_copy(
        update={
            "models": config.models.model_copy(update=models),
            "data": config.data.located(files),
        }
    )
    return Fetched(local, pins)


def local_data(
    text: str,
    splits: Sequence[str] = (),
    known: Mapping[str, Pin] | None = None,
    pins: dict[str, Pin] | None = None,
) -> dict[str, tuple[Path, ...]]:
    """Name -> files of a data set that is named on a Hub, downloaded where the cache lacks them; nothing of a path.

    splits       that are meant where the name has none; empty: then there must be only one
    known, pins  as for `local_model`
    """
    name = hub_data(text)
    if name is None or Path(text).exists():
        return {}
    key = f"dataset {text}"
    snapshot = fetch_data(name, (known or {}).get(key), downloading, splits)
    if pins is not None:
        pins[key] = snapshot.pin
    return {text: snapshot.paths}


def local_model(
    text: str,
    known: Mapping[str, Pin] | None = None,
    pins: dict[str, Pin] | None = None,
    weights: bool = True,
) -> str:
    """The folder of a model: of one that is named on a Hub, downloaded where the cache lacks it; a path as it is.

    known  what names were resolved to before
    pins   gets what this one was resolved to
    An adapter whose base model is named on a Hub is given that one, too.
    """
    name = hub_model(text)
    folder = Path(text) if name is None or Path(text).exists() else _snapshot(name, known, pins, weights)
    base = missing_base(folder)
    of_base = None if base is None else hub_model(base)
    if of_base is None:
        return str(folder) if name is not None else text
    return str(_on_base(folder, _snapshot(of_base, known, pins, weights)))


def _snapshot(
    name: HubName, known: Mapping[str, Pin] | None, pins: dict[str, Pin] | None, weights: bool
) -> Path:
    key = f"model {name.text}"
    snapshot = fetch_model(name, (known or {}).get(key), downloading, weights)
    if pins is not None:
        pins[key] = snapshot.pin
    return snapshot.folder


def _on_base(adapter: Path, base: Path) -> Path:
    """A copy of an adapter's folder, with a link to its weights, whose adapter_config.json names a snapshot of its
    base model: ranks read the commit that was pinned. It lies beside the snapshot; `name_of_folder` is the adapter's.
    """
    refuse_links_out(adapter)
    adapter, repository = Path(os.path.normpath(adapter.absolute())), base.parent.parent
    place = repository / ADAPTERS / base.name / adapter.relative_to("/")
    there = {path for pattern in (*BESIDE_WEIGHTS, CARD) for path in adapter.glob(pattern) if path.is_file()}
    with_base = read_json(adapter / ADAPTER_CONFIG) | {
        "base_model_name_or_path": str(base.relative_to(repository))
    }
    try:
        contents = {path.name: path.read_bytes() for path in there}
        contents[ADAPTER_CONFIG] = json.dumps(with_base, indent=2).encode()
        place.mkdir(parents=True, exist_ok=True)
        for path in place.iterdir():
            if path.name not in (*contents, ADAPTER):
                path.unlink()
        for name, content in contents.items():
            if not (place / name).is_file() or (place / name).read_bytes() != content:
                replace_file(place / name, content)
        with suppress(FileExistsError):
            (place / ADAPTER).symlink_to(adapter / ADAPTER)
    except OSError as error:
        raise ConfigError(
            f"{adapter}: an adapter is put on its base model in the Hub's cache, and {place} cannot be written "
            f"({error.strerror}). Set HF_HOME to a folder that you may write to."
        ) from None
    return place
