"""A run that has lost devices: which are left, the plan for them, and when it takes others back."""

import asyncio
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from prefect_rlhf.flows.cluster import cluster
from prefect_rlhf.flows.cluster.cluster import DaskCluster, Member, another_rank, slots_of
from prefect_rlhf.flows.run import device_loss, training
from prefect_rlhf.flows.run.device_loss import (
    Part,
    parts_left,
    problem_of_plan,
    refuse_no_shrink,
    smaller_plan,
)
from prefect_rlhf.flows.run.orders import Order, Orders
from prefect_rlhf.flows.run.planning import hardware_of, problem_of
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.replanning import Replanning
from prefect_rlhf.flows.run.summary import planned
from prefect_rlhf.flows.run.training import Attempts, DevicesLost, Restarts, RunFailed, TrainingResult
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.checkpoint.changes import logged_changes
from prefect_rlhf.rlhf_tasks.protocol.messages import GaveUp
from tests.tiny_runs import ppo_config

# --- which devices are left ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "n_hosts", "per_host", "parts"),
    [
        ({1}, 2, 1, [((0,), 1, (0,))]),
        ({0}, 2, 1, [((1,), 1, (1,))]),
        ({2}, 1, 4, [((0,), 3, (0, 1, 3))]),
        ({2, 3}, 2, 2, [((0,), 2, (0, 1))]),
        ({3}, 2, 2, [((0,), 2, (0, 1)), ((0, 1), 1, (0, 2))]),
        ({0, 1, 5}, 3, 2, [((1,), 2, (2, 3)), ((1, 2), 1, (2, 4))]),
        ({0, 3, 5}, 3, 2, [((0, 1, 2), 1, (1, 2, 4))]),
        ({0, 1}, 1, 2, []),
    ],
)
def test_the_devices_that_are_left_are_cut_into_equal_hosts_and_no_part_is_within_another(
    lost, n_hosts, per_host, parts
):
    there = [slot not in lost for slot in range(n_hosts * per_host)]
    assert [tuple(part) for part in parts_left(there, per_host)] == parts


def test_of_fewer_ranks_than_there_should_be_the_last_of_each_host_count_as_lost():
    ranks = [Member(f"r{n}", f"at-{n}", host) for n, host in enumerate("aabcc")]
    names = [rank and rank.name for rank in slots_of(ranks, 3, 2)]
    assert names == ["r0", "r1", "r2", None, "r3", "r4"]
    assert slots_of(ranks[:2], 2, 2)[2:] == [None, None]


# --- the plan for them -----------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    """Makes a configuration whose devices have so many bytes."""

    def make(memory_bytes=8e9, n_devices=4, **changes):
        (tmp_path / "device.yaml").write_text(
            yaml.safe_dump({"like": "cpu-slot", "memory_bytes": int(memory_bytes)})
        )
        planning = {"device": str(tmp_path / "device.yaml"), "prompt_tokens": 12}
        place = {"devices_per_host": n_devices}
        settings = {"planning": planning, "cluster": place, "on_device_loss": "shrink", **changes}
        return ppo_config(tmp_path, **settings)

    return make


@pytest.mark.parametrize("plan", ["heuristic", "auto"])
def test_the_fastest_plan_for_a_part_is_found_in_time(config, plan, monkeypatch):
    monkeypatch.setattr(device_loss, "SEARCH_S", 2.0)
    whole = config(n_devices=2, plan=plan, cluster={"n_hosts": 2, "devices_per_host": 2})
    parts = parts_left([True, True, True, False], 2)
    part, made, _, time_s = smaller_plan(whole, parts)
    assert part in parts
    assert (made.n_devices, made.devices_per_host) == (part.cluster.n_devices, part.per_host)
    times = [smaller_plan(whole, [one]).iteration_time_s for one in parts]
    assert time_s == pytest.approx(min(times), rel=0.05)


