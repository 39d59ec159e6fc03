"""What plans cost: seconds, memory of devices and of hosts, bytes on disk."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from prefect_rlhf import deployments
from prefect_rlhf.flows.run.planning import hardware_of, problem_of, shapes_of
from prefect_rlhf.flows.run.run_folder import disk_need
from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import EvaluationWork, Lengths, key_bytes
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.device_classes import DeviceClasses
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.options import call_options
from prefect_rlhf.planner.pricing.plans import (
    kept_on_hosts,
    loaded_bytes,
    plan_memory,
    price_plan,
    saved_bytes,
    shortfall,
)
from prefect_rlhf.planner.search.baselines import heuristic_plan, symmetric
from prefect_rlhf.rlhf_tasks.algorithms.configurations import load_config
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import parameters, trained_parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import reallocation_bound
from prefect_rlhf.rlhf_tasks.spec import CallAssignment, ReallocateNode, TransferNode
from tests.planner.ahead import SAMPLE_AND_LEARN, problem_ahead_by
from tests.planner.replay import replay


@pytest.fixture
def tiny_cost(ppo_cost, tiny):
    return ppo_cost(Cluster(1, 4), tiny, preset("cpu-slot"), itemsize=4, prompt_tokens=40)


def test_every_node_has_a_price_and_the_replay_agrees(demo_plan, tiny_cost):
    price = price_plan(demo_plan, tiny_cost)
    assert price.duration_s.keys() == {node.name for node in demo_plan.nodes}
    assert min(price.duration_s.values()) >= tiny_cost.classes.profiles[0].dispatch_s
    ends = {e.iteration: e.end_s for e in replay(demo_plan, price.duration_s, 42)}
    assert (ends[41] - ends[1]) / 40 == pytest.approx(price.iteration_time_s, rel=0.02)


def test_reallocations_move_the_ownership_bound(demo_plan, tiny_cost):
    """Nearly: embedding and head count as if they were spread over the layers, and so over the stages."""
    for node in demo_plan.nodes:
        if isinstance(node, ReallocateNode):
            model = tiny_cost.models[node.role]
            layouts = [Layout(model.shape, model.head, p) for p in (node.source, node.destination)]
            moved = price_plan(demo_plan, tiny_cost).moved_bytes[node.name]
            assert moved == pytest.approx(reallocation_bound(*layouts, 4), rel=0.05)


def test_a_reallocation_takes_its_messages_and_its_overhead_per_layer(demo_plan, tiny_cost):
    """Without overhead it takes so much less."""
    device = tiny_cost.classes.profiles[0]
    assert device.reallocation_overhead_s > 0
    free = DeviceClasses.alike(tiny_cost.cluster, device.model_copy(update={"reallocation_overhead_s": 0.0}))
    without = CostModel(tiny_cost.cluster, free, tiny_cost.models, tiny_cost.workload)
    for node in demo_plan.nodes:
        if isinstance(node, ReallocateNode):
            seconds, sent_s = (
                price_plan(demo_plan, model).duration_s[node.name] for model in (tiny_cost, without)
            )
            overhead_s = tiny_cost.models[node.role].shape.layers * device.reallocation_overhead_s
            assert seconds == pytest.approx(sent_s + overhead_s)
            assert sent_s >= device.dispatch_s


def test_redistribution_by_hand(demo_plan, tiny_cost):
    """Device 0 holds all 256 samples; the training's dp rank 1, on device 1, lacks half of them."""
    node = demo_plan.node("transfer_actor_generate_to_actor_train")
    assert isinstance(node, TransferNode)
    assert set(node.keys) == {"input_ids", "response_mask", "old_logprobs"}
    price = price_plan(demo_plan, tiny_cost)
    expected = 128 * (40 + 128) * (8 + 1 + 4)
    assert price.moved_bytes[node.name] == expected
    device = tiny_cost.classes.profiles[0]
    assert device.transfer_overhead_s > 0
    link, overhead_s = device.inside_host, 256 * 3 * device.transfer_overhead_s
    seconds = device.dispatch_s + overhead_s + link.latency_s + expected / (0.8 * link.bytes_per_s)
    assert price.duration_s[node.name] == pytest.approx(seconds)


