"""Clusters found by address: ranks and controller among foreign workers; what is refused, by name."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from distributed import Client, rpc
from distributed.comm import CommClosedError
from prefect import flow

from prefect_rlhf.flows.cluster.cluster import (
    SAME_VERSIONS,
    ClusterError,
    Member,
    form_cluster,
    found_cluster,
    local_cluster,
    ranks_and_controllers,
    whole_hosts,
)
from prefect_rlhf.flows.cluster.forks import begin_to_load
from prefect_rlhf.flows.cluster.this_machine import device_here, threads_environment
from prefect_rlhf.flows.run.training import run_training
from prefect_rlhf.rlhf_tasks.protocol.messages import RunSpec
from prefect_rlhf.rlhf_tasks.spec import SaveNode
from prefect_rlhf.rlhf_tasks.system.rank_process import take_stated_threads
from tests.flows.dask_commands import RANK, SAFE, dask_scheduler, dask_worker
from tests.rlhf_tasks.plans import call, on, plan_of
from tests.rlhf_tasks.settings import STARTUP_S, limits


def worker(name, host, **resources):
    return {"name": name, "host": host, "resources": resources, "nanny": f"tcp://{host}:1"}


def test_ranks_are_grouped_by_host_and_numbers_in_names_count_as_numbers():
    workers = {
        "tcp://b:1": worker("rank-0", "b", slot=1),
        "tcp://a:1": worker("rank-10", "a", GPU=1),
        "tcp://a:2": worker("rank-9", "a", GPU=1),
        "tcp://a:3": worker("tcp://a:3", "a", slot=1),
        "tcp://c:1": worker("boss", "c", controller=1),
        "tcp://c:2": worker("other", "c"),
    }
    ranks, controllers = ranks_and_controllers(workers)
    assert [rank.name for rank in ranks] == ["rank-9", "rank-10", "tcp://a:1", "rank-0"]
    assert [controller.name for controller in controllers] == ["boss"]


def test_a_worker_with_several_devices_is_refused():
    with pytest.raises(ClusterError, match=r"worker w offers GPU=4: a rank drives one device"):
        ranks_and_controllers({"tcp://a:1": worker("w", "a", GPU=4)})


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({**SAFE, "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "3"}, "allowed-failures is 3"),
        ({**SAFE, "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "30s"}, "worker-ttl is 30 s"),
    ],
)
def test_an_unsafe_setting_of_a_found_cluster_is_refused_by_name(tmp_path, environment, words):
    with (
        dask_scheduler(tmp_path, **environment) as address,
        pytest.raises(ClusterError, match=words),
        found_cluster(address, 1, folder=tmp_path, deadline_s=STARTUP_S),
    ):
        pass


@pytest.mark.cluster
def test_a_scheduler_that_others_reach_is_refused_even_by_its_loopback_address(tmp_path):
    with dask_scheduler(tmp_path, host=(), **SAFE) as address:
        loopback = f"tcp://127.0.0.1:{address.rsplit(':', 1)[1]}"
        with (
            pytest.raises(
                ClusterError, match=r"listens on tcp://0\.0\.0\.0:\d+ without TLS.*--host 127\.0\.0\.1"
            ),
            found_cluster(loopback, 1, folder=tmp_path, deadline_s=STARTUP_S),
        ):
            pass


@pytest.mark.cluster
def test_a_worker_that_others_reach_is_refused(commanded, tmp_path):
    with (
        dask_worker(commanded, tmp_path, *RANK, "--name", "open"),
        pytest.raises(ClusterError, match=r"worker open listens on tcp://0\.0\.0\.0"),
        found_cluster(commanded, 2, folder=tmp_path, deadline_s=STARTUP_S),
    ):
        pass


def test_the_ranks_of_a_plans_host_share_one():
    ranks = [
        Member(f"{host}{i}", f"tcp://{host}:{i}", host) for host, n in (("a", 3), ("b", 5)) for i in range(n)
    ]
    assert [rank.name for rank in whole_hosts(ranks, 2)] == ["a0", "a1", "b0", "b1", "b2", "b3"]
    assert [rank.name for rank in whole_hosts(ranks, 4)] == ["b0", "b1", "b2", "b3"]
    assert whole_hosts(ranks, 1) == ranks


@pytest.mark.cluster
def test_workers_of_our_own_have_nothing_of_prefects_login(cluster, prefect):
    """Rewards run as the same user, and may read it there."""
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        told = client.run(lambda: [name for name in os.environ if name.startswith("PREFECT_API")])
    assert len(told) == len(cluster.ranks) + 1
    assert not any(told.values())


@pytest.mark.cluster
def test_workers_of_our_own_that_are_not_up_in_time_are_counted_and_ended(tmp_path):
    me = psutil.Process()
    begin_to_load(2)  # the fork server lives as long as this process
    before = set(me.children(recursive=True))
    with (
        pytest.raises(ClusterError, match=r"\d of 3 workers .* came up within 0\.1 s\. Raise patience"),
        local_cluster(2, folder=tmp_path, deadline_s=0.1),
    ):
        pass
    left = {child for child in set(me.children(recursive=True)) - before if not is_tracker(child)}
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive


def is_tracker(process):
    """Multiprocessing's own, which lives as long as this process."""
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False


