"""`prefect-rlhf run` against `dask scheduler` and `dask worker`: unfit clusters are refused first."""

import os
import subprocess
import sys

import pytest
import yaml
from distributed import Client

from tests.flows.dask_commands import ROOT, SAFE, dask_command, dask_scheduler
from tests.tiny_runs import ppo_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def run(prefect, tmp_path):
    """Run a tiny PPO with overrides as a user does; gives the ended process."""

    def run(*overrides):
        document = ppo_config(tmp_path, name="mine").model_dump(mode="json")
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
        environment = {**os.environ, **prefect.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "flows.cli", "run", "ppo", "--config", str(tmp_path / "run.yaml")]
        return subprocess.run([*command, *overrides], env=environment, capture_output=True, text=True)

    return run


def assert_refused(ended, words):
    """Exit status 2 and one sentence."""
    assert ended.returncode == 2, ended.stdout + ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert words in lines[0]
    assert "Traceback" not in ended.stdout + ended.stderr


def test_too_few_workers_are_counted_before_training(run, tmp_path):
    with dask_scheduler(tmp_path, **SAFE) as address:
        common = [
            "worker",
            address,
            "--host",
            "127.0.0.1",
            "--no-dashboard",
            "--local-directory",
            str(tmp_path),
        ]
        with (
            dask_command(*common, "--nthreads", "16", "--resources", "controller=1", "--name", "boss"),
            dask_command(*common, "--nthreads", "1", "--resources", "slot=1"),
        ):
            with Client(address, set_as_default=False) as client:
                client.wait_for_workers(2, timeout=300)
            place = [f"cluster.address={address}", "cluster.devices_per_host=2"]
            ended = run(*place, "runtime.startup_timeout_s=2")
    assert_refused(
        ended,
        f"the plan needs 2 ranks; the cluster at {address} offers 1 (workers with a GPU or slot resource)",
    )
    assert "Start 2 more" in ended.stderr  # the one that is there does not fill a host of two
    assert "runtime.startup_timeout_s=2 have passed" in ended.stderr
    assert not list((tmp_path / "runs" / "mine").glob("step-*"))


def test_a_cluster_that_is_not_there_is_named(run):
    ended = run("cluster.address=tcp://127.0.0.1:1", "runtime.startup_timeout_s=1")
    assert_refused(ended, "no Dask scheduler answers at cluster.address=tcp://127.0.0.1:1")