def test_equal_strategies_on_different_devices_still_cost_a_reallocation(make_graph, assign, ppo_cost):
    graph, cluster = make_graph(), Cluster(1, 4)
    places = dict.fromkeys((c.name for c in graph.calls), assign([0, 1], tp=2))
    places["actor_generate"] = assign([2, 3], tp=2)
    price = price_plan(build_plan(graph, places, cluster), ppo_cost(cluster))
    assert price.moved_bytes["reallocate_actor_to_actor_generate"] > 13e9
    assert price.duration_s["reallocate_actor_to_actor_generate"] > 6.6e9 / 300e9


def test_a_placement_by_hand_in_another_order_moves_the_whole_model(make_graph, assign, ppo_cost):
    """Each rank of the reversed mesh needs another slice than the one that it has."""
    graph, cluster = make_graph(), Cluster(1, 4)
    places = dict.fromkeys((c.name for c in graph.calls), assign([0, 1, 2, 3], tp=4))
    places["actor_generate"] = assign([3, 2, 1, 0], tp=4)
    price = price_plan(build_plan(graph, places, cluster), ppo_cost(cluster))
    assert price.moved_bytes["reallocate_actor_to_actor_generate"] > 13e9


def test_memory_of_a_symmetric_plan(make_graph, ppo_cost):
    """Two trained and two frozen 7B models on every device, and the largest call's temporary memory."""
    graph, cluster = make_graph(n_seqs=512, mini_batches=4), Cluster(1, 8)
    model = ppo_cost(cluster)
    plan = build_plan(graph, symmetric(graph, cluster), cluster)
    peak = plan_memory(plan, model).peaks[3]
    calls = [node for node in plan.nodes if node.kind == "call"]
    largest = max(calls, key=lambda node: model.call(node.call, node.assignment).active_bytes[0])
    assert peak.node == largest.name == "actor_generate"
    assert sum("optimizer" in part for part in peak.parts) == 2
    assert sum("frozen" in part for part in peak.parts) == 2
    held = plan_memory(plan, model).call_bytes
    assert max(held.values()) == held[peak.node] == peak.total_bytes
    resident = peak.total_bytes - peak.parts["actor_generate: KV cache"]
    for node in calls:
        active = max(model.call(node.call, node.assignment).active_bytes)
        assert held[node.name] == pytest.approx(resident + active)
    assert peak.total_bytes == pytest.approx(2 * (6.67e9 * 4 + 1.62e9) + 2 * 13.3e9 + 9.67e9, rel=0.02)


def test_a_copy_counts_until_its_release(make_graph, assign, ppo_cost):
    graph, cluster = make_graph(), Cluster(1, 4)
    places = dict.fromkeys((c.name for c in graph.calls), assign([0, 1], tp=2))
    places["actor_generate"] = assign([2, 3], tp=2)
    peaks = plan_memory(build_plan(graph, places, cluster), ppo_cost(cluster)).peaks
    assert peaks[2].node == "actor_generate"
    assert set(peaks[2].parts) == {"actor: copy", "actor_generate: KV cache"}
    assert not any("copy" in part for part in peaks[0].parts)


def test_batches_that_are_drawn_ahead_lie_where_they_are_drawn(small_problem, assign):
    for staleness in (0, 2):
        asked = problem_ahead_by(staleness, small_problem(Cluster(1, 2), SAMPLE_AND_LEARN, 1))
        places = {call.name: assign([int(call.name != "actor_generate")]) for call in asked.graph.calls}
        peaks = plan_memory(build_plan(asked.graph, places, Cluster(1, 2)), asked.model).peaks
        call, part = asked.graph.call("actor_generate"), "actor_generate: samples drawn ahead"
        wanted = 2 * 4 * sum(key_bytes(key, asked.model.workload) for key in {*call.inputs, *call.outputs})
        assert peaks[0].parts.get(part) == (wanted if staleness else None)
        assert part not in peaks[1].parts
        option = next(o for o, _ in call_options(asked, call) if o.size == 1)
        assert option.resident == ((wanted,) if staleness else (0.0,))


