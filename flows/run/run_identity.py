"""What must be unchanged when a run is resumed: commits, journals, configuration, data and models.

If something has changed since the last commit, resuming is refused with the difference, until the user accepts it:
`prefect-rlhf run TYPE --resume FOLDER --accept-changes`. An ordinary change (`ORDINARY`) is accepted by being given
on the command line. The cluster and the timeouts may always change; the shape of a trained model may never. So it is
with a pipeline's stages, which are checked before the first one starts.

Loads neither Prefect nor torch.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from prefect_rlhf.flows.cluster.forks import begin_to_load_for
from prefect_rlhf.flows.rewards import refuse_blocks_without_server
from prefect_rlhf.flows.run.downloads import REVISIONS
from prefect_rlhf.flows.run.origins import keep_origin
from prefect_rlhf.flows.run.planning import rank_counts
from prefect_rlhf.flows.run.prepare import Prepared, check_without_models, prepare
from prefect_rlhf.flows.run.run_folder import (
    CONFIG,
    SUMMARY,
    existing_run_folder,
    keep_config,
    keep_functions,
    refuse_foreign,
)
from prefect_rlhf.flows.view.terminal import phase, tell
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, RunConfig, make_config
from prefect_rlhf.rlhf_tasks.algorithms.held_out import section_of
from prefect_rlhf.rlhf_tasks.checkpoint.changes import (
    Accepted,
    has_samples_in_flight,
    keep_first_plan,
    last_accepted,
    samples_count,
    write_accepted,
)
from prefect_rlhf.rlhf_tasks.checkpoint.commits import lost_commits, newest_step, step_folder, steps_of
from prefect_rlhf.rlhf_tasks.checkpoint.journals import (
    EMPTY,
    JOURNALS,
    Journal,
    JournalError,
    JournalMark,
    committed_lines,
    is_row,
)
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from prefect_rlhf.rlhf_tasks.config.functions import is_pickled
from prefect_rlhf.rlhf_tasks.config.hub_names import base_of_name, hub_model, name_of_folder
from prefect_rlhf.rlhf_tasks.data.hub import pins_document
from prefect_rlhf.rlhf_tasks.data.token_file import TokenFile
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import base_of, is_model_folder, read_shape
from prefect_rlhf.rlhf_tasks.system.durable import replace_file, sync, write_file
from prefect_rlhf.rlhf_tasks.system.reading import MOST_JSON_BYTES, read_bytes, read_json, reading

DATA, HELD_OUT_DATA, MODELS = "data.sha256", "held-out.sha256", "models.json"
FREE = (
    "cluster",
    "keep_last",
    "max_restarts",
    "name",
    "on_device_loss",
    "output_dir",
    "patience",
    "push_to_hub",
    "report_to",
    "resume",
    "snapshot_every",
)
"""Keys of a configuration on which no result depends."""
ORDINARY = (
    "total_iterations",
    "optimizer.learning_rate",
    "critic_learning_rate",
    "optimizer.lr_scheduler_type",
    "optimizer.warmup_steps",
    "evaluation.every",
    "evaluation.keep_best",
    "on_anomaly",
    "kl_bound",
    "equal_rewards_iterations",
)
"""Keys that people change between two parts of one training."""
_OF_A_NEW_RUN = ("name", "output_dir", "resume")

_DIGESTS = TypeAdapter(dict[str, dict[str, str]])
_READ_OF_A_MODEL = (".safetensors", ".json", ".jinja", ".model")
_WHOLE_BYTES = 64 << 20  # a file up to this size is hashed as a whole
_SAMPLES, _SAMPLE_BYTES = (
    1024,
    4096,
)  # of a larger file, with its first MiB, where safetensors have their header
_HEAD_BYTES = 1 << 20
_SHOWN_CHARACTERS = 60


def refuse_changes(folder: Path, prepared: Prepared, accepting: str = "") -> None:
    """Raises ConfigError, with the differences, when something has changed since a run's last commit.

    accepting  how to accept them, for the sentence; default: the command
    """
    lost = lost_commits(folder)
    if lost is not None:
        raise ConfigError(lost)
    changes = differences(folder, prepared)
    if changes:
        command = (
            f"prefect-rlhf run {prepared.config.type.replace('_', '-')} --resume {folder} --accept-changes"
        )
        raise ConfigError(
            f"{folder}: changed since the last commit: {'; '.join(changes)}. Undo that, or accept it: "
            f"{accepting or command}"
        )


def may_be_stated(key: str) -> bool:
    """Whether the command line may give a run that is resumed another value of a dotted key: no result depends on it,
    or it is an ordinary change."""
    return key in ORDINARY or (key.partition(".")[0] in FREE and key not in _OF_A_NEW_RUN)


def prepare_run(
    config: RunConfig,
    folder: Path | None,
    warn: Callable[[Iterable[str]], None],
    begun: bool,
    accept: bool = False,
    stated: Collection[str] = ORDINARY,
    accepting: str = "",
) -> Prepared:
    """Prepare a run that begins or continues. What its ranks need begins to load then.

    folder     the run's, which the caller has taken; None: it is made later
    warn       shows warnings
    begun      whether it continues: then what has changed since its last commit is accepted or refused
    accept     all changes; else those that are `stated`
    accepting  as for `refuse_changes`
    Raises ConfigError.
    """
    with phase("models, data and plan"):
        prepared = prepare(config, folder)
    warn(prepared.warnings)
    if begun:
        assert folder is not None
        accepted = (
            accept_changes(folder, prepared) if accept else accept_stated(folder, prepared, stated, accepting)
        )
        for change in accepted:
            tell(f"accepted: {change}")
        keep_functions(folder, config)
    begin_to_load_for(prepared.config.cluster)
    refuse_blocks_without_server(config)
    return prepared


def accept_stated(
    folder: Path, prepared: Prepared, stated: Collection[str], accepting: str = ""
) -> tuple[str, ...]:
    """Accept what has changed since a run's last commit where the command line has stated it, as `accept_changes`
    does. Raises ConfigError, as `refuse_changes` does, where something else has changed, too.

    stated     dotted keys that `may_be_stated`; their values are the run's own from now on
    accepting  as for `refuse_changes`
    """
    changes = differences(folder, prepared)
    others = [change for change in changes if change.partition(" ")[0] not in stated]
    if others or not stated:
        refuse_changes(folder, prepared, accepting)
        return ()
    return accept_changes(folder, prepared)  # where nothing is committed yet, the configuration alone


def accept_changes(folder: Path, prepared: Prepared) -> tuple[str, ...]:
    """Accept what has changed since a run's last commit, and record it in its folder. Returns a sentence for each,
    and one for the samples in flight, which are dropped.

    Damaged journals lose the lines that cannot be read; the damaged file is kept under another name. Raises
    ConfigError for what cannot be accepted: lost commits, another shape of a trained model, and another
    sync_ref_model. The caller has taken the folder.
    """
    lost = lost_commits(folder)
    if lost is not None:
        raise ConfigError(lost)
    changes, manifest, dropped = differences(folder, prepared), _newest_manifest(folder), tuple[str, ...]()
    if manifest is not None and changes:
        step, marks = manifest.step, _marks(folder, manifest)
        if samples_count(folder, step) and has_samples_in_flight(step_folder(folder, step), manifest):
            dropped = (
                "the samples in flight, drawn ahead of their training or begun in segments, are dropped: iteration "
                f"{step + 1} draws its own, and a few prompts are learned from twice or not at all",
            )
        write_accepted(
            folder,
            Accepted(
                step=step,
                changes=changes,
                config=prepared.config.model_dump(mode="json"),
                journals={name: _mended(folder / name, marks[name], step) for name in JOURNALS},
            ),
        )
    keep_config(folder, prepared.named)
    keep_identity(folder, prepared)
    return (*changes, *dropped)


def keep_identity(folder: Path, prepared: Prepared) -> None:
    """Record the plan and the digests of data and models, with which the next attempt compares. Raises OSError."""
    for name, rows, _ in _data_of(prepared):
        replace_file(folder / name, rows.digest)
    digests = model_digests(prepared.config)
    keep_origin(folder, prepared, compared(prepared.config), digests)
    replace_file(folder / MODELS, json.dumps(digests, indent=1))
    if prepared.pins:
        replace_file(folder / REVISIONS, pins_document(prepared.pins))
    keep_first_plan(folder, prepared.plan, prepared.changes)


def differences(folder: Path, prepared: Prepared) -> tuple[str, ...]:
    """A sentence for each thing that has changed since the last commit; none where there is no commit yet.

    Raises ConfigError when a trained model has another shape, or sync_ref_model has changed: the commit does not fit.
    So it is where the run is to end before its newest commit, and where no commit can be read.
    """
    manifest = _newest_manifest(folder)
    if manifest is None:
        return ()
    if prepared.iterations < manifest.step:
        raise ConfigError(
            f"total_iterations={prepared.iterations}, but {folder} has committed {manifest.step} iterations. Give at "
            "least that many, or start a new run."
        )
    _refuse_another_model(folder, manifest, prepared.config)
    changes = list(_changed_keys(_committed_config(folder, manifest), compared(prepared.config)))
    for name, rows, source in _data_of(prepared):
        if (folder / name).exists() and (folder / name).read_bytes() != rows.digest.encode():
            changes.append(f"{source} has other rows")
    try:
        changes += _changed_models(folder / MODELS, model_digests(prepared.config))
    except ConfigError as damaged:
        changes.append(str(damaged).rstrip("."))
    for name, mark in _marks(folder, manifest).items():
        try:
            Journal(folder / name, mark)
        except JournalError as error:
            changes.append(str(error).rstrip("."))
    return tuple(changes)


def _data_of(prepared: Prepared) -> Iterator[tuple[str, TokenFile, str]]:
    """(file with the digest, rows, where they come from) of a run's data and of its held-out rows."""
    yield DATA, prepared.rows, prepared.config.data.name
    section = section_of(prepared.config)
    for rows in prepared.held_out.values():
        assert section is not None, "held-out rows are of an evaluation"
        yield HELD_OUT_DATA, rows, section.data
        return  # the others are of the same files