@pytest.mark.cluster
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tls://127.0.0.1:1", "nonsense://127.0.0.1:1"])
def test_an_address_at_which_no_scheduler_answers_is_named(tmp_path, address):
    with (
        pytest.raises(ClusterError, match=f"no Dask scheduler answers at cluster.address={address}: "),
        found_cluster(address, 2, folder=tmp_path, deadline_s=1),
    ):
        pass


@pytest.mark.cluster
def test_ctrl_c_in_a_terminal_is_not_for_workers(cluster):
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        pids = client.run(os.getpid).values()
    for pid in pids:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert int(status["SigBlk"], 16) & 1 << signal.SIGINT - 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.cluster
def test_no_process_of_our_cluster_keeps_figures_of_itself_for_an_hour(cluster):
    """Scheduler and nannies are in the flow process, so it would be the flow process that grows."""

    def kept(dask_worker=None, dask_scheduler=None):
        return (dask_worker or dask_scheduler).monitor.maxlen

    with Client(cluster.scheduler_address, set_as_default=False) as client:
        lengths = [
            *client.run(kept).values(),
            *client.run(kept, nanny=True).values(),
            client.run_on_scheduler(kept),
        ]
    assert len(lengths) == 2 * (len(cluster.ranks) + 1) + 1
    assert set(lengths) == {10}


@pytest.mark.cluster
def test_no_worker_of_our_cluster_looks_at_its_own_stacks(cluster):
    def looks(dask_worker):
        return "profile" in dask_worker.periodic_callbacks

    with Client(cluster.scheduler_address, set_as_default=False) as client:
        assert set(client.run(looks).values()) == {False}


@pytest.mark.cluster
@pytest.mark.whole
def test_each_rank_sees_exactly_the_gpu_that_the_user_left_for_it(tmp_path):
    def visible():
        return os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("GLOO_SOCKET_IFNAME")

    with (
        local_cluster(2, gpus=("3", "GPU-8932f937"), folder=tmp_path, deadline_s=STARTUP_S) as cluster,
        Client(cluster.scheduler_address, set_as_default=False) as client,
    ):
        told = client.run(visible)
        # What ranks of one host tell each other stays there.
        assert [told[member.address] for member in cluster.ranks] == [("3", "lo"), ("GPU-8932f937", "lo")]
        assert told[cluster.controller.address][0] == ""


@pytest.mark.cluster
def test_ranks_on_cpu_see_no_gpu(cluster):
    def visible():
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    with Client(cluster.scheduler_address, set_as_default=False) as client:
        assert set(client.run(visible).values()) == {""}