def test_devices_keep_their_class_where_another_host_is_lost(config, tmp_path):
    fast = {"like": "cpu-slot", "name": "fast", "flops_per_s": 1e13}
    (tmp_path / "fast.yaml").write_text(yaml.safe_dump(fast))
    planning = {"device": {"cpu-slot": 1, str(tmp_path / "fast.yaml"): 1}, "prompt_tokens": 12}
    mixed = config(planning=planning, cluster={"n_hosts": 2, "devices_per_host": 1})
    (part,) = parts_left([False, True], 1)
    (profile,) = part.of(hardware_of(mixed)).classes.profiles
    assert profile.name == "fast"


def test_a_shrink_below_the_memory_of_the_roles_is_refused_with_role_and_bytes(config):
    """Four devices need 410,000 bytes each for all roles, one needs 1,320,000."""
    small = config(500_000, plan="heuristic")
    assert smaller_plan(small, parts_left([True] * 4, 4)).plan.n_devices == 4
    with pytest.raises(ConfigError) as refused:
        smaller_plan(small, parts_left([True, False, False, False], 4))
    needed = re.search(r"lacks (\d+) bytes: it needs (\d+) during (\w+)", str(refused.value))
    assert needed is not None
    assert 1_300_000 < int(needed[2]) < 1_330_000
    assert "is critic: parameters, gradients, optimizer" in str(refused.value)


def test_a_run_that_could_lose_no_device_is_refused_before_it_starts(config):
    refuse_no_shrink(config())
    with pytest.raises(ConfigError, match="needs at least two devices; the cluster has 1"):
        prepare(config(n_devices=1))
    with pytest.raises(ConfigError, match=r"plan is given by hand\. Choose plan: auto"):
        prepare(config(n_devices=2, plan=dict.fromkeys(calls(), "0-1 d2")))
    with pytest.raises(
        ConfigError, match=r"without one of the 4 devices there is no plan. Device 0 .* lacks"
    ):
        refuse_no_shrink(config(300_000))


def calls():
    return (
        "actor_generate", "reward_inference", "ref_inference", "critic_inference", "actor_train", "critic_train",
    )  # fmt: skip


def test_a_plan_for_fewer_devices_is_priced_on_so_many(config):
    whole = config(n_devices=2)
    _, plan, _, time_s = smaller_plan(whole, parts_left([True, False], 2))
    problem = problem_of(whole, hardware_of(whole))
    assert problem_of_plan(whole, prepare(whole).plan, problem) is problem
    fewer = problem_of_plan(whole, plan, problem)
    assert price_plan(plan, fewer.model).iteration_time_s == pytest.approx(time_s)


# --- the attempts ----------------------------------------------------------------------------------------


class Played:
    """The attempts of a run on two hosts, of which each ends as it is played; `used`: the ranks of each."""

    def __init__(self, config, folder, monkeypatch):
        self.folder, self.told, self.used, self.coming = folder, [], [], []
        self.config, self.orders, self.found = config, Orders(), ["a", "b"]
        prepared = prepare(config)
        expected = {0: planned(prepared.config, prepared.plan, prepared.problem)}
        view = SimpleNamespace(
            starting=lambda: None, plan_changed=lambda plan: None, say=self.told.append, api=None
        )
        self.replanning = Replanning(prepared, folder, expected, self.told.append)
        self.attempts = Attempts(
            prepared, folder, {}, view, self.orders, self.replanning, Restarts(folder, config.max_restarts)
        )
        monkeypatch.setattr(Attempts, "_attempt", lambda attempts, cluster, _: self.attempt(cluster))
        monkeypatch.setattr(training, "cluster_of", lambda *_: nullcontext(self.cluster()))

    def cluster(self):
        ranks = tuple(Member(name, f"at-{name}", name) for name in self.found)
        return DaskCluster("tcp://s:1", ranks, Member("boss", "at-boss", "a"), None)

    async def attempt(self, cluster):
        self.used.append([rank.name for rank in cluster.ranks])
        assert self.replanning.present.plan.n_devices == len(cluster.ranks)
        end = self.coming.pop(0)
        if isinstance(end, DevicesLost):
            raise end
        if end == "back":
            self.attempts._returned = "a"
            return TrainingResult(0, (), Order.RENEW)
        return TrainingResult(9, ())

    def run(self):
        return asyncio.run(self.attempts.run(0))


