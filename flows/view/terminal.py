"""What a run shows in the terminal: its phases while it starts, then a progress bar and a line for each iteration.

Where the output is not a terminal, plain lines are printed instead. Foreign text cannot control the terminal. Loads
no Prefect.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from statistics import median
from threading import Lock
from typing import Any, TypeVar

import psutil
import rich.console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from prefect_rlhf.rlhf_tasks.system.reading import printable

T = TypeVar("T")

REFRESHES_PER_S = 2  # of spinner and bar: each takes some milliseconds of the ranks' CPU time
STEP_S = 10.0  # between lines of a transfer where there is no bar
RECENT = 10  # iterations whose median is used to estimate the remaining time
SHOW_CURSOR = "\x1b[?25h"  # for a process that exits while a spinner or bar hides the cursor


class Console(rich.console.Console):
    """Rich's, which prints texts without their control characters; Rich's own markup has its effect."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print texts, made printable, and Rich's own objects."""
        super().print(*(printable(each) if isinstance(each, str) else each for each in objects), **settings)


# A notebook's kernel asks for colours, but shows what moves as many lines.
console = Console(force_jupyter=False, force_terminal=False if "ipykernel" in sys.modules else None)


def since_start_s() -> float:
    """Seconds since this process began."""
    return time.time() - psutil.Process().create_time()


@contextmanager
def phase(what: str, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Show a phase with its elapsed time while it lasts. If it succeeds, print a line with its seconds.

    say  prints a line; None: to the terminal
    """
    say = say or tell
    began_s = time.monotonic()
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        moving = Progress(*columns, console=console, transient=True, refresh_per_second=REFRESHES_PER_S)
        with moving:
            moving.add_task(what, total=None)
            yield
    else:
        say(f"{what} ...")
        yield
    say(f"{what}: {time.monotonic() - began_s:.1f} s")


def downloading(what: str, total_bytes: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show a download while it lasts. Gives a function that is called with bytes that have arrived, by any thread."""
    return _transferring("download", what, total_bytes, None)


def uploading(
    what: str, total_bytes: int, say: Callable[[str], None] | None = None
) -> AbstractContextManager[Callable[[int], None]]:
    """The same for an upload. say: prints a line, during a run, which has a bar of its own; None: to the terminal"""
    return _transferring("upload", what, total_bytes, say)


@contextmanager
def _transferring(
    verb: str, what: str, total_bytes: int, say: Callable[[str], None] | None
) -> Iterator[Callable[[int], None]]:
    began_s = time.monotonic()
    if console.is_terminal and say is None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            _Ends(),
        )
        moving = Progress(*columns, console=console, transient=True, refresh_per_second=REFRESHES_PER_S)
        with moving:
            task = moving.add_task(what, total=total_bytes)
            yield lambda arrived: moving.advance(task, arrived)
    else:
        (say or tell)(f"{verb}ing {what}, {decimal(total_bytes)} ...")
        yield _Steps(what, total_bytes, say or tell).advance
    seconds = time.monotonic() - began_s
    (say or tell)(f"{verb}ed {what}, {decimal(total_bytes)}: {seconds:.1f} s")


class _Steps:
    """A line for each tenth of a transfer that takes long."""

    def __init__(self, what: str, total_bytes: int, say: Callable[[str], None]) -> None:
        self._what, self._total_bytes, self._say, self._lock = what, total_bytes, say, Lock()
        self._bytes, self._told_s = 0, time.monotonic()

    def advance(self, arrived: int) -> None:
        with self._lock:
            before, self._bytes = self._bytes, self._bytes + arrived
            tenth = self._total_bytes / 10 or 1
            if self._bytes // tenth > before // tenth and time.monotonic() > self._told_s + STEP_S:
                self._told_s = time.monotonic()
                self._say(f"{self._what}: {decimal(self._bytes)} of {decimal(self._total_bytes)}")