@pytest.mark.cluster
def test_a_cluster_without_a_controller_is_refused(tmp_path):
    with (
        dask_scheduler(tmp_path, **SAFE) as address,
        Client(address, set_as_default=False, timeout=300) as client,
        pytest.raises(ClusterError, match="has no controller"),
    ):
        form_cluster(client, 2, deadline_s=0.1)


@pytest.mark.cluster
def test_ranks_that_are_not_there_are_counted(commanded):
    with (
        Client(commanded, set_as_default=False, timeout=300) as client,
        pytest.raises(ClusterError, match=r"needs 2 ranks; the cluster at \S+ offers 1 .*Start 1 more"),
    ):
        form_cluster(client, 2, deadline_s=0.1)


@pytest.mark.cluster
def test_a_cluster_of_dask_commands_serves_and_replaces_a_rank_that_is_killed(commanded, prefect, tmp_path):
    save = SaveNode(name="save_actor", role="actor", placement=on(0), after=("actor_train",))
    plan = plan_of((call("actor_train", "actor", "train_step", on(0)), save), {"actor": on(0)}, 1)
    with found_cluster(commanded, 1, folder=tmp_path, deadline_s=STARTUP_S) as cluster:

        @flow(name="rlhf-fake", persist_result=False)
        async def parent():
            spec = RunSpec(
                run="foreign",
                plan=plan,
                config={"fault": {"kind": "kill", "node": "actor_train", "iteration": 1, "rank": 0}},
                run_folder=str(tmp_path),
                iterations=3,
                limits=limits(),
                executor="tests.rlhf_tasks.fake_rank:make_executor",
                snapshots="tests.rlhf_tasks.fake_rank:make_snapshots",
            )
            return await run_training(spec, cluster)

        result = asyncio.run(parent())
    assert result.committed_step == 3
    assert len(result.faults) == 1


CLUSTER = """
import sys, time
from pathlib import Path
from prefect_rlhf.flows.cluster.cluster import local_cluster

if __name__ == "__main__":
    with local_cluster(1, folder=Path(sys.argv[1]), deadline_s=400.0) as cluster:
        from distributed import Client, rpc
        with Client(cluster.scheduler_address, set_as_default=False, security=cluster.security) as client:
            pids = client.run(lambda dask_worker: __import__("os").getpid())
        print(*pids.values(), flush=True)
        time.sleep(600)
"""


