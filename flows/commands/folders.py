"""Commands for a run's folder: `ui` and `export` when it has ended; `pause`, `resume`, `stop` and `cancel` before."""

import os
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.markup import escape

from flows.cluster.server import own_server
from flows.run.run_folder import CONFIG, existing_run_folder, leave_order, refuse_foreign, refuse_unwritable
from flows.view.terminal import Console
from rlhf_tasks.algorithms.configurations import ConfigError
from rlhf_tasks.checkpoint.commits import commit_to_export

TAKEN_S = 60.0  # the run's process looks twice a second
LOOK_EVERY_S = 0.1

console = Console()


def ui(run: Path, /) -> None:
    """Open the Prefect UI of a finished run, until Ctrl-C.

    Parameters
    ----------
    run
        The run's folder.
    """
    if not (run / "prefect").is_dir() and not (run / CONFIG).is_file():
        raise ConfigError(f"{run} is not the folder of a run. Name the folder of a run or of a demo.")
    if not (run / "prefect").is_dir():
        raise ConfigError(f"{run} has no Prefect server of its own: the run reported to PREFECT_API_URL.")
    refuse_foreign(run)
    with own_server(run) as server:
        console.print(f"{server.ui_line}   (Ctrl-C ends it)", highlight=False, soft_wrap=True)
        while True:
            time.sleep(3600)


def export(
    run: Path,
    folder: Path,
    /,
    *,
    role: Annotated[str | None, Parameter("--role")] = None,
    merged: Annotated[bool, Parameter("--merged", negative="")] = False,
) -> None:
    """Write a trained model of a run as a Hugging Face folder. It is the model of the last commit or, with
    evaluation.keep_best, of the best one. For a run with `lora` it is the adapter.

    Parameters
    ----------
    run
        The run's folder.
    folder
        The folder to write; it must not exist yet.
    role
        A trained role; default: the only one, or the actor.
    merged
        Write the whole model with the adapter merged in.
    """
    run_folder, config = existing_run_folder(run)
    if os.path.lexists(folder):  # a link that leads nowhere, too
        raise ConfigError(f"{folder} already exists. Remove it or name another folder.")
    refuse_unwritable(folder, "FOLDER")
    commit, refused = commit_to_export(run_folder, config)
    for error in refused:
        console.print(f"refused: {escape(str(error))}", highlight=False, soft_wrap=True)
    if commit is None:
        raise ConfigError(f"{run} has no commit that can be used.")
    from rlhf_tasks.rank.export import export_commit  # torch takes seconds to import

    chosen = role or ("actor" if "actor" in commit.manifest.roles else next(iter(commit.manifest.roles)))
    export_commit(commit.folder, config, chosen, folder, merged or None)
    console.print(f"{chosen} after {commit.step} iterations: {folder}")


def pause(run: Path, /, *, release: Annotated[bool, Parameter("--release", negative=())] = False) -> None:
    """Pause a run at its next commit.

    Parameters
    ----------
    run
        The run's folder.
    release
        Also release the devices: the ranks end, and new ones load the commit on resume. Default: the ranks keep them.
    """
    devices = "released" if release else "kept"
    _order(
        run,
        "release" if release else "pause",
        f"pauses when the iterations in flight are committed; its devices are {devices}. "
        f"To continue: prefect-rlhf resume {run}",
    )


def resume(run: Path, /) -> None:
    """Resume a run that is paused.

    Parameters
    ----------
    run
        The run's folder.
    """
    _order(run, "resume", "continues")


def stop(run: Path, /) -> None:
    """End a run at its next commit as if that were its last iteration, with model and summary.

    Parameters
    ----------
    run
        The run's folder.
    """
    _order(run, "stop", "ends when the iterations in flight are committed, with its model and summary")


def cancel(run: Path, /) -> None:
    """End a run at its next commit, without model or summary.

    Parameters
    ----------
    run
        The run's folder.
    """
    _order(run, "cancel", "ends when the iterations in flight are committed")


def _order(run: Path, command: str, what: str) -> None:
    """Give an order to the run's process, and print what it does. Raises ConfigError when the process does not take
    it."""
    folder, _ = existing_run_folder(run)
    order = leave_order(folder, command)
    deadline = time.monotonic() + TAKEN_S
    while order.exists():
        if time.monotonic() > deadline:
            order.unlink(missing_ok=True)
            raise ConfigError(
                f"the process of the run in {run} has not taken the order within {TAKEN_S:g} s: it is ending, or it "
                "hangs. End it with Ctrl-C."
            )
        time.sleep(LOOK_EVERY_S)
    console.print(f"{folder.name} {what}", highlight=False, soft_wrap=True)