def lost(*names):
    gone = GaveUp(reason=f"{' '.join(names)}: did not come back within 310 s", committed_step=0, missing=(0,))
    return DevicesLost(gone, frozenset(names), 1)


@pytest.fixture
def played(config, tmp_path, monkeypatch):
    def make(n_hosts=2, **changes):
        place = {"n_hosts": n_hosts, "devices_per_host": 1, "address": "tcp://127.0.0.1:1"}
        folder = tmp_path / "run"
        folder.mkdir()
        return Played(config(cluster=place, **changes), folder, monkeypatch)

    return make


def commit(folder, step):
    (folder / f"step-{step:08}").mkdir()


def test_a_run_continues_with_the_ranks_that_are_left_and_takes_one_back(played):
    run = played()
    commit(run.folder, 3)
    run.coming = [lost("a"), "back", "end"]
    assert run.run() is Order.CONTINUE
    assert run.used == [["a", "b"], ["b"], ["a", "b"]]
    changes = logged_changes(run.folder)
    assert [(change.iteration, change.plan.n_devices) for change in changes] == [(3, 1), (3, 2)]
    assert changes[0].why == "a: did not come back within 310 s: 1 of 2 devices"
    assert changes[1].why == "all devices are back"
    assert run.replanning.plans[1:] == changes


def test_some_of_the_lost_ranks_are_taken_back_before_the_others(played):
    run = played(n_hosts=3)
    run.found = ["a", "b", "c"]
    run.coming = [lost("a", "c"), "back", "back", "end"]
    attempt = run.attempt

    async def found_then(cluster):
        run.found = ["b", "c"] if len(run.used) == 1 else ["a", "b", "c"]
        return await attempt(cluster)

    run.attempt = found_then
    assert run.run() is Order.CONTINUE
    assert run.used == [["a", "b", "c"], ["b"], ["b", "c"], ["a", "b", "c"]]


def test_a_rank_that_comes_back_and_is_lost_again_at_once_is_not_taken_back(played):
    run = played()
    commit(run.folder, 3)
    run.coming = [lost("a"), "back", lost("a"), "back", "end"]
    assert run.run() is Order.CONTINUE
    assert run.used == [["a", "b"], ["b"], ["a", "b"], ["b"], ["b"]]


def test_a_resumed_run_whose_devices_are_still_away_keeps_its_plan(played):
    run = played()
    commit(run.folder, 3)
    run.coming = [lost("b"), "end"]
    run.run()
    assert run.attempts._least() == 1
    run.found, run.coming = ["a"], ["end"]
    run.run()
    assert run.used[-1] == ["a"]
    assert len(logged_changes(run.folder)) == 1


def test_where_the_roles_do_not_fit_what_is_left_the_run_ends_and_says_which_and_how_many_bytes(played):
    run = played()
    commit(run.folder, 3)
    run.coming = [lost("a")]
    device = {"like": "cpu-slot", "memory_bytes": 10**6}
    Path(run.config.planning.device).write_text(yaml.safe_dump(device))  # less than when the run began
    with pytest.raises(RunFailed, match=r"no plan for the devices that are left: Device 0 .* lacks .* bytes"):
        run.run()


@pytest.mark.parametrize("order", ["stop", "wait"])
def test_any_other_order_ends_the_run_at_its_last_commit_with_a_sentence(played, order):
    run = played(on_device_loss=order)
    run.coming = [lost("a")]
    with pytest.raises(RunFailed, match=r"^a: did not come back within 310 s. 0 iterations are committed"):
        run.run()


def test_an_order_to_end_is_carried_out_at_the_last_commit(played):
    run = played()
    commit(run.folder, 3)
    run.coming = [lost("a")]
    run.orders.give(Order.CANCEL, "test")
    assert run.run() is Order.CANCEL
    assert len(run.used) == 1