@contextmanager
def entering(
    what: str, context: AbstractContextManager[T], say: Callable[[str], None] | None = None
) -> Iterator[T]:
    """Enter a context, and show that as a phase."""
    with ExitStack() as stack:
        with phase(what, say):
            value = stack.enter_context(context)
        yield value


def tell(line: str) -> None:
    """Print a line literally, without wrapping it at the terminal's width."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def shown_metrics(metrics: Mapping[str, float | None]) -> list[str]:
    """Names of the metrics that are shown, in order: of the evaluation, reward, mean of each reward, margins, KL,
    accuracy, losses."""
    own = [name for name in metrics if name.startswith("rewards/") and name.endswith("/mean")]
    losses = [name for name in metrics if name.startswith("loss/")]
    shown = ("eval/reward", "eval/loss", "reward", *own, "rewards/margins", "kl", "accuracy", *losses)
    return [name for name in shown if metrics.get(name) is not None]


class RunProgress:
    """The progress of a run: a line for each complete iteration, and a progress bar.

    iterations  number of iterations of the run
    say         prints a line
    """

    def __init__(self, run: str, iterations: int, say: Callable[[str], None]) -> None:
        self._run, self._iterations, self._say = run, iterations, say
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._newest = -1
        self._phase = ExitStack()
        self._bar: Progress | None = None

    def begin_phase(self, what: str) -> None:
        """Begin to show a phase. The previous phase has ended successfully."""
        self.end_phase()
        self._phase.enter_context(phase(what, self._say))

    def end_phase(self) -> None:
        """The current phase has ended successfully."""
        self._phase.close()
        self._bar = None

    def iteration_ended(self, iteration: int, seconds: float, metrics: Mapping[str, float | None]) -> None:
        """Show a complete iteration. seconds: its duration by the ranks' clocks."""
        self._recent.append(seconds)
        left_s = median(self._recent) * (self._iterations - iteration - 1)
        if self._bar is None:
            self._phase.close()
            self._begin_bar()
        again = " again" if iteration <= self._newest else ""
        self._newest = max(self._newest, iteration)
        figures = [f"{name} {metrics[name]:.3f}" for name in shown_metrics(metrics)]
        head = f"iteration {iteration + 1} of {self._iterations}{again}, {seconds:.2f} s"
        if not console.is_terminal:
            head = f"{head}, {as_time(left_s)} left"
        self._say(", ".join([head, *figures]))
        self._update(
            completed=iteration + 1, pace=f"{seconds:.2f} s/iteration", ends_s=time.monotonic() + left_s
        )

    def committed(self, step: int) -> None:
        """Show the number of committed iterations."""
        self._update(committed=f"{step} committed")

    def close(self) -> None:
        """Remove spinner and bar. A phase in progress has failed, so its line is not printed."""
        self._phase.__exit__(GeneratorExit, GeneratorExit(), None)
        self._bar = None

    def _begin_bar(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[pace]}"),
            _Left(),
            TextColumn("{task.fields[committed]}"),
        )
        self._bar = Progress(
            *columns,
            console=console,
            transient=True,
            expand=True,
            refresh_per_second=REFRESHES_PER_S,
            disable=not console.is_terminal,
        )
        self._phase.enter_context(self._bar)
        self._bar.add_task(self._run, total=self._iterations, pace="", ends_s=time.monotonic(), committed="")

    def _update(self, completed: int | None = None, **fields: object) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=completed, **fields)  # pyright: ignore[reportArgumentType]  fields are anything


class _Ends(ProgressColumn):
    """The estimated time until the end of a transfer."""

    def render(self, task: Task) -> Text:
        return Text("" if task.time_remaining is None else f"{as_time(task.time_remaining)} left")


class _Left(ProgressColumn):
    """The estimated time until the end."""

    def render(self, task: Task) -> Text:
        return Text(f"{as_time(task.fields['ends_s'] - time.monotonic())} left")


def as_time(seconds: float) -> str:
    """Seconds as hours, minutes and seconds, e.g. 0:01:05."""
    return str(timedelta(seconds=max(round(seconds), 0)))
