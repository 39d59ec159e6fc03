"""What plans keep in hosts' memory and on disk, against the sizes of the models, and plans that do not fit it."""

from functools import partial
from pathlib import Path

import pytest

import deployments
from flows.run.planning import hardware_of, problem_of, shapes_of
from flows.run.run_folder import disk_need
from planner.plan.build import build_plan
from planner.plan.mesh import Cluster
from planner.pricing.devices import preset
from planner.pricing.plans import plan_memory, price_plan, shortfall
from planner.pricing.storage import kept_on_hosts, loaded_bytes, saved_bytes
from planner.search.baselines import heuristic_plan
from rlhf_tasks.algorithms.configurations import load_config
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.spec import CallAssignment

SEVEN_B = 6.74e9  # parameters of Llama-2 7B
FROZEN = ("ref_inference", "reward_inference")


@pytest.fixture
def plan_of(make_graph, assign):
    """plan_of(cluster, devices, dp, tp, offload, calls): all calls on some devices; some of them offloaded or not."""

    def make(cluster, devices, dp, tp, offload, calls=FROZEN):
        graph, where = make_graph(), partial(assign, devices, dp, tp)
        given = {call.name: where(offload=offload and call.name in calls) for call in graph.calls}
        return build_plan(graph, given, cluster)

    return make


def test_a_host_keeps_what_its_devices_offload_and_copies_for_commits(plan_of, ppo_cost):
    cluster = Cluster(2, 8)
    model = ppo_cost(cluster)
    away = kept_on_hosts(plan_of(cluster, range(16), 2, 8, True), model)
    assert set(away) == {0, 1}, "half of the devices are on each host"
    for parts in away.values():
        assert parts["ref: offloaded parameters"] == pytest.approx(2 * SEVEN_B, rel=0.03), "of one replica"
        assert parts["actor: copies for commits"] == pytest.approx(2 * 12 * SEVEN_B / 2, rel=0.03), (
            "two snapshots may be waiting, and a host has half of the state"
        )
    resident = kept_on_hosts(plan_of(cluster, range(16), 2, 8, False), model)
    assert set(resident[0]) == {"actor: copies for commits", "critic: copies for commits"}


def test_where_the_devices_memory_is_the_hosts_it_counts_once_and_on_the_device(plan_of, ppo_cost):
    cluster = Cluster(1, 4)
    on_host = ppo_cost(cluster, device=preset("cpu-slot"))
    beside = ppo_cost(cluster, device=preset("cpu-slot").model_copy(update={"host_memory_bytes": 4 * 10**9}))
    plan = plan_of(cluster, range(4), 1, 4, True)
    found, other = plan_memory(plan, on_host), plan_memory(plan, beside)
    assert found.hosts == {}
    for device, peak in found.peaks.items():
        assert peak.parts["ref: offloaded parameters"] == pytest.approx(2 * SEVEN_B / 4, rel=0.03)
        assert "ref: offloaded parameters" not in other.peaks[device].parts
    assert "ref: offloaded parameters" in other.hosts[0]


def test_a_plan_that_its_hosts_have_no_memory_for_is_refused_in_one_sentence(plan_of, ppo_cost):
    cluster = Cluster(1, 8)

    def told(share, offload=True):
        device = preset("h200-sxm").model_copy(update={"host_memory_bytes": share})
        model = ppo_cost(cluster, device=device)
        price = price_plan(plan_of(cluster, range(8), 8, 1, offload), model)
        return shortfall(price, model), sum(price.hosts.get(0, {}).values())

    sentence, needed = told(10**9)
    assert sentence.startswith(
        f"Host 0 (h200-sxm) lacks {needed - 8e9:.0f} bytes of its own memory: the plan keeps {needed:.0f} there, and "
        "it has 8000000000 (its devices' host_memory_bytes). Most of it, "
    )
    assert sentence.endswith("copies for commits. A larger dp on more hosts would lower it.")
    assert told(None)[0] is None, "nobody knows the host's memory"
    assert told(int(needed / 8) + 1)[0] is None
    assert "lacks" in told(int(needed / 8) - 1)[0]
    assert told(int(needed / 8) - 1, offload=False)[0] is None


