"""Run folders: one per run, readable only by its owner, locked while the run is in progress; and their disk space.

runs/NAME/config.json      the configuration of the run, for --resume
          functions/       rewards that a notebook or a script defined, as code (cloudpickle)
          rows-DIGEST.jsonl  rows that Python gave as objects
          format           the number of this format
          data.sha256      digest of its rows, which must be the same when the run is resumed
          rows.arrow       these rows as token ids; written again if it is removed
          held-out.sha256, held-out.arrow   the same for the rows of the evaluation
          skipped-rows.jsonl  the rows that were left out, and why (data.on_bad_row: skip)
          models.json      digests of its model folders, likewise
          revisions.json   the commit and files of each model and data set from a Hub
          accepted.jsonl   changes of these between two attempts that --accept-changes has accepted
          plan.json        the first execution plan of the run
          plan-2.json      the plan after the first change, and so on (plan: adaptive)
          plans.jsonl      the iteration at which each of these begins
          flow-runs/       one empty file for each Prefect flow run that has run or resumed the run, named by its id
          attempts/        one file per attempt, named by its number; empty until the attempt has trained
          step-00000042/   commits
          metrics.jsonl    one row per committed iteration
          origins.jsonl    what teaches the run: data, settings, reward code and models, where one of them changes
          lineage.jsonl    one row per node of a committed iteration: versions, and times by each rank's own clock
          trackers/        what each tracker of report_to has, and what it has printed
          tensorboard/     event files (report_to: tensorboard); wandb/ likewise
          skipped-samples/ the samples that a reward failed on, and why (on_reward_error: skip)
          anomalies/       the first anomaly of each role, for `prefect-rlhf replay` (on_anomaly)
          samples/         samples with their scores: a few of each iteration; all of a rollout or evaluation, in
                           one file per iteration, dp rank and part
          model/           the trained model of the finished run, a Hugging Face folder
          summary.json     figures of the finished run
          report.html      the run as a page, which opens offline
          prefect/         database, login and log of the run's own Prefect server
          order            an order of `prefect-rlhf pause`, resume, stop or cancel; the run's process removes it
          restarts.json    count of restarts since the last commit
          weights-of-server  where the server of `generation` was given its last weights
"""

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from uuid import uuid4

from filelock import FileLock, Timeout

from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    ConfigError,
    RunConfig,
    make_config,
    resolve_paths,
)
from prefect_rlhf.rlhf_tasks.checkpoint.commits import ATTEMPTS, step_folders
from prefect_rlhf.rlhf_tasks.config.base import Judges
from prefect_rlhf.rlhf_tasks.config.functions import keep_function
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import parameters, trained_parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.protocol.commit import MOST_UNWRITTEN
from prefect_rlhf.rlhf_tasks.system.durable import existing, replace_file
from prefect_rlhf.rlhf_tasks.system.reading import read_json

CONFIG = "config.json"
FORMAT, NUMBER, OLDER = (
    "format",
    4,
    {"1": "as of commit 747d428a", "2": "as of commit cafffedf", "3": "as of commit d9ddcc2c"},
)
"""The file with the number of a run folder's format (1 has no such file), the number of this one, and which version
reads an older one. The number grows where an earlier run cannot continue: with the names in configurations, and with
what a commit holds."""
SUMMARY = "summary.json"
LOCK, HOLDER = ".lock", ".lock-holder"  # the latter has the id of the process that has the former
ORDER = "order"
# Free bytes; with less, the disk counts as full: SQLite and others report that in their own words.
FULL_BYTES = 1 << 20
STATE_FLOATS = 3  # numbers per parameter in a commit: master weight and two moments (optimizer.py)
BEGUN = "flow-runs"  # folder in a run folder: an empty file for each flow run of the run, named by its id


def new_run_folder(config: RunConfig, now: datetime | None = None) -> Path:
    """Make the folder of a new run and write its configuration. Returns its path.

    A configuration without a name gets a new one from its type and the time (UTC).
    Raises ConfigError when the name is in use.
    """
    base = Path(config.output_dir)
    if config.name is None:
        stem = f"{config.type.replace('_', '-')}-{now or datetime.now(UTC):%Y%m%d-%H%M%S}"
        names = [stem, *(f"{stem}-{number}" for number in range(1, 1000))]
    else:
        names = [config.name]
    folder = next((base / name for name in names if _make(base / name, config)), None)
    if folder is not None:
        return folder.resolve()
    if config.name is None:
        raise ConfigError(f"{base} has a thousand runs that began in this second. Choose a name.")
    raise _in_use(base / config.name)


