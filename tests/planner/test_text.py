"""Tables, names and drawings of plans."""

import pytest

from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.planner.text import (
    Bar,
    DeviceLane,
    algorithm_graph,
    dataflow_mermaid,
    dataflow_table,
    draw_bars,
    format_devices,
    plan_table,
    short_names,
    steady_bars,
)


@pytest.mark.parametrize("algorithm", ["ppo", "sft", "reward_model", "rollout"])
def test_every_registered_algorithm_is_drawn(algorithm):
    graph = algorithm_graph(algorithm)
    drawn = dataflow_mermaid(graph)
    for call in graph.calls:
        assert f'    {call.name}["{call.name}<br/>{call.role}: {call.kind}"]' in drawn
        assert call.name in dataflow_table(graph)


def test_ppo_drawing_has_data_and_version_edges():
    drawn = dataflow_mermaid(algorithm_graph("ppo"))
    assert "ref_inference -->|ref_logprobs| actor_train" in drawn
    assert "actor_train -.->|actor, next iteration| actor_generate" in drawn
    assert "dataset -->|prompt_ids| actor_generate" in drawn
    assert "dataset -->|columns| reward_inference" in drawn


def test_unknown_algorithm():
    with pytest.raises(ValueError, match="no algorithm 'grp'; registered are ppo"):
        algorithm_graph("grp")


def test_a_plan_is_a_table_of_its_nodes(demo_plan):
    table = plan_table(demo_plan).splitlines()
    assert len(table) == len(demo_plan.nodes) + 2
    assert "dp=2 tp=1 pp=1" in next(line for line in table if " actor_train " in line)


def test_onloads_and_offloads_are_shown(make_graph, assign):
    graph = make_graph()
    places = {c.name: assign([0], offload=c.role == "ref") for c in graph.calls}
    plan = build_plan(graph, places, Cluster(1, 1))
    lines = plan_table(plan).splitlines()
    assert any(line.split()[1:] == ["offload_ref_of_ref_inference", "offload", "0", "ref"] for line in lines)
    shown = [line.split()[1] for line in lines if line.endswith(", offloaded")]
    assert shown == ["ref_inference"]
    assert {"onload_ref", "offload_ref"} < set(short_names(plan).values())


def test_short_names_are_short_and_no_two_are_alike(demo_plan):
    names = short_names(demo_plan)
    assert list(names) == [node.name for node in demo_plan.nodes]
    assert len(set(names.values())) == len(names)
    assert names["actor_generate"] == "actor_generate"
    assert names["reallocate_actor_to_actor_generate"] == "reallocate_actor"
    assert names["transfer_actor_generate_to_ref_inference"] == "→ ref_inference"
    assert names["transfer_ref_inference_to_actor_train"] == "ref_inference → actor_train"
    assert max(map(len, names.values())) <= 31


def test_devices_are_shortened():
    assert format_devices([3, 0, 1, 2, 8]) == "0-3,8"
    assert format_devices([5]) == "5"


@pytest.fixture
def priced(demo_plan, ppo_cost, llama):
    small = llama(num_hidden_layers=4, hidden_size=512, intermediate_size=1024)
    return demo_plan, price_plan(demo_plan, ppo_cost(Cluster(1, 4), small))


def test_every_node_is_on_all_its_devices_for_its_whole_time(priced):
    plan, price = priced
    groups = steady_bars(plan, price)
    assert sorted(device for group in groups for device in group.devices) == [0, 1, 2, 3]
    for group in groups:
        for device in group.devices:
            nodes = {node.name for node in plan.on(device)}
            assert {bar.node for bar in group.bars} == nodes
            for name in nodes:
                shown_s = sum(bar.end_s - bar.start_s for bar in group.bars if bar.node == name)
                assert shown_s == pytest.approx(price.duration_s[name])


def test_bars_of_a_device_do_not_overlap_and_stay_inside_the_period(priced):
    plan, price = priced
    for group in steady_bars(plan, price):
        ends = 0.0
        for bar in group.bars:
            assert bar.start_s >= ends - 1e-9
            ends = bar.end_s
        assert ends <= price.iteration_time_s + 1e-9


def test_a_line_is_as_wide_as_asked_and_names_what_has_room():
    bars = (Bar("generate", "generate", 0.0, 5.0), Bar("save", "save", 9.99, 10.0))
    (line, axis) = draw_bars([DeviceLane((0, 1), bars)], 10.0, width=40)
    assert line[1:] == [("", ""), ("generate" + "─" * 11 + "┤", "generate"), (" " * 20 + "│", "")]
    assert axis[0][0].endswith("10 s")


def test_of_many_groups_the_busiest_are_drawn():
    groups = [DeviceLane((n,), (Bar("x", "train_step", 0.0, float(n)),)) for n in range(1, 31)]
    lines = draw_bars(groups, 30.0, rows=5)
    assert len(lines) == 7
    assert [line[0][0].strip(" │") for line in lines[:5]] == ["26", "27", "28", "29", "30"]
    assert "25 less busy groups" in lines[5][0][0]
