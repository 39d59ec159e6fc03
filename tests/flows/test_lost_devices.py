"""A whole run on one machine, one of whose two workers is ended for good: it continues on one rank to the same
losses, and takes another worker when there is one."""

import json
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.checkpoint.changes import CHANGES, logged_changes, plan_digest
from prefect_rlhf.rlhf_tasks.checkpoint.commits import step_folder
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import read_manifest
from tests.committed import metrics_of
from tests.flows.dask_commands import CONTROLLER, LOOPBACK, RANK, SAFE, dask_scheduler, dask_worker
from tests.flows.marked_command import MarkedCommand
from tests.flows.test_killed_run import command_of, finish
from tests.tiny_runs import ppo_config

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1800)]
ITERATIONS = 60
SLOW = "fetch:delay=1.0"  # another worker is there long before the last iteration


def test_a_run_whose_worker_is_ended_continues_on_the_other_and_takes_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def command(name: str, **place: str) -> list[str]:
        config = ppo_config(
            tmp_path,
            name=name,
            dtype="float64",
            plan="heuristic",
            on_device_loss="shrink",
            total_iterations=ITERATIONS,
            cluster={"devices_per_host": 2, **place},
        )
        return command_of(tmp_path, config.model_dump(mode="json"))

    folder, undisturbed = tmp_path / "runs" / "lost", tmp_path / "runs" / "whole"
    finish(tmp_path / "whole.log", command("whole"))
    monkeypatch.setenv("PREFECT_RLHF_FAILPOINT", SLOW)

    def rank(name: str) -> AbstractContextManager[Any]:
        return dask_worker(address, tmp_path, *LOOPBACK, *RANK, "--name", name)

    with (
        dask_scheduler(tmp_path, **SAFE) as address,
        dask_worker(address, tmp_path, *LOOPBACK, *CONTROLLER),
        rank("r0"),
        ExitStack() as other,
    ):
        other.enter_context(rank("r1"))
        with MarkedCommand(tmp_path / "lost.log", *command("lost", address=address)) as run:
            run.wait_until(step_folder(folder, 1).exists)
            other.close()
            run.wait_until((folder / CHANGES).exists, 600)
            other.enter_context(rank("spare"))
            assert run.process.wait(900) == 0, run.output
            run.assert_gone()
    changes = logged_changes(folder)
    assert [change.plan.n_devices for change in changes] == [1, 2]
    plans = {read_manifest(step_folder(folder, step)).plan_sha256 for step in (ITERATIONS - 1, ITERATIONS)}
    assert plans == {plan_digest(changes[-1].plan)}
    summary = json.loads((folder / "summary.json").read_text())
    first, second = (change.iteration for change in changes)
    assert summary["plan_changes"] == [first, second]
    assert summary["reasons_of_changes"] == {
        str(first): "rank 1: did not come back within 310 s: 1 of 2 devices",
        str(second): "all devices are back",
    }
    for row, reference in zip(metrics_of(folder), metrics_of(undisturbed), strict=True):
        assert row == pytest.approx(reference, rel=1e-9, abs=1e-12)