def test_the_last_iteration_in_segments_may_take_as_long_as_whole_responses(make_graph, assign, ppo_cost):
    graph, cluster = make_graph(n_seqs=64), Cluster(1, 1)
    calls = [
        call.model_copy(update={"segment_tokens": 16}) if call.kind == "generate" else call
        for call in graph.calls
    ]
    tail = Lengths(points=((16, 0.9), (1600, 0.1)))
    prices = []
    for each in (graph, DataflowGraph(calls, graph.dataset_keys, name="segments")):
        places = dict.fromkeys((call.name for call in each.calls), assign([0]))
        prices.append(price_plan(build_plan(each, places, cluster), ppo_cost(cluster, new_tokens=tail)))
    whole, segments = prices
    drawn_s = segments.longest_s["actor_generate"]
    assert drawn_s == whole.duration_s["actor_generate"] > 1.5 * segments.due_s["actor_generate"]
    assert whole.longest_s == whole.due_s
    assert {**segments.longest_s, "actor_generate": 0.0} == {**segments.due_s, "actor_generate": 0.0}


def offloaded_plan(make_graph, assign, offload: bool):
    """Everything on two devices, ref's parameters in host memory between their uses or not."""
    graph = make_graph()
    places = dict.fromkeys((c.name for c in graph.calls), assign([0, 1], tp=2))
    places["ref_inference"] = assign([0, 1], tp=2, offload=offload)
    calls = [call.name for call in graph.calls]
    order = [calls[0], "critic_inference", "reward_inference", "ref_inference", *calls[4:]]
    return build_plan(graph, places, Cluster(1, 2), call_order=order)


def test_an_onload_costs_its_dispatch_and_starts_a_copy(make_graph, assign, ppo_cost):
    model, plan = ppo_cost(Cluster(1, 2)), offloaded_plan(make_graph, assign, True)
    price = price_plan(plan, model)
    dispatch_s = model.classes.dispatch_s
    assert price.duration_s["onload_ref_to_ref_inference"] == dispatch_s
    assert price.duration_s["offload_ref_of_ref_inference"] == dispatch_s
    bytes_on_a_device = 13.48e9 / 2  # of Llama-2 7B in bf16
    assert price.copy_s["onload_ref_to_ref_inference"] == pytest.approx(bytes_on_a_device / 25e9, rel=0.01)
    # Two calls run meanwhile: only the dispatches are left of it
    resident = price_plan(offloaded_plan(make_graph, assign, False), model)
    assert price.iteration_time_s == pytest.approx(resident.iteration_time_s + 2 * dispatch_s)


def test_a_slow_host_link_shows(make_graph, assign, ppo_cost):
    slow = preset("a100-80g-sxm").model_copy(update={"host_copy_bytes_per_s": 1e8})
    model, plan = ppo_cost(Cluster(1, 2), device=slow), offloaded_plan(make_graph, assign, True)
    price = price_plan(plan, model)
    assert price.copy_s["onload_ref_to_ref_inference"] > 60
    waits = price.steady.start_s["ref_inference"] - price.steady.start_s["onload_ref_to_ref_inference"]
    assert waits == pytest.approx(price.copy_s["onload_ref_to_ref_inference"] + model.classes.dispatch_s)
    ends = {e.iteration: e.end_s for e in replay(plan, price.duration_s, 12, price.copy_s)}
    assert (ends[11] - ends[1]) / 10 == pytest.approx(price.iteration_time_s, rel=1e-9)


def test_offloaded_parameters_count_from_onload_to_offload(make_graph, assign, ppo_cost):
    """At the peak, in generation of long responses, they are away."""
    model = ppo_cost(Cluster(1, 2), new_tokens=Lengths.fixed(1024), micro_batch_tokens=8192)
    resident = plan_memory(offloaded_plan(make_graph, assign, False), model).peaks[0]
    offloaded = plan_memory(offloaded_plan(make_graph, assign, True), model).peaks[0]
    assert resident.node == offloaded.node == "actor_generate"
    saved = max(
        model.parameter_bytes("ref", offloaded_plan(make_graph, assign, True).roles["ref"].placements[0])
    )
    assert offloaded.total_bytes == pytest.approx(resident.total_bytes - saved)
    alone = {c.name: assign([0]) for c in make_graph().calls}
    alone["ref_inference"] = assign([1], offload=True)
    peak = plan_memory(build_plan(make_graph(), alone, Cluster(1, 2)), model).peaks[1]
    assert peak.node == "ref_inference"
    assert set(peak.parts) == {"ref: onloaded parameters", "ref_inference: activations"}


