import pytest

from planner.plan.build import build_plan
from planner.plan.mesh import Cluster
from planner.report.text import (
    algorithm_graph,
    dataflow_mermaid,
    dataflow_table,
    format_devices,
    plan_table,
    short_names,
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
