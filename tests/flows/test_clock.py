"""The clock of the machine jumps, as when its time is set."""

import subprocess
from pathlib import Path

import pytest

from prefect_rlhf.rlhf_tasks.checkpoint.commits import step_folder
from tests.committed import assert_same_run, generations_of
from tests.flows.marked_command import MarkedCommand
from tests.flows.test_killed_run import begin, finish

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1800)]
ITERATIONS = 6
JUMP_AT = 2  # commits
DAY = 86400


def shifted_clock(folder: Path) -> tuple[dict[str, str], Path]:
    """(environment of processes whose wall clock is off, the file that says by how many seconds: 0)."""
    library, seconds = folder / "shifted_clock.so", folder / "seconds"
    source = Path(__file__).with_name("shifted_clock.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    set_clock(seconds, 0)
    return {"LD_PRELOAD": str(library), "SHIFT_FILE": str(seconds)}, seconds


def set_clock(seconds: Path, shift: int) -> None:
    """In place: the processes have the file mapped."""
    with seconds.open("r+b" if seconds.exists() else "wb") as file:
        file.write(shift.to_bytes(8, "little", signed=True))


@pytest.mark.parametrize("jump", [DAY, -DAY], ids=["forward", "back"])
def test_a_clock_that_jumps_a_day_ends_nothing(tmp_path, jump):
    """Dask's, Prefect's and our own deadlines: none of them takes the jump for a day without news."""
    command, undisturbed = begin(tmp_path, "undisturbed", ITERATIONS)
    finish(tmp_path / "undisturbed.log", command)
    environment, seconds = shifted_clock(tmp_path)
    command, folder = begin(tmp_path, "jumped", ITERATIONS)
    with MarkedCommand(tmp_path / "jumped.log", *command, environment=environment) as run:
        run.wait_until(step_folder(folder, JUMP_AT).exists)
        set_clock(seconds, jump)
        assert run.process.wait(900) == 0, run.output
        run.assert_gone()
    assert generations_of(folder) == dict.fromkeys(range(ITERATIONS), (1, 0)), "an iteration was done twice"
    assert_same_run(folder, undisturbed)