@pytest.mark.parametrize("order", ["stop", "wait"])
def test_a_shrunk_run_that_is_resumed_with_another_order_has_all_devices_again(played, order):
    run = played()
    commit(run.folder, 3)
    run.coming = [lost("a"), "end"]
    run.run()
    run.attempts._prepared.config.__dict__["on_device_loss"] = order
    run.coming = ["end"]
    assert run.run() is Order.CONTINUE
    assert run.used == [["a", "b"], ["b"], ["a", "b"]]
    assert logged_changes(run.folder)[-1].why == "all devices are back"


@pytest.mark.parametrize("fault", [OSError("no space left"), ConfigError("no figures of the device")])
def test_a_plan_that_cannot_be_logged_or_priced_ends_the_run_with_a_sentence(played, monkeypatch, fault):
    run = played()
    commit(run.folder, 3)
    run.coming = [lost("a"), "back"]

    async def fails(step):
        raise fault

    monkeypatch.setattr(run.replanning, "return_to_all", fails)
    with pytest.raises(RunFailed, match=f"could not be priced or written to the log of plans: {fault}"):
        run.run()


def test_workers_that_fit_in_no_host_of_the_plan_end_no_attempt(config, tmp_path, monkeypatch):
    """Two hosts of two devices. Two workers are on b, and one each on a, c and d: two of these are of no use."""
    folder = tmp_path / "run"
    folder.mkdir()
    place = {"n_hosts": 2, "devices_per_host": 2, "address": "tcp://127.0.0.1:1"}
    run = Played(config(cluster=place, plan="heuristic"), folder, monkeypatch)
    commit(folder, 3)
    names = ("a1", "b1", "b2", "c1", "d1")
    workers = {
        f"at-{name}": {"resources": {"slot": 1}, "host": name[0], "nanny": None, "name": name}
        for name in names
    }
    ranks = tuple(Member(name, f"at-{name}", name[0]) for name in names[:4])  # of which a cluster takes four
    found = DaskCluster("tcp://s:1", ranks, Member("boss", "at-boss", "a"), None)

    async def identity(cluster, address):
        return {"workers": workers}

    monkeypatch.setattr(cluster, "_identity", identity)
    monkeypatch.setattr(cluster, "BACK_EVERY_S", 0.001)

    async def attempts():
        used = await run.attempts._fit_to(found)
        await asyncio.wait_for(run.attempts._watch_for_return(used), 20)
        assert run.attempts._returned == "d1"
        again = await run.attempts._fit_to(found)
        assert again.ranks == used.ranks
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run.attempts._watch_for_return(again), 0.2)

    asyncio.run(attempts())
    assert [change.plan.n_devices for change in logged_changes(folder)] == [2]


# --- a rank that is back ---------------------------------------------------------------------------------


def test_a_rank_is_back_when_it_has_answered_twice(monkeypatch):
    """The scheduler lists a worker for minutes after its host was cut off."""
    monkeypatch.setattr(cluster, "BACK_EVERY_S", 0.0)
    worker = {"resources": {"slot": 1}, "host": "h", "nanny": None}
    workers = {"at-a": {**worker, "name": "a"}, "at-b": {**worker, "name": "b"}}
    answers, asked = [False, True, False, True, True], []

    async def identity(cluster, address):
        asked.append(address)
        if address == "tcp://s:1":
            return {"workers": workers}
        assert address == "at-b", "nobody asks ranks that are known"
        if not answers.pop(0):
            raise OSError("no answer")
        return {}

    monkeypatch.setattr(cluster, "_identity", identity)
    found = DaskCluster("tcp://s:1", (), Member("boss", "at-boss", "a"), None)
    assert asyncio.run(asyncio.wait_for(another_rank(found, {"a"}), 20)) == "b"
    assert answers == []
    assert asked.count("at-b") == 5


def test_a_part_knows_its_cluster():
    assert Part((1, 3), 2, (2, 3, 6, 7)).cluster == Cluster(2, 2)
