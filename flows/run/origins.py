"""Which rows, reward code and models have made each commit of a run.

A commit's samples follow from its cursor, the configuration and the token file, for sample ids are positions in a
stream whose order is a function of the seed. So no commit lists its rows. `origins.jsonl` has a line where something
else begins to teach: at the start, and after a change of data, configuration, reward code or models. Token files that
were replaced are kept as `rows-KEY.arrow`; each has the hash of every row's content. An exported model says in its
`origin.json` which run has made it. Loads neither Prefect nor torch.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.flows.run.downloads import REVISIONS
from prefect_rlhf.flows.run.prepare import Prepared
from prefect_rlhf.flows.run.run_folder import exported_step
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.checkpoint.commits import Commit, step_folder, steps_of
from prefect_rlhf.rlhf_tasks.checkpoint.journals import LINEAGE, decided_lines
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from prefect_rlhf.rlhf_tasks.config.base import Judges, RunConfig
from prefect_rlhf.rlhf_tasks.config.hub_names import hub_model
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.data.dataset import row_file, row_hash
from prefect_rlhf.rlhf_tasks.data.hub import read_pins, snapshot_folder
from prefect_rlhf.rlhf_tasks.data.token_file import ROWS, TokenFile
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import ORIGIN, base_of, missing_base
from prefect_rlhf.rlhf_tasks.protocol.decisions import DECIDED
from prefect_rlhf.rlhf_tasks.spec import ROWS as DECIDED_ROWS
from prefect_rlhf.rlhf_tasks.system.durable import append_lines, replace_file
from prefect_rlhf.rlhf_tasks.system.reading import module_file, read_json, reading

ORIGINS = "origins.jsonl"
_KEY_CHARACTERS = 12


class Maker(NamedTuple):
    """What has made a model: a run, which may be gone.

    step     number of its iterations
    samples  number of samples that it has learned from, those of each iteration counted
    digest   of the lines of origins.jsonl up to there
    These three are None where the model lies in the run's folder without an origin.json: its summary has the step.
    """

    run: Path
    step: int | None = None
    samples: int | None = None
    digest: str | None = None


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
    """Where a reward, environment or agent is -> SHA-256 of the file with its code; without those that have none."""
    rewards = config.rewards if isinstance(config, Judges) else ()
    places = [reward.function for reward in rewards if reward.function is not None]
    if isinstance(config, Scores) and config.environment is not None:
        places += [config.environment.factory, *(tool.function for tool in config.tools if tool.function)]
        places += [
            word for tool in config.tools if tool.mcp for word in tool.mcp.words if word.endswith(".py")
        ]
    if isinstance(config, Scores) and config.agent is not None:
        rollout = config.agent.rollout
        places += [rollout] if rollout else [word for word in config.agent.words if word.endswith(".py")]
    hashes = {}
    for place in places:
        module = (place.rpartition(":")[0] or place).rpartition(":")[2]  # of skyrl:file.py:Class, the file
        with suppress(OSError, ImportError, ValueError):
            path = Path(module) if module.endswith(".py") else module_file(module)
            if path is not None:
                hashes[place] = _digest(path.read_bytes())
    return hashes


def lessons_of(folder: Path, samples: int | None = None) -> Iterator[Lesson]:
    """What has taught a run, in order. Memory is needed for a number for each row.

    samples  number of the first ones that are meant; default: those up to the commit of the run's exported model,
             else to the newest
    Raises ConfigError where the run has no commit, or is older than origins.
    """
    lines, manifest = _lines(folder), newest_manifest(folder)
    if samples is None and (step := exported_step(folder)) is not None:
        with suppress(CheckpointError):  # one that continues may have removed it
            manifest = read_manifest(step_folder(folder, step))
    if manifest is None or not lines:
        raise ConfigError(
            f"{folder} has no commit with an origin: nothing can be said about the rows of its model."
        )
    shares = _shares(folder, manifest)
    for number, line in enumerate(lines):
        later = [(other["sample"], other["step"]) for other in lines[number + 1 :]]
        cursor, step = min([(manifest.cursor, manifest.step), *later])
        end = cursor if samples is None else min(cursor, samples)
        if end <= line["sample"]:
            continue
        n_seqs = (cursor - line["sample"]) // (step - line["step"])
        path = folder / ROWS if line["rows"] == lines[-1]["rows"] else _rows_of(folder, line["rows"])
        rows = TokenFile.open(path)
        yield Lesson(line, end, rows, _times(line, end, n_seqs, rows, shares))


def _times(
    line: Mapping[str, Any], end: int, n_seqs: int, rows: TokenFile, shares: Mapping[int, float]
) -> NDArray[np.int64]:
    """[rows] how often each row was learned from in the iterations of a stretch, which have `n_seqs` samples."""
    order, begin, step = line["order"], line["sample"], line["step"]
    times = np.zeros(len(rows), np.int64)
    iterations = range(step, step - (begin - end) // n_seqs)
    for share, alike in groupby(iterations, lambda iteration: shares.get(iteration, 1.0)):
        first, *_, last = [*alike] * 2
        samples = begin + (first - step) * n_seqs, min(end, begin + (last + 1 - step) * n_seqs)
        groups = samples[0] // order["group_size"], -(-samples[1] // order["group_size"])
        times += rows.first(share).times(*groups, order["seed"], order["weights"])
    return times


def _shares(folder: Path, manifest: Manifest) -> dict[int, float]:
    """Iteration -> the share of the rows that it drew from, where that was decided: by the iteration before."""
    shares, latest = dict[int, float](), None
    for line in decided_lines(folder / LINEAGE, manifest.journals[LINEAGE].size_bytes):
        if (made := line[DECIDED][DECIDED].get(DECIDED_ROWS)) is not None:
            shares.setdefault(line["iteration"], made["before"] if latest is None else latest)
            latest = made["value"]
    return shares


def models_of(run: Path, config: RunConfig) -> dict[str, tuple[str, Path]]:
    """Role, or role's base of an adapter -> a model that a run has begun with: as it is named, and its folder. That
    of a model on a Hub is where the cache had it. Raises ConfigError where the run's record of the Hub is damaged."""
    pins, models = read_pins(run / REVISIONS), dict[str, tuple[str, Path]]()

    def folder_of(text: str) -> Path:
        name, pin = hub_model(text), pins.get(f"model {text}")
        return Path(text) if name is None or pin is None else snapshot_folder(name, pin.commit)

    for role in type(config.models).model_fields:
        if isinstance(text := getattr(config.models, role), str):
            models[role] = text, folder_of(text)
            if (base := _base_named(models[role][1])) is not None:
                models[f"{role}'s base"] = base, folder_of(base)
    return models


