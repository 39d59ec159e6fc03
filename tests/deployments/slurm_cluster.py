"""A SLURM cluster on this machine: real daemons, each of two nodes in a network namespace of its own."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.flows.two_hosts import TwoHosts, two_hosts

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("first", "second")
CONFIGURATION = """\
ClusterName=rlhf
SlurmctldHost={machine}({hosts.first.address})
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/controller
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
NodeName=first NodeHostname={machine} NodeAddr={hosts.first.address} CPUs=8
NodeName=second NodeHostname={machine} NodeAddr={hosts.second.address} CPUs=8
PartitionName=all Nodes=first,second Default=YES
"""


class SlurmCluster:
    """The commands of SLURM, given on the first node."""

    def __init__(self, hosts: TwoHosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def command(self, *command: str, **environment: str) -> str:
        """What a command prints."""
        return subprocess.run(
            [*self._hosts.first.inside, *command],
            env={**self._environment, **environment},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, CANCELLED, ..."""
        return self.command("squeue", "--noheader", "--states=all", "--jobs", job, "--format=%T")

    def wait_for(self, job: str, *states: str, seconds: float) -> str:
        """The first of these states that a job has."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state} after {seconds:.0f} s"
            time.sleep(0.5)
        return state

    @contextmanager
    def daemons(self) -> Iterator[None]:
        """munged, slurmctld and a slurmd for each node, until the block ends."""
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        text = CONFIGURATION.format(machine=socket.gethostname(), hosts=self._hosts, folder=self._folder)
        (self._folder / "slurm.conf").write_text(text)
        for name in ("controller", *(f"spool-{node}" for node in NODES)):
            (self._folder / name).mkdir()
        munge = [
            f"--{what}={self._folder}/munge.{what}"
            for what in ("socket", "pid-file", "log-file", "seed-file")
        ]
        # Not `ip netns exec`: it mounts another /sys, where slurmd misses the control groups.
        first, second = (["nsenter", f"--net=/run/netns/{host.inside[-1]}"] for host in self._hosts[:2])
        with ExitStack() as running:
            for number, command in enumerate((
                ["munged", "--foreground", "--force", f"--key-file={key}", *munge],
                [*first, "slurmctld", "-D"],
                [*first, "slurmd", "-D", "-N", NODES[0]],
                [*second, "slurmd", "-D", "-N", NODES[1]],
            )):  # fmt: skip
                running.enter_context(self._daemon(command, self._folder / f"daemon-{number}.log"))
            deadline = time.monotonic() + 60
            while self.command("sinfo", "--noheader", "--format=%T") != "idle":
                assert time.monotonic() < deadline, self.command("scontrol", "show", "nodes")
                time.sleep(0.5)
            yield

    @contextmanager
    def _daemon(self, command: list[str], log: Path) -> Iterator[None]:
        with log.open("w") as out:
            daemon = subprocess.Popen(command, env=self._environment, stdout=out, stderr=out)
        try:
            yield
        finally:
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Two idle nodes; skip the test where SLURM is not installed or may not run."""
    search = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in DAEMONS if shutil.which(name, path=search) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and Debian's packages slurmctld, slurmd and munge: {missing} are missing")
    with two_hosts(folder) as hosts:
        cluster = SlurmCluster(hosts, folder)
        with cluster.daemons():
            yield cluster
