"""`prefect-rlhf` as a process of its own, with a mark in its environment by which all that it starts is found."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

ROOT = Path(__file__).parents[2]


def marked(mark: str) -> dict[int, str]:
    """Command lines of the live processes that have a mark in their environment, by pid."""
    commands = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                commands[int(process.name)] = command
        except OSError:
            continue
    return commands


class MarkedCommand:
    """`prefect-rlhf ARGUMENTS`, its output in a file.

    environment  besides this process' own, which is left without Prefect's variables
    inside       what stands before the command (tests/flows/two_hosts.py)
    """

    def __init__(
        self,
        log: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        inside: Sequence[str] = (),
    ) -> None:
        self._log, self._mark = log, uuid4().hex
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        ours = {"PYTHONPATH": str(ROOT), "MARK": self._mark, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-m", "prefect_rlhf.flows.cli", *arguments],
                env={**inherited, **ours, **(environment or {})},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def __enter__(self) -> "MarkedCommand":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    def wait_until(self, reached: Callable[[], bool], seconds: float = 400.0) -> None:
        """Wait for something to come true while the command runs."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.002)

    def signal(self, number: int) -> None:
        """Ctrl-C as a terminal sends it, to the whole foreground group; any other signal to the process alone."""
        (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)

    def processes(self) -> dict[int, str]:
        """Command lines of the live processes that have the mark, by pid."""
        return marked(self._mark)

    def alive(self) -> list[str]:
        """The same without pids."""
        return list(self.processes().values())

    def assert_gone(self, seconds: float = 60.0) -> None:
        """No process of it is left so long after it has ended; some end by themselves a moment later."""
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == [], self.output


def outcome(log: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status of a command that is carried out to its end, and what it has printed."""
    with MarkedCommand(log, *arguments, environment=environment) as begun:
        status = begun.process.wait(400)
        begun.assert_gone()
        return status, begun.output