def refuse_used_name(config: RunConfig) -> None:
    """Raises ConfigError when the name of a new run is in use."""
    if config.name is not None and (folder := Path(config.output_dir) / config.name).exists():
        raise _in_use(folder)


def _in_use(folder: Path) -> ConfigError:
    return ConfigError(
        f"name={folder.name!r} is in use: {folder} exists. Choose another name, or resume that run with "
        f"--resume {folder}."
    )


def _make(folder: Path, config: RunConfig) -> bool:
    """Make a run folder; False where it exists.

    It is renamed into place with its configuration inside, so the run can be resumed even if this process is killed.
    """
    if folder.exists():
        return False
    fresh = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        fresh.parent.mkdir(parents=True, exist_ok=True)
        fresh.mkdir(mode=0o700)  # samples, metrics and logins are for this account only
        (fresh / FORMAT).write_text(f"{NUMBER}\n", encoding="utf-8")
        keep_config(fresh, config)
        fresh.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        return False  # another run has made it just now
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return True


def keep_config(folder: Path, config: RunConfig) -> None:
    """Write a run's configuration into its folder, with the functions that no file names. Raises OSError."""
    keep_functions(folder, config)
    replace_file(folder / CONFIG, config.model_dump_json(indent=2))


def keep_functions(folder: Path, config: RunConfig) -> None:
    """Write the functions of a run, rewards or a rollout_func, that no file names into its folder. Raises OSError."""
    for reward in config.rewards if isinstance(config, Judges) else ():
        keep_function(reward.function, folder)
    if isinstance(config, Scores) and config.agent is not None:
        keep_function(config.agent.command, folder)


def finished_since(folder: Path, began_s: float) -> dict[str, Any] | None:
    """The summary of a run that has finished since then; None where it has not. began_s: by time.time()"""
    path = folder / SUMMARY
    coarse_s = 0.1  # kernels stamp files by a clock that lags by up to a tick
    if not path.exists() or path.stat().st_mtime < began_s - coarse_s:
        return None  # an older summary belongs to an earlier attempt
    return read_json(path)


def exported_step(folder: Path) -> int | None:
    """The step of the commit that the run's model was exported from; None if it is not recorded."""
    with suppress(ConfigError):
        return read_json(folder / SUMMARY).get("model_step")
    return None


def existing_run_folder(path: str | Path) -> tuple[Path, RunConfig]:
    """A run folder to resume, and its configuration. Raises ConfigError when it is not one of this format."""
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{folder} is not a run folder: it has no {CONFIG}. Name one that a run has written."
        )
    number = (folder / FORMAT).read_text("utf-8", "replace").strip() if (folder / FORMAT).exists() else "1"
    if number != str(NUMBER):
        reader = OLDER.get(number, f"whose run folders have format {number[:9]}")
        raise ConfigError(
            f"{folder} has the format {number[:9]} of run folders, and this version of prefect-rlhf resumes and "
            f"exports format {NUMBER}. Use prefect-rlhf {reader}, or start a new run."
        )
    return folder.resolve(), make_config(read_json(folder / CONFIG))


def refuse_foreign(folder: Path) -> None:
    """Raises ConfigError for a run folder of another account.

    A run that is resumed executes the rewards and environments that its folder names, and `ui` opens a server with
    the login in it. Where a file system gives all files one owner, as some that containers mount do, that is ours.
    """
    ours = {os.geteuid()}
    with suppress(OSError), TemporaryDirectory(dir=folder) as made:
        ours.add(os.stat(made).st_uid)
    owners = {path.stat().st_uid for path in (folder, folder / CONFIG) if path.exists()}
    if foreign := owners - ours:
        raise ConfigError(
            f"{folder} belongs to another account (user id {min(foreign)}), and a run folder names code that runs "
            "with your rights. Read its config.json; if you trust it, copy the folder (cp -r) and name the copy."
        )


