"""Any process of a run, killed at any moment: it continues, by itself or resumed, to the bits of an undisturbed run.

Five kills a run, in ten runs of other seeds: server, flow process (with its scheduler), worker (ranks and
controller), reward helper. `-s` prints what was killed when.
"""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from prefect_rlhf.rlhf_tasks.checkpoint.commits import newest_step
from tests.committed import assert_same_run
from tests.flows.marked_command import MarkedCommand
from tests.flows.test_killed_run import begin, finish

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(3000)]
ITERATIONS = 40
KILLS = 5
BETWEEN = (1, 5)  # commits from one kill to the next
WITHIN_S = 1.5  # more or less an iteration
KINDS = {
    "server_process": "server",
    "prefect_rlhf.flows.cli": "flow",
    "forkserver": "worker",
    "reward": "helper",
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run to which nothing happened."""
    base = tmp_path_factory.mktemp("undisturbed")
    command, folder = begin(base, "undisturbed", ITERATIONS)
    finish(base / "log", command)
    return folder


def kind_of(command: str) -> str | None:
    """What a process is, by its command line; None for what only serves others, as multiprocessing's tracker."""
    return next((kind for sign, kind in KINDS.items() if sign in command), None)


class Victim:
    """A run that is killed piece by piece, and resumed where its flow process has ended."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._starts = 0
        command, self.folder = begin(base, "killed", ITERATIONS)
        self.run = self._start(command)

    def __enter__(self) -> "Victim":
        return self

    def __exit__(self, *_: object) -> None:
        self.run.__exit__()

    def _start(self, command: list[str]) -> MarkedCommand:
        self._starts += 1
        return MarkedCommand(self._base / f"log-{self._starts}", *command)

    def step(self) -> int:
        return newest_step(self.folder) or 0 if self.folder.exists() else 0

    def reach(self, step: int, seconds: float = 400.0) -> bool:
        """Go on until a step is committed, resuming as often as it takes; False when the run is over."""
        deadline = time.monotonic() + seconds
        while self.step() < step:
            assert time.monotonic() < deadline, self.run.output
            status = self.run.process.poll()
            if status == 0:
                return False
            if status is not None:
                self.resume()
            time.sleep(0.05)
        return True

    def resume(self) -> None:
        """What a user does whose command has ended."""
        self.run.assert_gone()
        self.run = self._start(["run", "ppo", "--resume", str(self.folder)])

    def kill_one(self, rng: random.Random) -> str:
        """Kill a process of a kind that is drawn first; its kind."""
        of_kind: dict[str, list[int]] = {}
        for pid, command in sorted(self.run.processes().items()):
            kind = kind_of(command)
            if kind is not None:
                of_kind.setdefault(kind, []).append(pid)
        kind = rng.choice(sorted(of_kind))
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(rng.choice(of_kind[kind]), signal.SIGKILL)
        return kind

    def finish(self) -> None:
        """To the good end."""
        self.reach(ITERATIONS + 1, seconds=1500.0)
        self.run.assert_gone()


@pytest.mark.parametrize("seed", range(10))
def test_random_kills_cost_a_run_nothing(tmp_path, undisturbed, seed):
    rng = random.Random(seed)
    killed, due = [], rng.randint(*BETWEEN)
    with Victim(tmp_path) as victim:
        while len(killed) < KILLS and victim.reach(due):
            time.sleep(rng.uniform(0, WITHIN_S))
            at = victim.step()
            killed.append((victim.kill_one(rng), at))
            due = at + rng.randint(*BETWEEN)
        victim.finish()
    print(f"seed {seed}: {', '.join(f'{kind} after step {at}' for kind, at in killed)}")
    assert len(killed) == KILLS, "the run was over before"
    assert_same_run(victim.folder, undisturbed)