@pytest.mark.parametrize(("dp", "tp"), [(1, 8), (2, 4)])
def test_an_offloaded_train_step_leaves_two_chunks_of_state_on_the_device_and_takes_the_way_there_and_back(
    plan_of, ppo_cost, dp, tp
):
    """The peak is in the step, with the parameters on the device."""
    cluster = Cluster(1, 8)
    model = ppo_cost(cluster)
    resident, away = (
        price_plan(plan_of(cluster, range(8), dp, tp, offload, ("actor_train",)), model)
        for offload in (False, True)
    )
    saved = resident.peaks[0].total_bytes - away.peaks[0].total_bytes
    state = 12 * SEVEN_B / 8
    assert saved == pytest.approx(state - 2 * 12 * 2**22, rel=0.02)
    assert away.hosts[0]["actor: offloaded optimizer"] == pytest.approx(12 * SEVEN_B, rel=0.02)
    parameters = 2 * SEVEN_B / tp  # of each device
    assert away.hosts[0]["actor: offloaded parameters"] == pytest.approx(8 * parameters, rel=0.03)
    assert not any(part.startswith("actor: offloaded") for part in resident.hosts[0])
    longer_s = away.duration_s["actor_train"] - resident.duration_s["actor_train"]
    steps, bytes_per_s = 2, preset("a100-80g-sxm").host_copy_bytes_per_s
    assert longer_s == pytest.approx(steps * 2 * state / bytes_per_s, rel=0.02)
    comes, goes = "onload_actor_to_actor_train", "offload_actor_of_actor_train"
    copied_s = away.copy_s[comes]
    assert copied_s == pytest.approx(parameters / bytes_per_s, rel=0.03)
    assert away.duration_s[comes] == model.classes.dispatch_s
    assert away.duration_s[goes] == pytest.approx(copied_s + model.classes.dispatch_s)
    others = {name: s for name, s in away.duration_s.items() if name not in ("actor_train", comes, goes)}
    assert others == {name: resident.duration_s[name] for name in others}


EXAMPLES = Path(deployments.__file__).with_name("examples")
FILE_BYTES = 2 * SEVEN_B  # bytes of Llama-2 7B in bfloat16


def problem(name, *overrides):
    config = load_config(EXAMPLES / f"{name}.yaml", overrides)
    return config, problem_of(config, hardware_of(config))


@pytest.mark.parametrize("name", ["plan-ppo-7b-7b", "plan-ppo-34b-7b", "plan-ppo-70b-7b", "plan-grpo-72b"])
def test_the_parts_of_a_snapshot_add_up_to_a_commit(name):
    config, asked = problem(name)
    plan = heuristic_plan(asked.graph, asked.model).plan
    parts = saved_bytes(plan, asked.model)
    total = sum(sum(by_device.values()) for by_device in parts.values())
    need = disk_need(config, shapes_of(config), 1000, 2)
    assert total == pytest.approx(need.commit_bytes, rel=2e-3)
    assert set(parts) == {node.name for node in plan.nodes if node.name.startswith("save_")}
    for node in plan.nodes:
        if node.name in parts:
            assert set(parts[node.name]) == set(node.devices)


def everywhere(asked, n_devices, strategy):
    """A plan with all calls on all devices."""
    assignment = CallAssignment(placement=Placement(tuple(range(n_devices)), strategy))
    return build_plan(asked.graph, {call.name: assignment for call in asked.graph.calls}, asked.cluster)


@pytest.mark.parametrize("strategy", [ParallelStrategy(8), ParallelStrategy(2, 4), ParallelStrategy(1, 2, 4)])
def test_a_host_reads_each_model_once_however_it_is_laid_out(strategy):
    _, asked = problem("plan-ppo-7b-7b")
    read = loaded_bytes(everywhere(asked, 8, strategy), asked.model)
    assert set(read) == set(range(8))
    assert sum(read.values()) == pytest.approx(
        4 * FILE_BYTES, rel=0.03
    )  # rewards and critics have no lm head


def test_each_host_reads_its_own():
    _, asked = problem("plan-ppo-7b-7b", "cluster.n_hosts=2")
    replicated = loaded_bytes(everywhere(asked, 16, ParallelStrategy(16)), asked.model)
    split = loaded_bytes(everywhere(asked, 16, ParallelStrategy(1, 8, 2)), asked.model)
    assert sum(replicated.values()) == pytest.approx(8 * FILE_BYTES, rel=0.03)
    assert sum(split.values()) == pytest.approx(4 * FILE_BYTES, rel=0.03)