def open_run(
    config: RunConfig | None, run_folder: str | None = None, flow_run_id: str | None = None
) -> tuple[Path | None, RunConfig]:
    """(run folder, configuration) of a run to resume; (None, configuration) for a new run.

    run_folder   the folder of a run to resume; default: as the configuration's `resume` says
    flow_run_id  the flow run; if it has already begun a run, as one that Prefect restarts has, that run is resumed
    A resumed run keeps its configuration, except for `cluster`, `patience` and `max_restarts`. Raises ConfigError
    when the folder is not a run folder, or no new one can be made.
    """
    if config is None:
        assert run_folder is not None, "a run has a configuration or a folder to resume"
        folder, begun = existing_run_folder(run_folder)
        refuse_foreign(folder)
        return folder, begun
    config = resolve_paths(config, Path.cwd())
    place = run_folder or _begun_by(flow_run_id, config) or begun_in(config)
    if place is None:
        refuse_unwritable(Path(config.output_dir), "output_dir")
        return None, config
    folder, begun = existing_run_folder(place)
    refuse_foreign(folder)
    changes = {key: getattr(config, key) for key in ("cluster", "patience", "max_restarts")}
    return folder, begun.model_copy(update=changes)


def refuse_unwritable(folder: Path, name: str) -> None:
    """Raises ConfigError when a folder cannot be written to, or does not exist and cannot be made.

    name  the option or key that gives the folder
    """
    try:
        there = next(place for place in (folder, *folder.absolute().parents) if _is_there(place))
        with TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"{name}={folder} cannot be written to: {error.strerror}. Name another folder."
        ) from None


def _is_there(place: Path) -> bool:
    """Whether a path exists, even as a broken link. Raises OSError for an invalid path."""
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def begun_in(config: RunConfig) -> str | Path | None:
    """The run folder that a configuration's `resume` names, if any."""
    if config.resume not in ("never", "auto"):
        return config.resume
    if config.resume == "auto" and config.name is not None:
        named = Path(config.output_dir) / config.name
        return named if (named / "config.json").exists() else None
    return None


def remember_folder(folder: Path, flow_run_id: str) -> None:
    """Record in a run folder that a flow run has run or resumed it."""
    place = folder / BEGUN
    place.mkdir(exist_ok=True)
    (place / flow_run_id).touch()


def newest_flow_run(folder: Path) -> str | None:
    """The id of the flow run that was the last to run or resume a run folder; None where none has."""
    begun = max((folder / BEGUN).glob("*"), key=lambda place: place.stat().st_mtime_ns, default=None)
    return None if begun is None else begun.name


def _begun_by(flow_run_id: str | None, config: RunConfig) -> Path | None:
    """The run folder that a flow run has recorded itself in, if it still exists."""
    if flow_run_id is None:
        return None
    places = Path(config.output_dir).glob(f"*/{BEGUN}/{flow_run_id}")
    return next((place.parent.parent for place in places), None)


@contextmanager
def run_folder_of(config: RunConfig, folder: Path | None) -> Iterator[Path]:
    """The given folder of a run to resume, or a new run's (see `new_run_folder`).

    The folder of a new run that is refused before its first attempt, for example for its cluster, is removed.
    """
    if folder is not None:
        yield folder
        return
    fresh = new_run_folder(config)
    try:
        yield fresh
    except ConfigError:
        # Another process may have resumed it already.
        if not (fresh / ATTEMPTS).exists() and not is_in_use(fresh):
            shutil.rmtree(fresh)
        raise


