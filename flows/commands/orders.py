"""`prefect-rlhf pause`, `resume`, `stop` and `cancel`: orders to a run in progress."""

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.run.run_folder import existing_run_folder, leave_order
from flows.view.terminal import Console
from rlhf_tasks.algorithms.configurations import ConfigError

TAKEN_S = 60.0  # the run's process looks twice a second
LOOK_EVERY_S = 0.1

console = Console()


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
        f"To go on: prefect-rlhf resume {run}",
    )


def resume(run: Path, /) -> None:
    """Resume a run that is paused.

    Parameters
    ----------
    run
        The run's folder.
    """
    _order(run, "resume", "goes on")


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
    """Give an order to the run's process, and print what it does. Raises ConfigError when it is not taken."""
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
