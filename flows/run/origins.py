"""Which rows, reward code and models have made each commit of a run.

A commit's samples follow from its cursor, the configuration and the token file, for sample ids are positions in a
stream whose order is a function of the seed. So no commit lists its rows. `origins.jsonl` has a line where something
else begins to teach: at the start, and after a change of data, configuration, reward code or models. Token files that
were replaced are kept as `rows-KEY.arrow`; each has the hash of every row's content. Loads neither Prefect nor torch.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.flows.run.prepare import Prepared
from prefect_rlhf.flows.run.run_folder import exported_step
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.checkpoint.commits import step_folder, steps_of
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from prefect_rlhf.rlhf_tasks.config.base import Judges, RunConfig
from prefect_rlhf.rlhf_tasks.config.hub_names import hub_model
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.data.dataset import row_file, row_hash
from prefect_rlhf.rlhf_tasks.data.token_file import ROWS, TokenFile
from prefect_rlhf.rlhf_tasks.system.durable import append_lines
from prefect_rlhf.rlhf_tasks.system.reading import module_file, reading

ORIGINS = "origins.jsonl"
_KEY_CHARACTERS = 12


class Lesson(NamedTuple):
    """A stretch of a run in which one thing taught it.

    origin  the line of origins.jsonl
    end     global id of the sample after its last one
    rows    the token file of the stretch
    times   [rows] how often each row was learned from
    """

    origin: Mapping[str, Any]
    end: int
    rows: TokenFile
    times: NDArray[np.int64]


def keep_origin(
    folder: Path, prepared: Prepared, settings: Mapping[str, Any], models: Mapping[str, Mapping[str, str]]
) -> None:
    """Write down what teaches a run from its newest commit on, where it differs from what did so before. Called
    before the rows are written. Raises OSError.

    settings  the part of the configuration on which results depend
    models    folder -> file -> digest
    """
    lines, manifest = _lines(folder), newest_manifest(folder)
    config = prepared.config
    teaches = {
        "rows": prepared.rows.key,
        "order": {"seed": config.seed, "group_size": config.group_size, "weights": list(config.data.weights)},
        "config": dict(settings),
        "rewards": code_hashes(config),
        "models": {
            name: _digest(json.dumps(files, sort_keys=True).encode()) for name, files in models.items()
        },
    }
    if lines and all(lines[-1][key] == value for key, value in teaches.items()):
        return
    if lines and lines[-1]["rows"] != prepared.rows.key and (folder / ROWS).exists():
        with suppress(FileExistsError):
            os.link(folder / ROWS, _rows_of(folder, lines[-1]["rows"]))
    step, sample = (0, 0) if manifest is None else (manifest.step, manifest.cursor)
    path = folder / ORIGINS
    written = path.read_bytes() if path.exists() else b""
    append_lines(path, written.rfind(b"\n") + 1, [json.dumps({"step": step, "sample": sample, **teaches})])


def code_hashes(config: RunConfig) -> dict[str, str]:
    """Where a reward or an environment is -> SHA-256 of the file with its code; without those that have none."""
    rewards = config.rewards if isinstance(config, Judges) else ()
    places = [reward.function for reward in rewards if reward.function is not None]
    if isinstance(config, Scores) and config.environment is not None:
        places.append(config.environment.factory)
    hashes = {}
    for place in places:
        module = place.rpartition(":")[0]
        with suppress(OSError, ImportError, ValueError):
            path = Path(module) if module.endswith(".py") else module_file(module)
            if path is not None:
                hashes[place] = _digest(path.read_bytes())
    return hashes


def lessons_of(folder: Path) -> Iterator[Lesson]:
    """What has taught a run up to the commit of its exported model, else to the newest, in order. Memory is needed
    for a number for each row.

    Raises ConfigError where the run has no commit, or is older than origins.
    """
    lines, manifest = _lines(folder), newest_manifest(folder)
    if (step := exported_step(folder)) is not None:
        with suppress(CheckpointError):  # one that continues may have removed it
            manifest = read_manifest(step_folder(folder, step))
    if manifest is None or not lines:
        raise ConfigError(
            f"{folder} has no commit with an origin: nothing can be said about the rows of its model."
        )
    for number, line in enumerate(lines):
        later = [other["sample"] for other in lines[number + 1 :]]
        end = min([manifest.cursor, *later])
        if end <= line["sample"]:
            continue
        path = folder / ROWS if line["rows"] == lines[-1]["rows"] else _rows_of(folder, line["rows"])
        rows = TokenFile.open(path)
        order = line["order"]
        first, last = line["sample"] // order["group_size"], -(-end // order["group_size"])
        yield Lesson(line, end, rows, rows.times(first, last, order["seed"], order["weights"]))


def models_of(config: RunConfig) -> dict[str, Path]:
    """Role -> folder, of the models that a run has begun with; without those on a Hub."""
    stated = {role: getattr(config.models, role) for role in type(config.models).model_fields}
    texts = {role: text for role, text in stated.items() if isinstance(text, str)}
    return {
        role: Path(text) for role, text in texts.items() if hub_model(text) is None or Path(text).exists()
    }


def run_that_made(model: Path) -> Path | None:
    """The folder of the run that has exported a model's folder; None of any other model."""
    run = model.resolve().parent
    return run if (run / ORIGINS).is_file() and model.exists() else None


def content_hash(where: str) -> str | None:
    """The hash, as hexadecimal digits, of the row that stands at `file:line` now; None where there is none."""
    name, _, line = where.rpartition(":")
    with suppress(OSError, ValueError):
        file = row_file(Path(name).absolute())
        for number, unread in file.unread():
            if number == int(line):
                return row_hash(file.read(number, unread)).hex()
    return None


def newest_manifest(folder: Path) -> Manifest | None:
    """The manifest of the newest commit whose manifest can be read."""
    for step in sorted(steps_of(folder), reverse=True):
        with suppress(CheckpointError):
            return read_manifest(step_folder(folder, step))
    return None


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / ORIGINS
    if not path.exists():
        return []
    with reading(path, "not as the run wrote it", remedy="Put it back."):
        return [dict(json.loads(line)) for line in path.read_bytes().split(b"\n")[:-1]]


def _rows_of(folder: Path, key: str) -> Path:
    """A token file that another one has replaced."""
    return folder / f"rows-{key[:_KEY_CHARACTERS]}.arrow"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