def _newest_manifest(folder: Path) -> Manifest | None:
    """The manifest of the newest commit whose manifest can be read; None without commits. The controller verifies the
    files later. Raises ConfigError, with the newest one's fault, where there are commits and none can be read."""
    faults = list[CheckpointError]()
    for step in sorted(steps_of(folder), reverse=True):
        try:
            return read_manifest(step_folder(folder, step))
        except CheckpointError as fault:
            faults.append(fault)
    if faults:
        raise ConfigError(
            f"{folder} has commits, but none that can be read: {faults[0]} Put back what is missing, or move the "
            "folder away to start from the beginning."
        )
    return None


def _accepted(folder: Path, step: int) -> Accepted | None:
    try:
        accepted = last_accepted(folder)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    return accepted if accepted is not None and accepted.step >= step else None


def _marks(folder: Path, manifest: Manifest) -> Mapping[str, JournalMark]:
    accepted = _accepted(folder, manifest.step)
    return accepted.journals if accepted and accepted.step == manifest.step else manifest.journals


def _refuse_another_model(folder: Path, manifest: Manifest, config: RunConfig) -> None:
    for role, parts in config.roles().items():
        record = manifest.roles.get(role)
        follows = role in config.follows
        if parts.optimizer is None and follows != (record is not None):
            raise ConfigError(
                f"{folder}: sync_ref_model was {str(not follows).lower()} until the last commit, and is "
                f"{str(follows).lower()} now. Set it as it was, or start a new run."
            )
        if record is not None:
            shape = read_shape(parts.folder)
            difference = record.shape.difference(shape)
            changes = ", ".join(f"{name} {old} (now {new})" for name, (old, new) in difference.items())
            if changes:
                raise ConfigError(
                    f"{folder}: the saved {role!r} has another shape than {parts.folder}: {changes}. Name the "
                    "original model folder, or start a new run."
                )
            lora = config.adapters_of(role, shape)
            if record.lora != lora:
                raise ConfigError(
                    f"{folder}: the saved {role!r} has {record.lora or 'no adapters'}, the configuration has "
                    f"{lora or 'none'}. Set lora as it was, or start a new run."
                )