def is_in_use(folder: Path) -> bool:
    """Whether a process holds a run folder."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


@contextmanager
def taken(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Lock a run folder while a run writes to it. Raises ConfigError, with the process, when another one has it.

    patience_s  seconds to wait for that process to end
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=patience_s)
    except Timeout:
        process = ""
        with suppress(OSError):  # it has just let go, or not written its id yet
            process = f" (process {(folder / HOLDER).read_text()})"
        raise ConfigError(
            f"{folder} is in use by a run in progress{process}. Wait for its end or choose another name."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to: {error.strerror}. Let this account write there, or copy the folder "
            "(cp -r) and name the copy."
        ) from None
    try:
        (folder / HOLDER).write_text(str(os.getpid()))
        take_order(folder)  # drop an order that was for a process that has ended
        yield
    finally:
        with suppress(OSError):
            (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def leave_order(folder: Path, command: str) -> Path:
    """Leave an order for the run in progress in a folder. Returns the file, which the run's process removes.

    Raises ConfigError when no run is in progress there.
    """
    if not is_in_use(folder):
        raise ConfigError(f"no run is in progress in {folder}: there is nothing to {command}.")
    order = folder / ORDER
    replace_file(order, f"{command}\n")
    return order


def take_order(folder: Path) -> str | None:
    """Remove and return the order in a run folder; None where there is none."""
    order = folder / ORDER
    try:
        command = order.read_text(encoding="utf-8").strip()
        order.unlink()
    except FileNotFoundError:
        return None
    return command


# --- disk space ---


class DiskNeed(NamedTuple):
    """Bytes of one commit, the maximum number of commits at once, and bytes of the exported model."""

    commit_bytes: int
    commits: int
    export_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.commit_bytes * self.commits + self.export_bytes


NO_DISK = DiskNeed(0, 0, 0)


def disk_need(
    config: RunConfig, shapes: Mapping[str, ModelShape], iterations: int, itemsize: int
) -> DiskNeed:
    """The disk space that a run needs, without its journals and samples.

    shapes    role -> its model's shape
    itemsize  bytes of a parameter of the exported model
    """
    exports, sizes = dict[str, int](), dict[str, int]()
    roles = config.roles()
    for name, role in roles.items():
        if role.optimizer is not None:
            shape, lora = shapes[name], config.adapters_of(name, shapes[name])
            exports[name] = sizes[name] = sum(spec.size for spec in parameters(shape, role.head))
            if lora is not None:
                sizes[name] = sum(spec.size for spec in trained_parameters(shape, role.head, lora))
                exports[name] = sizes[name] if config.exports_adapters else exports[name]
    if not sizes:
        return NO_DISK
    followers = sum(sum(s.size for s in parameters(shapes[n], roles[n].head)) for n in config.follows)
    evaluation = config.evaluation if isinstance(config, TrainingConfig) else None
    best = 0 if evaluation is None else evaluation.keep_best
    state_itemsize = max(itemsize, 4)  # bfloat16 is trained in float32
    every = 1 if isinstance(config.snapshot_every, str) else config.snapshot_every
    written = -(-iterations // every) + 1  # at most, with step 0
    exported = exports.get("actor", next(iter(exports.values())))
    return DiskNeed(
        state_itemsize
        * (STATE_FLOATS * sum(sizes.values()) + followers),  # of followers master weights alone
        min(config.keep_last + best + MOST_UNWRITTEN, written),
        itemsize * exported,
    )


def refuse_full_disk(need: DiskNeed, place: Path) -> None:
    """Raises ConfigError when the disk of `place` has too little space for what the run will write.

    place  the run folder, whose existing commits count as space, or the folder in which it will be made
    """
    there_bytes = sum(path.stat().st_size for folder in step_folders(place) for path in folder.iterdir())
    needed_bytes = need.total_bytes - min(there_bytes, need.commit_bytes * need.commits)
    free_bytes = shutil.disk_usage(existing(place)).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"{place} needs {needed_bytes} bytes and its disk has {free_bytes} free: {need.commits} commits of "
            f"{need.commit_bytes} bytes (keep_last, keep_best and two being written) and {need.export_bytes} for "
            "the exported model. Free some space, lower keep_last, or set output_dir to another disk."
        )


def full_disk(error: BaseException, folder: Path, needed_bytes: int | None = None) -> str | None:
    """A sentence with path and free bytes if a full disk caused an error; else None.

    folder        the folder that the run writes to
    needed_bytes  bytes of what was being written; None where that is unknown
    """
    path, full = folder, False
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            path, full = Path(cause.filename or folder), True
            break
        full = full or "No space left on device" in str(cause)
        cause = cause.__cause__ or cause.__context__
    free_bytes = shutil.disk_usage(existing(folder)).free
    if not full and free_bytes > FULL_BYTES:
        return None
    needs = "" if needed_bytes is None else f" needs {needed_bytes} bytes,"
    return f"No space left on device: {path}{needs} {free_bytes} are free. Free some space."
