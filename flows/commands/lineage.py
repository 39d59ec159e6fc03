"""`prefect-rlhf lineage`: which rows taught a model, and which models saw a row."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prefect_rlhf.flows.commands.options import check_writable
from prefect_rlhf.flows.run.origins import (
    Lesson,
    Maker,
    content_hash,
    lessons_of,
    maker_of,
    models_of,
    refuse_another,
)
from prefect_rlhf.flows.run.run_folder import existing_run_folder
from prefect_rlhf.flows.view.terminal import tell
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.hub_names import hub_model
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig

SHOWN = 12  # digits of a hash
FEWEST_DIGITS = 8


def lineage(
    *runs: Path,
    row: Annotated[str | None, Parameter("--row")] = None,
    out: Annotated[Path | None, Parameter("--out")] = None,
) -> None:
    """Which rows taught a run's model; with --row, which of several runs have learned from a row.

    Both continue with the runs that have made the models which it began with.

    Parameters
    ----------
    runs
        Run folders; with --row also several.
    row
        FILE:LINE, which means the row that stands there now, or the first digits of the hash of a row's content, as
        --out writes it.
    out
        A file for the rows of one run: a JSON line each, with place, hash and how often it was learned from.
    """
    if row is not None and out is None and runs:
        _seen(row, runs)
    elif row is None and len(runs) == 1:
        check_writable(out)
        (run,) = runs
        _taught(*_training(run), out)
    else:
        raise ConfigError("Name one run, or --row FILE:LINE|HASH and the runs to look through.")


def _training(run: Path) -> tuple[Path, TrainingConfig]:
    """A run's folder and configuration. Raises ConfigError for one that does not train."""
    folder, config = existing_run_folder(run)
    if not isinstance(config, TrainingConfig):
        raise ConfigError(f"{run} is a run of type {config.type!r}, which trains no model.")
    return folder, config


def _taught(folder: Path, config: RunConfig, out: Path | None) -> None:
    lessons = list(lessons_of(folder))
    attempts = len(list((folder / "attempts").glob("*")))
    tell(f"{folder}: {attempts} attempts, {max(0, attempts - 1)} of them retries")
    _tell_lessons(lessons)
    for line, maker in _ancestors(folder, config):
        tell(line)
        if maker is not None:
            with _only_told():
                _tell_lessons(lessons_of(maker.run, maker.samples))
    if out is not None:
        with out.open("w", encoding="utf-8") as file:
            for lesson in lessons:
                for place, digest, times in _rows(lesson):
                    file.write(json.dumps({"row": place, "hash": digest, "times": times}) + "\n")
        tell(f"rows: {out}")


def _tell_lessons(lessons: Iterable[Lesson]) -> None:
    for lesson in lessons:
        origin = lesson.origin
        tell(
            f"from iteration {origin['step'] + 1}: samples {origin['sample']} to {lesson.end - 1} of "
            f"{int((lesson.times > 0).sum())} of {len(lesson.rows)} rows of {origin['config']['data']['train']}"
        )
        for kind in ("models", "rewards"):
            for name, digest in origin[kind].items():
                tell(f"  {kind.removesuffix('s')} {name}: sha256 {digest[:SHOWN]}")


def _rows(lesson: Lesson) -> Iterator[tuple[str, str, int]]:
    """(`file:line`, hash, how often) of the rows that were learned from."""
    for index, (place, digest) in enumerate(lesson.rows.identities()):
        if lesson.times[index]:
            yield place, digest, int(lesson.times[index])


def _seen(row: str, runs: tuple[Path, ...]) -> None:
    names_place = row.rpartition(":")[2].isdecimal() and ":" in row
    digest = content_hash(row) if names_place else row.lower()
    if digest is None:
        raise ConfigError(
            f"--row {row}: there is no row at this place now. Name the place of one, or digits of its hash (--out of "
            "a run that has learned from it)."
        )
    if not names_place and (len(row) < FEWEST_DIGITS or set(row.lower()) - set("0123456789abcdef")):
        raise ConfigError(f"--row {row}: neither FILE:LINE nor at least {FEWEST_DIGITS} digits of a hash.")
    for run in runs:
        folder, config = _training(run)
        tell(f"{folder}: {_learned(folder, None, digest)}")
        for line, maker in _ancestors(folder, config):
            tell(f"  {line}")
            if maker is not None:
                with _only_told():
                    tell(f"  {maker.run}: {_learned(maker.run, maker.samples, digest)}")


@contextmanager
def _only_told() -> Iterator[None]:
    """What is not known of a run that was not asked about is told, and no reason to end."""
    try:
        yield
    except ConfigError as error:
        tell(f"  {error}")


def _learned(folder: Path, samples: int | None, digest: str) -> str:
    times = Counter[str]()
    for lesson in lessons_of(folder, samples):
        for place, content, often in _rows(lesson):
            if content.startswith(digest):
                times[f"{place} ({content[:SHOWN]})"] += often
    said = ", ".join(f"{often} times from {place}" for place, often in times.items())
    return f"learned {said}" if said else "has not learned from it"


def _ancestors(folder: Path, config: RunConfig) -> Iterator[tuple[str, Maker | None]]:
    """A sentence for each model that a run began with, and for those of the runs that have made them, with its maker;
    None where that is not known, gone or cannot be read. A model is told of once, of several of one run each."""
    known, waiting = set[tuple[Path, int | None]]([(folder, None)]), [(folder, config)]
    while waiting:
        run, its = waiting.pop(0)
        for role, (named, model) in models_of(run, its).items():
            where = f"{run}: its {role} began as"
            try:
                maker = maker_of(model, run)
            except ConfigError as error:
                yield f"{where} {named}; what has taught it is not known: {error}", None
                continue
            place = (model, None) if maker is None else (maker.run, maker.samples)
            if place in known:
                continue
            known.add(place)
            if maker is None:
                gone = hub_model(named) is None and not model.exists()
                yield f"{where} {named}{', which is gone' if gone else ''}: not known who made it", None
                continue
            after = "" if maker.step is None else f" after {maker.step} iterations"
            try:
                begun = _training(maker.run)
                refuse_another(maker)
            except ConfigError as error:
                yield (
                    f"{where} the model of {maker.run}{after}; what has taught it is not known: {error}",
                    None,
                )
            else:
                waiting.append(begun)
                yield f"{where} the model of {maker.run}{after}", maker
