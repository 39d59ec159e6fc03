"""`prefect-rlhf run` against `dask scheduler` and `dask worker`: unfit clusters are refused first."""

import os
import subprocess
import sys

import pytest
import yaml

from tests.flows.dask_commands import ROOT
from tests.tiny_runs import ppo_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def run(prefect, tmp_path):
    """Run a tiny PPO with overrides as a user does; gives the ended process."""

    def run(*overrides):
        document = ppo_config(tmp_path, name="mine").model_dump(mode="json")
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
        environment = {**os.environ, **prefect.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "prefect_rlhf.flows.cli",
            "run",
            "ppo",
            "--config",
            str(tmp_path / "run.yaml"),
        ]
        return subprocess.run([*command, *overrides], env=environment, capture_output=True, text=True)

    return run


def assert_refused(ended, words):
    """Exit status 2 and one sentence."""
    assert ended.returncode == 2, ended.stdout + ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert words in lines[0]
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.mark.whole
def test_too_few_workers_are_counted_before_training(run, commanded, tmp_path):
    ended = run(f"cluster.address={commanded}", "cluster.devices_per_host=2", "patience=0.05")
    assert_refused(
        ended,
        f"the plan needs 2 ranks; the cluster at {commanded} offers 1 (workers with a GPU or slot resource)",
    )
    assert "Start 2 more" in ended.stderr  # the one that is there does not fill a host of two
    assert "waited for 9 s; raise patience to wait longer" in ended.stderr
    assert not list((tmp_path / "runs").iterdir())


def test_a_cluster_that_is_not_there_is_named_and_the_runs_name_stays_free(run, tmp_path):
    ended = run("cluster.address=tcp://127.0.0.1:1", "patience=0.05")
    assert_refused(ended, "no Dask scheduler answers at cluster.address=tcp://127.0.0.1:1")
    assert not list((tmp_path / "runs").iterdir())
