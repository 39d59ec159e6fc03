"""Run folders: one per run, which only its owner reads, taken by a lock while the run lives.

runs/NAME/config.json      the configuration of the run, for --resume
          data.sha256      digest of its rows: a resumed run must find the same
          models.json      digests of its model folders, likewise
          accepted.jsonl   changes of such things between two attempts, said to be wanted by --accept-changes
          plan.json        the execution plan that the run began by
          plan-2.json      the one that it changed to, if it did (replan: auto), and so on
          plans.jsonl      at which iteration each of these begins
          flow-runs/       one empty file for each Prefect flow run that has carried the run on, by its id
          attempts/        one file per attempt, by number; empty until the attempt has trained
          step-00000042/   commits
          metrics.jsonl    one row per committed iteration
          lineage.jsonl    one row per node of it: versions, and what each rank did when, by its own clock
          samples/         what PPO and rollouts sampled, one file per iteration
          model/           the trained model of the finished run, a Hugging Face folder
          summary.json     figures of the finished run
          prefect/         data base, login and log of the run's own Prefect server
          order            what `prefect-rlhf pause` and its kin have left for the run's process, which takes it away
          restarts.json    restarts without a commit in between
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from filelock import FileLock, Timeout

from rlhf_tasks.algorithms.configurations import ConfigError, RunConfig, make_config, resolve_paths
from rlhf_tasks.checkpoint.commits import ATTEMPTS
from rlhf_tasks.system.durable import replace_file
from rlhf_tasks.system.reading import read_json

CONFIG = "config.json"
LOCK = ".lock"
ORDER = "order"
BEGUN = (
    "flow-runs"  # in a run folder: an empty file for each flow run that has carried it on, named by its id
)


def new_run_folder(config: RunConfig, now: datetime | None = None) -> Path:
    """Make the folder of a new run and write its configuration; gives its path.

    A configuration without a name gets a fresh one from its type and the time (UTC). Raises ConfigError when
    the name is in use.
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
        raise ConfigError(f"{base} holds a thousand runs of this second. Choose a name.")
    folder = base / config.name
    raise ConfigError(
        f"name={config.name!r} is in use: {folder} exists. Choose another name, or go on with that run "
        f"by --resume {folder}."
    )


def _make(folder: Path, config: RunConfig) -> bool:
    """Make a run folder; False where there is one. It appears with its configuration in it: whenever this process
    ends, the run can be gone on with."""
    if folder.exists():
        return False
    fresh = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        fresh.parent.mkdir(parents=True, exist_ok=True)
        fresh.mkdir(mode=0o700)  # samples, metrics and logins are for this account only
        (fresh / CONFIG).write_text(config.model_dump_json(indent=2), encoding="utf-8")
        fresh.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        return False  # another run's, of this moment
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return True


def existing_run_folder(path: str | Path) -> tuple[Path, RunConfig]:
    """A run folder to go on with, and its configuration. Raises ConfigError when it is none."""
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} is no run folder: it has no {CONFIG}. Name one that a run has written.")
    return folder.resolve(), make_config(read_json(folder / CONFIG))


def open_run(
    config: RunConfig | None, run_folder: str | None = None, flow_run_id: str | None = None
) -> tuple[Path | None, RunConfig]:
    """The folder of a run to go on with and its configuration; for a new run None, and its configuration.

    run_folder   of a run to go on with; without it the configuration's `resume` says whether there is one
    flow_run_id  of the flow run that carries it out: one that Prefect starts again goes on in its run folder
    A run goes on as it began, but where its ranks are and how long they are waited for is said anew. Raises
    ConfigError when the folder to go on with is none, or no new one can be made.
    """
    if config is None:
        assert run_folder is not None, "a run has a configuration or a folder to go on in"
        return existing_run_folder(run_folder)
    config = resolve_paths(config, Path.cwd())
    begun_in = run_folder or _begun_by(flow_run_id, config) or _begun_in(config)
    if begun_in is None:
        refuse_unwritable(Path(config.output_dir), "output_dir")
        return None, config
    folder, begun = existing_run_folder(begun_in)
    return folder, begun.model_copy(update={"cluster": config.cluster, "runtime": config.runtime})


def refuse_unwritable(folder: Path, name: str) -> None:
    """Raises ConfigError, with the name of what says so, when a folder is not there and cannot be made, or holds
    nothing new."""
    try:
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        with TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"{name}={folder} cannot be written to: {error.strerror}. Name another folder."
        ) from None


def _begun_in(config: RunConfig) -> str | Path | None:
    """The run folder that a configuration's `resume` names, if any."""
    if config.resume not in ("never", "auto"):
        return config.resume
    if config.resume == "auto" and config.name is not None:
        named = Path(config.output_dir) / config.name
        return named if (named / "config.json").exists() else None
    return None


def remember_folder(folder: Path, flow_run_id: str) -> None:
    """Write down that a flow run has begun the run in a folder."""
    place = folder / BEGUN
    place.mkdir(exist_ok=True)
    (place / flow_run_id).touch()


def _begun_by(flow_run_id: str | None, config: RunConfig) -> Path | None:
    """The run folder that a flow run has begun, if it is still there."""
    if flow_run_id is None:
        return None
    found = Path(config.output_dir).glob(f"*/{BEGUN}/{flow_run_id}")
    return next((place.parent.parent for place in found), None)


@contextmanager
def run_folder_of(config: RunConfig, folder: Path | None) -> Iterator[Path]:
    """The folder of a run to go on with, or a new run's (see `new_run_folder`).

    A new run that is refused before its first attempt, for its cluster say, leaves none behind: its name is free.
    """
    if folder is not None:
        yield folder
        return
    fresh = new_run_folder(config)
    try:
        yield fresh
    except ConfigError:
        if not (fresh / ATTEMPTS).exists():
            shutil.rmtree(fresh)
        raise


def refuse_taken(folder: Path) -> None:
    """Raises ConfigError when a run goes on in a folder: asked before minutes are spent on another one's start."""
    with taken(folder):
        pass


@contextmanager
def taken(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Hold a run folder while a run writes to it. Raises ConfigError when another process does.

    patience_s  how long to wait for that process to end
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=patience_s)
    except Timeout:
        raise ConfigError(
            f"{folder} is in use by a run that goes on. Wait for it or choose another name."
        ) from None
    try:
        take_order(folder)  # it was left for a process that has ended
        yield
    finally:
        lock.release()


def leave_order(folder: Path, command: str) -> Path:
    """Leave an order for the run that goes on in a folder; gives the file, which the run's process takes away.

    Raises ConfigError when no run goes on there.
    """
    lock = FileLock(folder / LOCK)
    with suppress(Timeout):
        lock.acquire(timeout=0)
        lock.release()
        raise ConfigError(f"no run goes on in {folder}: there is nothing to {command}.")
    order = folder / ORDER
    replace_file(order, f"{command}\n")
    return order


def take_order(folder: Path) -> str | None:
    """The order that was left in a run folder, if any; it is taken away."""
    order = folder / ORDER
    try:
        command = order.read_text(encoding="utf-8").strip()
        order.unlink()
    except FileNotFoundError:
        return None
    return command