IDLE_CRITIC = [
    "actor_generate",
    "ref_inference",
    "reward_inference",
    "critic_inference",
    "critic_train",
    "actor_train",
]


def test_a_critic_is_away_while_it_is_idle_and_its_copies_take_their_time(make_graph, assign, ppo_cost):
    """From generation, where the peak is, all but gradients and two chunks of the state. Replay and price agree."""
    model = ppo_cost(Cluster(1, 4), new_tokens=Lengths.fixed(1024), micro_batch_tokens=8192)
    graph = make_graph()

    def plan(offload: bool, elsewhere: bool):
        places = {
            c.name: assign([0, 1], tp=2, offload=offload and c.name == "critic_train") for c in graph.calls
        }
        if elsewhere:  # a copy is made of what the onload brings
            places["critic_inference"] = assign([2, 3], dp=2)
        return build_plan(graph, places, Cluster(1, 4), call_order=IDLE_CRITIC)

    for elsewhere in (False, True):
        resident, away = (price_plan(plan(offload, elsewhere), model) for offload in (False, True))
        assert resident.peaks[0].node == away.peaks[0].node == "actor_generate"
        assert away.peaks[0].parts["critic: gradients"] > 0
        assert not any("critic" in part and "parameters" in part for part in away.peaks[0].parts)
        count = model.parameter_bytes("critic", plan(True, elsewhere).node("critic_train").placement)[0] / 2
        saved = resident.peaks[0].total_bytes - away.peaks[0].total_bytes
        assert saved == pytest.approx((2 + 12) * count - 2 * 12 * 2**22)
        longer_s = away.iteration_time_s - resident.iteration_time_s
        steps_s = away.duration_s["critic_train"] - resident.duration_s["critic_train"]
        back_s = away.duration_s["offload_critic_of_critic_train"]
        assert steps_s + back_s < longer_s < steps_s + back_s + away.copy_s["onload_critic_to_critic_train"]
        made = plan(True, elsewhere)
        ends = {e.iteration: e.end_s for e in replay(made, away.duration_s, 12, away.copy_s)}
        assert (ends[11] - ends[1]) / 10 == pytest.approx(away.iteration_time_s, rel=1e-9)


def test_an_evaluation_before_the_first_iteration_brings_parameters_for_itself(make_graph, assign, ppo_cost):
    made, alone = make_graph(), Cluster(1, 1)
    graph = DataflowGraph(made.calls, made.dataset_keys, evaluated=("critic",), on_start=True)
    evaluation = EvaluationWork(
        every=1, rows=8, rows_at_once=8, answers=1, prompt_tokens=64, new_tokens=64, completion_tokens=0
    )
    model = ppo_cost(alone, evaluation=evaluation)
    resident, away = (
        plan_memory(
            build_plan(
                graph,
                {c.name: assign([0], offload=offload and c.name == "critic_train") for c in graph.calls},
                alone,
                call_order=IDLE_CRITIC,
            ),
            model,
        )
        for offload in (False, True)
    )
    state = 12 * model.parameter_bytes("critic", assign([0]).placement)[0] / 2 - 2 * 12 * 2**22
    first = "evaluate_critic_at_start"
    assert resident.call_bytes[first] - away.call_bytes[first] == pytest.approx(state)


