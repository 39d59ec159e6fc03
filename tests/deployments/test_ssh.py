"""A run on two hosts by SSH: real OpenSSH servers in network namespaces, deployments/clusters/ssh.py as it is."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.committed import assert_same_run
from tests.flows.cluster.test_tls import make_certificates
from tests.flows.marked_command import ROOT
from tests.flows.test_killed_run import command_of, finish
from tests.flows.two_hosts import INTERFACE, Host, TwoHosts, two_hosts
from tests.tiny_runs import TWO_RANKS, ppo_config

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1800)]
SERVER = """\
HostKey {home}/host_key
AuthorizedKeysFile {home}/.ssh/id_ed25519.pub
StrictModes no
PermitRootLogin prohibit-password
PidFile none
UsePAM no
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with a key, and the hosts that it knows."""
    (tmp_path / ".ssh").mkdir()
    for file in ("host_key", ".ssh/id_ed25519"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / file)]
        subprocess.run(command, check=True)
    kind, key, *_ = (tmp_path / "host_key.pub").read_text().split()
    (tmp_path / ".ssh" / "known_hosts").write_text(f"10.77.0.* {kind} {key}\n")
    (tmp_path / "sshd_config").write_text(SERVER.format(home=tmp_path))
    return tmp_path


@pytest.fixture
def hosts(home: Path) -> Iterator[TwoHosts]:
    """Two hosts with a server each."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or os.geteuid() != 0:
        pytest.skip("needs root, and Debian's package openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)
    with two_hosts(home) as both, ExitStack() as running:
        for host in (both.first, both.second):
            server = subprocess.Popen([*host.inside, sshd, "-D", "-e", "-f", str(home / "sshd_config")])
            running.callback(server.wait)
            running.callback(server.terminate)
        yield both


def processes_of(host: Host) -> list[str]:
    """Command lines of the processes in a namespace, without the server that listens."""
    pids = subprocess.run(
        ["ip", "netns", "pids", host.inside[-1]], capture_output=True, text=True, check=True
    )
    lines = []
    for pid in pids.stdout.split():
        try:
            lines.append(Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return [line for line in lines if "[listener]" not in line]


def test_a_run_by_ssh_gives_the_bits_of_one_host_and_leaves_no_process(hosts: TwoHosts, home: Path):
    def command(name: str) -> list[str]:
        place = {"devices_per_host": 2}
        return command_of(
            home, ppo_config(home, name=name, plan=TWO_RANKS, cluster=place).model_dump(mode="json")
        )

    files, tls = make_certificates(home / "certificates"), "DASK_DISTRIBUTED__COMM__TLS"
    environment = {
        "HOME": str(home),
        "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
        "PREFECT_HOME": str(home / "prefect"),
        "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "true",
        f"{tls}__CA_FILE": files["ca-file"],
    }
    for who in ("CLIENT", "SCHEDULER", "WORKER"):
        environment |= {f"{tls}__{who}__CERT": files["cert"], f"{tls}__{who}__KEY": files["key"]}
    script = str(ROOT / "deployments" / "clusters" / "ssh.py")
    here = ("--devices", "1", "--offers", "slot", "--threads", "1", "--interface", INTERFACE)
    ended = subprocess.run(
        [
            *hosts.first.inside,
            sys.executable,
            script,
            *here,
            *(h.address for h in hosts[:2]),
            "--",
            *command("ssh")[1:],
        ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    deadline = time.monotonic() + 60
    while left := [*processes_of(hosts.first), *processes_of(hosts.second)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    finish(home / "one-host.log", command("one-host"))
    assert_same_run(home / "runs" / "ssh", home / "runs" / "one-host")
