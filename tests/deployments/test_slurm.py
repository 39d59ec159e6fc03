"""Runs on SLURM: real daemons, two nodes in network namespaces, deployments/clusters/slurm.sh as it is."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest

from prefect_rlhf.rlhf_tasks.checkpoint.commits import step_folder
from tests.committed import assert_same_run, last_step
from tests.deployments.slurm_cluster import SlurmCluster, slurm_cluster
from tests.flows.cluster.test_tls import make_certificates
from tests.flows.marked_command import ROOT, marked
from tests.flows.test_killed_run import command_of, finish
from tests.flows.two_hosts import INTERFACE
from tests.tiny_runs import TWO_RANKS, ppo_config

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1800)]
ITERATIONS = 10
SCRIPT = ROOT / "deployments" / "clusters" / "slurm.sh"
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=2")
ENVIRONMENT = """\
export DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION=true
export DASK_DISTRIBUTED__COMM__TLS__CA_FILE={files[ca-file]}
for who in CLIENT SCHEDULER WORKER; do
  export DASK_DISTRIBUTED__COMM__TLS__${{who}}__CERT={files[cert]}
  export DASK_DISTRIBUTED__COMM__TLS__${{who}}__KEY={files[key]}
done
export DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=0
export DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL="10 minutes"
export GLOO_SOCKET_IFNAME={interface} OMP_NUM_THREADS=1 RLHF_OFFERS=slot=1
export PATH="{root}/.venv/bin:$PATH" MARK={mark} PREFECT_HOME={folder}/prefect
"""


class Jobs(NamedTuple):
    """Jobs of our script, whose processes have a mark."""

    slurm: SlurmCluster
    folder: Path
    mark: str

    def submit(self, *arguments: str) -> str:
        """The number of a job that runs `prefect-rlhf run ARGUMENTS`."""
        log = f"--output={self.folder}/job-%j.log"
        environment = {"RLHF_ENVIRONMENT": str(self.folder / "environment.sh")}
        return self.slurm.command(
            "sbatch", "--parsable", *TWO_NODES, log, str(SCRIPT), *arguments, **environment
        )

    def log(self, job: str) -> str:
        """What a job has printed."""
        return (self.folder / f"job-{job}.log").read_text()

    def wait_for_commit(self, job: str, folder: Path, step: int) -> None:
        """Until a run has committed a step."""
        deadline = time.monotonic() + 400
        while not step_folder(folder, step).exists():
            assert self.slurm.state(job) in ("PENDING", "RUNNING"), self.log(job)
            assert time.monotonic() < deadline, self.log(job)
            time.sleep(0.1)

    def assert_gone(self) -> None:
        """Neither a process on the nodes nor one that SLURM does not know is left."""
        deadline = time.monotonic() + 30
        while left := marked(self.mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    files, mark = make_certificates(tmp_path / "certificates"), uuid4().hex
    (tmp_path / "environment.sh").write_text(
        ENVIRONMENT.format(files=files, root=ROOT, folder=tmp_path, mark=mark, interface=INTERFACE)
    )
    with slurm_cluster(tmp_path) as slurm:
        yield Jobs(slurm, tmp_path, mark)


def test_a_job_that_is_cancelled_and_one_that_is_asked_to_end_are_continued_to_the_bits_of_one_host(
    jobs: Jobs, tmp_path: Path
):
    """`scancel` ends all at once: what was committed is there. SIGTERM to the script, which SLURM sends before the
    time is over, ends the run at its next commit."""

    def command(name: str) -> list[str]:  # on one host, unless the command says more
        place = {"devices_per_host": 2}
        config = ppo_config(tmp_path, name=name, plan=TWO_RANKS, cluster=place, total_iterations=ITERATIONS)
        return command_of(tmp_path, config.model_dump(mode="json"))

    folder = tmp_path / "runs" / "slurm"
    cancelled = jobs.submit(*command("slurm")[1:])
    jobs.wait_for_commit(cancelled, folder, 2)
    jobs.slurm.command("scancel", cancelled)
    jobs.slurm.wait_for(cancelled, "CANCELLED", seconds=60)
    jobs.assert_gone()
    assert last_step(folder) < ITERATIONS

    ended = jobs.submit("ppo", "--resume", str(folder))
    jobs.wait_for_commit(ended, folder, last_step(folder) + 1)
    jobs.slurm.command("scancel", "--batch", "--signal=TERM", ended)
    jobs.slurm.wait_for(ended, "FAILED", "COMPLETED", seconds=120)
    jobs.assert_gone()
    assert last_step(folder) < ITERATIONS
    assert "stopped. To continue: prefect-rlhf run ppo --resume" in jobs.log(ended)

    last = jobs.submit("ppo", "--resume", str(folder))
    assert jobs.slurm.wait_for(last, "COMPLETED", "FAILED", seconds=400) == "COMPLETED", jobs.log(last)
    jobs.assert_gone()
    finish(tmp_path / "one-host.log", command("one-host"))
    assert_same_run(folder, tmp_path / "runs" / "one-host")