def test_adapters_move_and_train_and_weights_below_them_are_held_once(
    make_graph, assign, ppo_cost, lora, llama
):
    """All calls on one device, but generation on another: there the frozen weights are at all times."""
    graph, cluster = make_graph(), Cluster(1, 2)
    model = ppo_cost(cluster, lora=lora)
    calls = {call.name: assign([0]) for call in graph.calls} | {"actor_generate": assign([1])}
    plan = build_plan(graph, calls, cluster)
    price = price_plan(plan, model)
    adapters = {
        head: sum(spec.size for spec in trained_parameters(llama(), head, lora)) for head in ("lm", "scalar")
    }
    weights_bytes = 2 * sum(spec.size for spec in parameters(llama(), "lm"))
    there = plan_memory(plan, model).peaks[1].parts
    assert there["actor: weights below adapters"] == weights_bytes
    assert there["actor: copy"] == 2 * adapters["lm"]
    assert price.moved_bytes["reallocate_actor_to_actor_generate"] == 2 * adapters["lm"]
    here = plan_memory(plan, model).peaks[0].parts
    shared = {"actor: weights below adapters", "reward: frozen parameters"}  # with ref, with critic
    assert {part for part in here if part.endswith(("below adapters", "frozen parameters"))} == shared
    for role, head in (("actor", "lm"), ("critic", "scalar")):
        assert here[f"{role}: parameters, gradients, optimizer"] == (2 + 4 + 12) * adapters[head]
    whole = price_plan(plan, ppo_cost(cluster))
    assert price.duration_s["save_actor"] < whole.duration_s["save_actor"] / 50


def test_a_reference_elsewhere_or_offloaded_is_a_copy_of_its_own(make_graph, assign, ppo_cost, lora):
    graph, cluster = make_graph(), Cluster(1, 2)
    model, calls = ppo_cost(cluster, lora=lora), {call.name: assign([0]) for call in graph.calls}
    for ref, device in ((assign([1]), 1), (assign([0], offload=True), 0)):
        plan = build_plan(graph, calls | {"ref_inference": ref}, cluster)
        held = plan_memory(plan, model).peaks[device].parts
        assert ("ref: frozen parameters" in held) == (device == 1)
        assert ("actor: weights below adapters" in held) == (device == 0)


def test_shortfall_names_device_bytes_and_fields(make_graph, ppo_cost):
    graph, cluster = make_graph(n_seqs=512, mini_batches=4), Cluster(1, 8)
    model = ppo_cost(cluster)
    plan = build_plan(graph, symmetric(graph, cluster), cluster)
    price = price_plan(plan, model)
    message = shortfall(price, model)
    missing = price.peaks[0].total_bytes - preset("a100-80g-sxm").room_bytes(8)
    assert message is not None
    assert message.startswith(f"Device 0 (a100-80g-sxm) lacks {missing:.0f} bytes")
    assert "ZeRO" in message
    roomy = ppo_cost(cluster, device=preset("a100-80g-sxm").model_copy(update={"memory_bytes": 200 * 10**9}))
    assert shortfall(replace(price), roomy) is None


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
    plan = heuristic_plan(asked).plan
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


def test_sharded_weights_are_read_as_whole_ones():
    _, asked = problem("plan-ppo-7b-7b")
    plan = everywhere(asked, 8, ParallelStrategy(8))
    strategies = {call.name: ParallelStrategy(8) for call in asked.graph.calls}
    for call in asked.graph.calls:
        if call.kind != "generate":
            strategies[call.name] = ParallelStrategy(8, shard="parameters")
    assignments = {
        name: CallAssignment(placement=Placement(tuple(range(8)), s)) for name, s in strategies.items()
    }
    sharded = build_plan(asked.graph, assignments, asked.cluster)
    assert loaded_bytes(sharded, asked.model) == pytest.approx(loaded_bytes(plan, asked.model))


def test_each_host_reads_its_own():
    _, asked = problem("plan-ppo-7b-7b", "cluster.n_hosts=2")
    replicated = loaded_bytes(everywhere(asked, 16, ParallelStrategy(16)), asked.model)
    split = loaded_bytes(everywhere(asked, 16, ParallelStrategy(1, 8, 2)), asked.model)
    assert sum(replicated.values()) == pytest.approx(8 * FILE_BYTES, rel=0.03)
    assert sum(split.values()) == pytest.approx(4 * FILE_BYTES, rel=0.03)
