"""A deployed run is paused, resumed, cancelled and killed: what Prefect shows is what the ranks do."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from prefect_rlhf.rlhf_tasks.checkpoint.commits import newest_step
from tests.committed import assert_same_run, generations_of
from tests.deployments.deployed import deployed, wait_for
from tests.tiny_runs import TWO_RANKS, ppo_config

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1700)]
ITERATIONS = 10
QUIET_S = 8.0  # an iteration takes less


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployed")
    with deployed(folder) as place, place.worker():
        yield place


def begin(place, name: str, iterations: int = ITERATIONS):
    """(a deployed run, the folder that it works in)."""
    base = place.folder / name
    base.mkdir()
    config = ppo_config(
        base,
        plan=TWO_RANKS,
        cluster={"devices_per_host": 2},
        total_iterations=iterations,
        kl_target=0.1,
        kl_horizon=64,
    )
    run = place.start("rlhf-ppo/local", config.model_dump(mode="json"))
    (folder,) = wait_for(lambda: list((base / "runs").glob("ppo-*")))
    return run, folder


def committed(folder: Path, step: int) -> int | None:
    newest = newest_step(folder)
    return newest if newest is not None and newest >= step else None


def suspend(run) -> None:
    """The UI's button Pause."""
    limit = (datetime.now(UTC) + timedelta(seconds=300)).isoformat()
    details = {"pause_timeout": limit, "pause_reschedule": True}
    run.set_state(type="PAUSED", name="Suspended", state_details=details)


def family(run) -> list[psutil.Process]:
    flow = run.process
    return [flow, *flow.children(recursive=True)]


def assert_ended(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def assert_nothing_is_committed_for(folder: Path, seconds: float) -> None:
    step = newest_step(folder)
    time.sleep(seconds)
    assert newest_step(folder) == step


@pytest.fixture(scope="module")
def undisturbed(place):
    """The folder of a run to which nothing happened."""
    run, folder = begin(place, "undisturbed")
    run.wait("Completed")
    return folder


def attempts_of(folder: Path) -> set[int]:
    """The attempts of a run that did iterations."""
    return {attempt for attempt, _ in generations_of(folder).values()}


def assert_gone_on(run, folder: Path, undisturbed: Path) -> None:
    """It continued in its folder, to the bits of the undisturbed run."""
    run.wait("Completed")
    assert [path.name for path in folder.parent.glob("ppo-*")] == [folder.name]
    assert_same_run(folder, undisturbed)


def test_a_run_whose_process_is_killed_is_started_again_by_its_worker(place, undisturbed):
    run, folder = begin(place, "killed")
    wait_for(lambda: committed(folder, 2))
    processes = family(run)
    processes[0].kill()
    assert_ended(processes)
    assert newest_step(folder) < ITERATIONS, "it was not killed midway"
    assert_gone_on(run, folder, undisturbed)
    # Prefect tells of a kill twice. The second word may end the attempt that has just begun, before it does anything.
    assert len(attempts_of(folder)) == 2


def test_a_run_that_the_ui_pauses_gives_its_devices_back_and_goes_on_when_resumed(place, undisturbed):
    run, folder = begin(place, "paused")
    wait_for(lambda: committed(folder, 2))
    processes = family(run)
    suspend(run)
    state = run.wait("Suspended", message="devices are released")
    assert_ended(processes)
    assert state.message == f"at commit {newest_step(folder)}; devices are released"
    assert newest_step(folder) < ITERATIONS, "it was not paused midway"
    assert_nothing_is_committed_for(folder, QUIET_S)
    run.resume()
    assert_gone_on(run, folder, undisturbed)
    assert attempts_of(folder) == {1, 2}


@pytest.mark.parametrize("paused_first", [False, True], ids=["running", "paused"])
def test_a_run_that_is_cancelled_ends_and_its_subflows_are_cancelled(place, paused_first):
    run, folder = begin(place, f"cancelled-{paused_first}", 400)
    wait_for(lambda: committed(folder, 2))
    processes = family(run)
    if paused_first:
        suspend(run)
    run.set_state(type="CANCELLING", name="Cancelling")
    run.wait("Cancelled")
    assert_ended(processes)
    if not paused_first:  # else Prefect shows it as Cancelled at once, so it ends at once
        said = [state.message or "" for state in run.states()]  # the worker's own comes last
        assert any(line.startswith(f"at commit {newest_step(folder)};") for line in said), "it was killed"
    assert_nothing_is_committed_for(folder, QUIET_S)
    states = wait_for(lambda: settled(run))
    assert set(states) <= {"Completed", "Cancelled"}


def settled(run) -> list[str] | None:
    states = [child.state for child in run.subflows()]
    return [state.name for state in states] if all(state.is_final() for state in states) else None