# --- configuration -----------------------------------------------------------------------------------------


def _committed_config(folder: Path, manifest: Manifest) -> dict[str, Any]:
    accepted = _accepted(folder, manifest.step)
    document = manifest.config if accepted is None else accepted.config
    try:  # keys that a later version has added get their defaults
        return compared(make_config(document))
    except ConfigError:
        return {key: value for key, value in document.items() if key not in FREE}


def compared(config: RunConfig) -> dict[str, Any]:
    """The part of a configuration on which results depend, as a document. A model from a Hub is its name and commit,
    wherever its cache lies."""
    document = config.model_dump(mode="json", exclude=set(FREE))
    document["models"] = _named(document["models"])
    return document


def _named(models: Mapping[str, Any]) -> dict[str, Any]:
    return {role: _name(source) if isinstance(source, str) else source for role, source in models.items()}


def _name(folder: str) -> str:
    return " with ".join(filter(None, (base_of_name(folder), name_of_folder(folder))))


def _changed_keys(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """`key.sub OLD (now NEW)` for each value in which two documents differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from _changed_keys(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (before, now) in enumerate(zip(old, new, strict=True)):
            yield from _changed_keys(before, now, f"{key}.{number}")
    elif old != new and is_pickled(str(old)) and is_pickled(str(new)):
        yield f"{key}, the function {str(new).rpartition(':')[2]!r}, was defined anew with other code"
    elif old != new:
        yield f"{key} {_short(old)} (now {_short(new)})"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


# --- models ------------------------------------------------------------------------------------------------


def model_digests(config: RunConfig) -> dict[str, dict[str, str]]:
    """Model folder -> file -> digest, for the files of its models and its tokenizer that a run reads.

    Of a file above 64 MiB its size, its first MiB and 1024 samples of 4096 bytes are hashed. That detects another or
    retrained model, but not a few altered bytes. Copying a file does not change its digest.
    """
    folders = {parts.folder for parts in config.roles().values()} | {config.models.tokenizer}
    folders |= {str(base_of(folder)) for folder in folders}
    return {
        folder: {
            path.name: _digest(path)
            for path in sorted(Path(folder).iterdir())
            if path.is_file() and path.suffix in _READ_OF_A_MODEL
        }
        for folder in sorted(map(str, folders))
    }


def _digest(path: Path) -> str:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        if size_bytes <= _WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(f"{size_bytes} ".encode() + file.read(_HEAD_BYTES))
        for number in range(1, _SAMPLES + 1):
            file.seek((size_bytes - _SAMPLE_BYTES) * number // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _changed_models(kept: Path, now: dict[str, dict[str, str]]) -> list[str]:
    """A sentence for each folder, used before and now, whose files have changed.

    Raises ConfigError for a damaged record.
    """
    before: dict[str, dict[str, str]] = {}
    if kept.exists():
        with reading(kept, "not a record of model digests"):
            before = _DIGESTS.validate_json(read_bytes(kept, MOST_JSON_BYTES))
    return [
        f"model folder {folder} has changed: {', '.join(files)}"
        for folder in before.keys() & now.keys()
        if (
            files := [
                n for n in {**before[folder], **now[folder]} if before[folder].get(n) != now[folder].get(n)
            ]
        )
    ]


# --- journals ----------------------------------------------------------------------------------------------


def _mended(path: Path, mark: JournalMark, step: int) -> JournalMark:
    """The part of a journal that counts as committed from now on. A changed journal keeps its readable rows."""
    try:
        Journal(path, mark)
    except JournalError:
        if not path.is_file() or path.is_symlink():
            path.unlink(missing_ok=True)
            return EMPTY
        rows = b"".join(line for line in committed_lines(path, mark.size_bytes) if is_row(line))
        mended = path.with_name(f".{path.name}.mended")
        write_file(mended, rows)
        _put_aside(path, f"{path.name}.damaged-{step}")
        mended.rename(path)  # atomic: a kill here leaves either the damaged or the mended journal
        sync(path.parent)
        return JournalMark(size_bytes=len(rows), sha256=hashlib.sha256(rows).hexdigest())
    return mark


def _put_aside(path: Path, name: str) -> None:
    """Give a file a second name: `name`, or with a number appended if that is in use."""
    for number in count(1):
        with suppress(FileExistsError):
            os.link(path, path.with_name(name if number == 1 else f"{name}-{number}"))
            return


# --- a pipeline's stages -----------------------------------------------------------------------------------


class CheckedStages(NamedTuple):
    """The result of checking a pipeline's stages.

    warnings  each with its stage's name
    prepared  stage -> what was prepared of it, where its models are there
    ranks     of a host, for all stages
    """

    warnings: list[str]
    prepared: dict[str, Prepared]
    ranks: int


def check_stages(configs: Mapping[str, RunConfig], weights: bool = True) -> CheckedStages:
    """Check what can be checked before the first stage starts.

    A stage whose models exist is prepared as a run is, and must be unchanged if it was begun. The models of other
    stages do not exist yet; of those, data and rewards are checked. Raises ConfigError, naming the stage.

    weights  as for `prepare`
    """
    ranks = max(rank_counts(config)[0] for config in configs.values())
    checked = CheckedStages([], {}, ranks)
    for name, config in configs.items():
        try:
            if all(
                is_model_folder(role.folder) or hub_model(role.folder) for role in config.roles().values()
            ):
                checked.prepared[name] = prepare_stage(config, ranks, weights)
                warnings: Iterable[str] = checked.prepared[name].warnings
            else:
                warnings = check_without_models(config)
        except ConfigError as fault:
            raise ConfigError(f"stage {name!r}: {fault}") from None
        checked.warnings.extend(f"stage {name}: {warning}" for warning in warnings)
    return checked


def prepare_stage(config: RunConfig, ranks: int | None = None, weights: bool = True) -> Prepared:
    """Prepare a stage whose models exist, as `prepare` does.

    config  its name is that of its run folder
    Raises ConfigError, also for what has changed since its last commit, or before the first.
    """
    if (begun := begun_folder(config)) is None:
        return prepare(config, ranks=ranks, weights=weights)
    folder, before = existing_run_folder(begun)
    refuse_foreign(folder)
    prepared = prepare(config, folder, ranks, weights)
    refuse_changes(folder, prepared)
    if newest_step(folder) is None and compared(before) != compared(config):
        raise ConfigError(
            f"{folder} was begun with another configuration and has nothing committed yet. Remove it, or give the "
            "stage another name."
        )
    return prepared


def begun_folder(config: RunConfig) -> Path | None:
    """The run folder of a stage that was begun; None of one that was not."""
    folder = Path(config.output_dir, str(config.name))
    return folder if (folder / CONFIG).exists() else None


def summary_of(config: RunConfig) -> dict[str, Any] | None:
    """The summary of a finished stage; None of another one. Raises ConfigError where it cannot be read."""
    path = Path(config.output_dir, str(config.name), SUMMARY)
    if not path.exists():
        return None
    return read_json(path, remedy=f"Remove it: the stage {config.name} writes it again.")
