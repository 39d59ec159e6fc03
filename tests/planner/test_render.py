import re

import pytest

from planner.mesh import Cluster
from planner.plan import build_plan
from planner.render import (
    algorithm_graph,
    dataflow_mermaid,
    dataflow_table,
    format_devices,
    plan_mermaid,
    plan_table,
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


def test_plan_drawing_has_exactly_the_plan(demo_plan):
    drawn = plan_mermaid(demo_plan)
    edges = set(re.findall(r"^    (\w+) (-->|-\.->) (\w+)$", drawn, re.M))
    expected = {(a, "-->", n.name) for n in demo_plan.nodes for a in n.after}
    assert edges == expected | {(a, "-.->", n.name) for n in demo_plan.nodes for a in n.after_previous}
    table = plan_table(demo_plan).splitlines()
    assert len(table) == len(demo_plan.nodes) + 2
    assert "dp=2 tp=1 pp=1" in next(line for line in table if " actor_train " in line)


def test_onloads_and_offloads_are_shown(make_graph, assign):
    graph = make_graph()
    places = {c.name: assign([0], offload=c.role == "ref") for c in graph.calls}
    plan = build_plan(graph, places, Cluster(1, 1))
    assert '    onload_ref_to_ref_inference[["onload_ref_to_ref_inference<br/>0"]]' in plan_mermaid(plan)
    lines = plan_table(plan).splitlines()
    assert any(line.split()[1:] == ["offload_ref_of_ref_inference", "offload", "0", "ref"] for line in lines)
    shown = [line.split()[1] for line in lines if line.endswith(", offloaded")]
    assert shown == ["ref_inference"]


def test_devices_are_shortened():
    assert format_devices([3, 0, 1, 2, 8]) == "0-3,8"
    assert format_devices([5]) == "5"
