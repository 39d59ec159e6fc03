"""A configuration whose names on a Hugging Face Hub have become folders and files on this machine. Loads no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from prefect_rlhf.flows.view.terminal import downloading
from prefect_rlhf.rlhf_tasks.algorithms.held_out import section_of
from prefect_rlhf.rlhf_tasks.config.base import OnePass, RunConfig
from prefect_rlhf.rlhf_tasks.config.hub_names import hub_data, hub_model
from prefect_rlhf.rlhf_tasks.data.hub import Pin, fetch_data, fetch_model, read_pins

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
    """
    name = hub_model(text)
    if name is None or Path(text).exists():
        return text
    key = f"model {text}"
    snapshot = fetch_model(name, (known or {}).get(key), downloading, weights)
    if pins is not None:
        pins[key] = snapshot.pin
    return str(snapshot.folder)