def _base_named(folder: Path) -> str | None:
    """An adapter's base model, as a folder or a name on a Hub; None of any other folder."""
    with suppress(ConfigError):  # one that cannot be read
        base = missing_base(folder) or str(base_of(folder))
        return None if base == str(folder) else base
    return None


def leave_origin(run: Path, commit: Commit, model: Path) -> None:
    """Write beside the weights of a model that a commit of a run is its origin. Raises OSError."""
    step, samples = commit.step, commit.manifest.cursor
    origin = {"run": str(run), "step": step, "samples": samples, "digest": _taught_digest(run, step)}
    replace_file(model / ORIGIN, json.dumps(origin, indent=2) + "\n")


def maker_of(model: Path, near: Path) -> Maker | None:
    """The run that has made a model; None where that is not known, and of one that is not there.

    near  the folder of a run that began with it: a model from a Hub has its maker's name alone, which is looked for
          beside that folder. So is a run that was renamed or moved, by what has taught it
    Raises ConfigError for an origin.json that is damaged.
    """
    run, path = model.resolve().parent, model / ORIGIN
    lies_in_run = model.exists() and (run / ORIGINS).is_file()
    if not path.is_file():
        return Maker(run) if lies_in_run else None
    with reading(path, "not as an export wrote it", remedy="Remove it, or put it back."):
        origin = read_json(path)
        step, samples = int(origin["step"]), int(origin["samples"])
        named, digest = near.parent / origin["run"], str(origin["digest"])
        if not named.exists():
            named = run if lies_in_run else _moved(named, near, step, digest)
        return Maker(named, step, samples, digest)


def _moved(named: Path, near: Path, step: int, digest: str) -> Path:
    """Where a run is now that is not where it is named: beside that place or beside `near`, if just one there was
    taught the same; else the place that is named."""
    found = set[Path]()
    for folder in {path for beside in (named, near) for path in beside.parent.glob(f"*/{ORIGINS}")}:
        with suppress(ConfigError, OSError):  # of another run, which does not matter here
            if _taught_digest(folder.parent, step) == digest:
                found.add(folder.parent.resolve())
    return found.pop() if len(found) == 1 else named


def refuse_another(maker: Maker) -> None:
    """Raises ConfigError where another run has taken the place of the one that made a model."""
    if maker.step is not None and maker.digest != _taught_digest(maker.run, maker.step):
        raise ConfigError(f"{maker.run} is another run than the one that made it.")


def _taught_digest(run: Path, step: int) -> str:
    """Of what has taught a run in its first `step` iterations. Lines are only added to origins.jsonl."""
    return _digest(json.dumps([line for line in _lines(run) if line["step"] < step]).encode())


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
