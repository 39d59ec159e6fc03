"""PPO on two hosts with a cluster of Dask's commands over TLS: docs/how-to/several-hosts.md, carried out."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, set_seed

from prefect_rlhf.flows.demo import MODEL, write_demo_data, write_model_folder
from prefect_rlhf.rlhf_tasks.checkpoint.changes import CHANGES, logged_changes, plan_digest
from prefect_rlhf.rlhf_tasks.checkpoint.commits import step_folder
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import read_manifest
from tests.committed import assert_same_run, generations_of, metrics_of
from tests.flows.cluster.test_tls import make_certificates
from tests.flows.dask_commands import CONTROLLER, RANK, SAFE, dask_command
from tests.flows.marked_command import MarkedCommand
from tests.flows.test_clock import set_clock, shifted_clock
from tests.flows.test_killed_run import command_of, finish
from tests.flows.two_hosts import INTERFACE, Host, TwoHosts, two_hosts
from tests.tiny_runs import TWO_RANKS, ppo_config

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1800)]
PORT = 8786  # of the scheduler: nobody else listens in its namespace
ITERATIONS = 4
PATIENCE = 1 / 8  # the least deadline of a call is then 15 s
NAMED = (*RANK, "--name", "second-0")
# As docs/how-to/several-hosts.md advises: a worker ends with its connection, and nobody else starts it again.
LOOP = "trap 'kill $!; wait; exit' TERM; while true; do \"$@\" & wait $!; sleep 1; done"
AGAIN = ("bash", "-c", LOOP, "bash")
HOURS = 5 * 3600  # certificates are valid from a day before to a day after

Work = Callable[..., dict[str, Any]]  # (folder, **changes) -> a run's configuration


def tiny(folder: Path, **changes: Any) -> dict[str, Any]:
    """PPO at the smallest size."""
    return ppo_config(folder, **{"total_iterations": ITERATIONS, **changes}).model_dump(mode="json")


def the_demos(folder: Path, **changes: Any) -> dict[str, Any]:
    """The demo's PPO and its task, for fewer iterations, on models of its shape with random weights."""
    if not (folder / "data").exists():
        write_demo_data(folder / "data", 0)
        for name, kind in (("actor", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
            write_model_folder(folder / name)
            set_seed(0)
            kind(LlamaConfig(**MODEL, num_labels=1)).save_pretrained(folder / name)
    demo = yaml.safe_load(Path("deployments/demo/ppo.yaml").read_text())
    own = {
        "models": {"actor": str(folder / "actor"), "reward": str(folder / "reward")},
        "data": {**demo["data"], "train": str(folder / "data" / "prompts.jsonl")},
        "output_dir": str(folder / "runs"),
        "total_iterations": ITERATIONS,
        "snapshot_every": 1,
    }
    return {**demo, **own, **changes}


class Cluster(NamedTuple):
    """Scheduler, controller and rank 0 on the first host, rank 1 on the second; certificates in Dask's variables."""

    hosts: TwoHosts
    folder: Path
    environment: dict[str, str]

    @property
    def address(self) -> str:
        return f"tls://{self.hosts.first.address}:{PORT}"

    def scheduler(self) -> Any:
        host = self.hosts.first
        options = ("--host", host.address, "--port", str(PORT), "--protocol", "tls", "--no-dashboard")
        return dask_command("scheduler", *options, inside=host.inside, **SAFE, **self.environment)

    def worker(self, host: Host, *options: str, again: bool = False, **environment: str) -> Any:
        """A worker on a host. again: it is started again whenever it ends."""
        common = ("--host", host.address, "--no-dashboard", "--memory-limit", "0")
        return dask_command(
            "worker", self.address, *common, "--local-directory", str(self.folder), *options,
            inside=(*host.inside, *AGAIN) if again else host.inside,
            GLOO_SOCKET_IFNAME=INTERFACE, **self.environment, **environment,
        )  # fmt: skip

    def run(self, name: str, work: Work = tiny, **changes: Any) -> MarkedCommand:
        """A run of PPO whose flow is on the first host."""
        place = {"address": self.address, "n_hosts": 2, "devices_per_host": 1}
        return MarkedCommand(
            self.folder / f"{name}.log",
            *self._command(work, name, place, **changes),
            environment=self.environment,
            inside=self.hosts.first.inside,
        )

    def undisturbed(self, work: Work = tiny, **changes: Any) -> Path:
        """The folder of the same run on one host, by a cluster of its own."""
        command = self._command(work, "one-host", {"devices_per_host": 2}, **changes)
        finish(self.folder / "one-host.log", command)
        return self.folder / "runs" / "one-host"

    def _command(self, work: Work, name: str, place: dict[str, Any], **changes: Any) -> list[str]:
        settings = {"plan": TWO_RANKS, **changes}
        return command_of(self.folder, work(self.folder, name=name, cluster=place, **settings))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    files = make_certificates(tmp_path / "certificates")
    tls = "DASK_DISTRIBUTED__COMM__TLS"
    environment = {f"{tls}__CA_FILE": files["ca-file"], "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "true"}
    for who in ("CLIENT", "SCHEDULER", "WORKER"):
        environment |= {f"{tls}__{who}__CERT": files["cert"], f"{tls}__{who}__KEY": files["key"]}
    with two_hosts(tmp_path) as hosts:
        yield Cluster(hosts, tmp_path, environment)


@pytest.mark.parametrize(
    ("work", "off"), [(the_demos, 0), (tiny, HOURS), (tiny, -HOURS)], ids=["demo", "ahead", "behind"]
)
def test_two_hosts_train_to_the_bits_of_one_whatever_their_clocks_say(
    cluster: Cluster, tmp_path: Path, work: Work, off: int
):
    environment, seconds = shifted_clock(tmp_path)
    set_clock(seconds, off)
    first, second = cluster.hosts.first, cluster.hosts.second
    with (
        cluster.scheduler(),
        cluster.worker(first, *CONTROLLER),
        cluster.worker(first, *RANK),
        cluster.worker(second, *RANK, **environment),
        cluster.run("two-hosts", work) as run,
    ):
        assert run.process.wait(900) == 0, run.output
        run.assert_gone()
    assert generations_of(tmp_path / "runs" / "two-hosts") == dict.fromkeys(range(ITERATIONS), (1, 0))
    assert_same_run(tmp_path / "runs" / "two-hosts", cluster.undisturbed(work))


@pytest.mark.parametrize("away_s", [25.0, 60.0], ids=["shorter", "longer"])
def test_a_host_that_was_cut_off_takes_part_again_and_the_bits_are_the_same(cluster: Cluster, away_s: float):
    """Its call misses its deadline, the generation ends, and the next one begins when the host is back.

    Shorter and longer than the 30 s after which Dask gives up a connection without an answer.
    """
    with cut_off(cluster, away_s) as (run, folder):
        assert run.process.wait(900) == 0, run.output
        run.assert_gone()
    assert_began_anew(folder)
    assert_same_run(folder, cluster.undisturbed())


SHRINKS = {"plan": "heuristic", "dtype": "float64", "keep_last": 100, "on_device_loss": "shrink"}
LONG = 60  # iterations, each of at least SLOW_S: the host is back long before the last one
SLOW_S = 2.0


@pytest.mark.parametrize("iterations", [ITERATIONS, LONG], ids=["for good", "and returns"])
def test_a_run_continues_without_a_host_that_is_cut_off_and_takes_it_back(cluster: Cluster, iterations: int):
    first, second = cluster.hosts.first, cluster.hosts.second
    folder, returns = cluster.folder / "runs" / "cut", iterations == LONG
    slow = {"PREFECT_RLHF_FAILPOINT": f"fetch:delay={SLOW_S}"} if returns else {}
    changes = {**SHRINKS, "total_iterations": iterations}
    with (
        cluster.scheduler(),
        cluster.worker(first, *CONTROLLER),
        cluster.worker(first, *RANK, **slow),
        cluster.worker(second, *NAMED, again=True, **slow),
        cluster.run("cut", patience=PATIENCE, **changes) as run,
    ):
        run.wait_until(step_folder(folder, 1).exists)
        cluster.hosts.cut_off_second()
        run.wait_until((folder / CHANGES).exists, 600)
        if returns:
            cluster.hosts.join_second()
        assert run.process.wait(900) == 0, run.output
        run.assert_gone()
    changed = logged_changes(folder)
    assert [change.plan.n_devices for change in changed] == [1, 2][: len(changed)]
    assert len(changed) == 1 + returns
    assert changed[0].why == "rank 1: did not come back within 310 s: 1 of 2 devices"
    assert read_manifest(step_folder(folder, iterations)).plan_sha256 == plan_digest(changed[-1].plan)
    assert_same_learning(folder, cluster.undisturbed(**changes))


def assert_same_learning(folder: Path, undisturbed: Path) -> None:
    """All metrics of all iterations are equal but for rounding, which differs between layouts."""
    ours, theirs = metrics_of(folder), metrics_of(undisturbed)
    assert len(ours) == len(theirs)
    for row, reference in zip(ours, theirs, strict=True):
        assert row == pytest.approx(reference, rel=1e-9, abs=1e-12)


@contextmanager
def cut_off(cluster: Cluster, away_s: float) -> Iterator[tuple[MarkedCommand, Path]]:
    """(run, its folder) after the second host was away for so long."""
    first, second = cluster.hosts.first, cluster.hosts.second
    folder = cluster.folder / "runs" / "cut"
    with (
        cluster.scheduler(),
        cluster.worker(first, *CONTROLLER),
        cluster.worker(first, *RANK),
        cluster.worker(second, *NAMED, again=True),
        cluster.run("cut", patience=PATIENCE) as run,
    ):
        run.wait_until(step_folder(folder, 1).exists)
        cluster.hosts.cut_off_second()
        time.sleep(away_s)
        cluster.hosts.join_second()
        yield run, folder


def assert_began_anew(folder: Path) -> None:
    generations = generations_of(folder)
    assert generations[0] == (1, 0)
    assert generations[ITERATIONS - 1] > (1, 0), "the ranks began anew"