def test_ranks_share_the_cores_and_a_users_number_of_threads_counts_instead():
    cores = len(os.sched_getaffinity(0))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    alone, crowded = threads_environment(1, {}), threads_environment(cores + 1, {})
    assert [alone[name] for name in names] == [str(cores)] * 3
    assert [crowded[name] for name in names] == ["1"] * 3
    assert alone["OMP_WAIT_POLICY"] == "PASSIVE"
    users = threads_environment(1, {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"})
    assert [users[name] for name in names] == ["3"] * 3
    assert users["OMP_WAIT_POLICY"] == "ACTIVE"


def threads():
    import torch

    assert "MALLOC_TRIM_THRESHOLD_" not in os.environ
    take_stated_threads()
    return torch.get_num_threads()


@pytest.mark.slow
@pytest.mark.cluster
def test_a_worker_of_our_cluster_whose_nanny_has_ended_gets_another(tmp_path, monkeypatch):
    """So does a nanny whose next worker fails while it starts. Either has all cores and malloc as it is."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    with (
        local_cluster(1, folder=tmp_path, deadline_s=STARTUP_S) as cluster,
        Client(cluster.scheduler_address, set_as_default=False) as client,
    ):
        first = cluster.ranks[0].address
        assert client.run(threads, workers=[first])[first] == cores
        nanny = client.scheduler_info()["workers"][first]["nanny"]
        client.sync(end_nanny, nanny, cluster.connection_args)
        deadline = time.monotonic() + STARTUP_S
        while True:
            workers = client.scheduler_info()["workers"]
            (address,) = [at for at, worker in workers.items() if worker["name"] == "rank-0"] or [None]
            if address not in (None, cluster.ranks[0].address):
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert client.run(threads, workers=[address])[address] == cores
        assert form_cluster(client, 1, deadline_s=STARTUP_S).ranks[0].address == address


async def end_nanny(address, connection_args):
    async with rpc(address, connection_args=connection_args) as nanny:
        with suppress(CommClosedError):  # it ends before it answers
            await nanny.terminate(reason="test")


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.whole
def test_stopped_workers_of_our_cluster_die_with_the_process_that_started_them(tmp_path):
    """Dask's own watch over its parent needs a worker that runs."""
    (tmp_path / "start.py").write_text(CLUSTER)
    root = str(Path(__file__).parents[3])
    starter = subprocess.Popen(
        [sys.executable, str(tmp_path / "start.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        assert starter.stdout is not None
        try:
            pids = [int(pid) for pid in starter.stdout.readline().split()]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        finally:
            starter.kill()
    assert len(pids) == 2
    try:
        deadline = time.monotonic() + 30
        while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(psutil.pid_exists, pids))
    finally:
        for pid in filter(psutil.pid_exists, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.cluster
@pytest.mark.whole
def test_a_run_folder_that_a_worker_does_not_see_is_refused(cluster, tmp_path, monkeypatch):
    """A path that means another folder in each process stands for a folder that hosts do not share."""
    monkeypatch.chdir(tmp_path)
    private = Path("/proc/self/cwd")
    message = r"worker \S+ on host 127\.0\.0\.1 does not see the run folder /proc/self/cwd"
    with (
        pytest.raises(ClusterError, match=message),
        found_cluster(cluster.scheduler_address, 2, folder=private, deadline_s=STARTUP_S),
    ):
        pass
    with found_cluster(cluster.scheduler_address, 2, folder=tmp_path, deadline_s=STARTUP_S):
        pass
    assert not list(tmp_path.iterdir()), "the token file is left"


@pytest.mark.cluster
@pytest.mark.whole
@pytest.mark.parametrize("package", SAME_VERSIONS)
def test_workers_of_other_versions_are_refused(cluster, tmp_path, monkeypatch, package):
    """Only this process sees the patched version; the workers look up their own."""
    there = re.escape(version(package))
    monkeypatch.setattr(
        "prefect_rlhf.flows.cluster.cluster.version",
        lambda name: "0.0.1" if name == package else version(name),
    )
    message = rf"worker tls://\S+ has {package} {there}; this process has 0\.0\.1"
    with (
        pytest.raises(ClusterError, match=message),
        found_cluster(cluster.scheduler_address, 2, folder=tmp_path, deadline_s=STARTUP_S),
    ):
        pass


@pytest.mark.cluster
@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "needs", "message"),
    [
        (
            "another",
            {},
            r"worker rank-0 on host \S+ has a {here}, but the plan was made for another, .*=\1\.",
        ),
        (
            "{here}",
            {1: 1e15},
            r"worker rank-1 on host \S+ has (\d+) bytes .* needs 1000000000000000 there.*: \1\}",
        ),
    ],
    ids=["kind", "memory"],
)
def test_other_devices_than_a_plan_was_made_for_are_refused(cluster, tmp_path, kind, needs, message):
    here = device_here(4)
    assumed = here.model_copy(update={"name": kind.replace("{here}", here.name)})
    how = {"folder": tmp_path, "deadline_s": STARTUP_S, "devices_per_host": 4, "needs": needs}
    with (
        pytest.raises(ClusterError, match=message.replace("{here}", f"({here.name})")),
        found_cluster(cluster.scheduler_address, 4, assumed=assumed, **how),
    ):
        pass


@pytest.mark.cluster
@pytest.mark.whole
def test_the_same_devices_with_memory_enough_are_not_refused(cluster, tmp_path):
    how = {
        "folder": tmp_path,
        "deadline_s": STARTUP_S,
        "devices_per_host": 4,
        "assumed": device_here(4),
        "needs": {0: 1.0},
    }
    with found_cluster(cluster.scheduler_address, 4, **how) as found:
        assert len(found.ranks) == 4
