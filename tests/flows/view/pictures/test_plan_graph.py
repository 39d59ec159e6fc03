"""The picture of a plan has each node and each wait, once."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from prefect_rlhf.flows.view.pictures.plan_graph import needed_arrows, plan_graph
from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.text import short_names
from prefect_rlhf.rlhf_tasks.algorithms.configurations import load_config, read_assignments
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests.flows.view.pictures.drawn import of_class, texts
from tests.rlhf_tasks.plans import small_plan

DEPLOYMENTS = Path(__file__).parents[4] / "deployments"


@pytest.fixture(scope="module")
def demo_plan() -> ExecutionPlan:
    """The plan of `make demo`: 23 nodes, with transfers, reallocations and releases."""
    ppo = algorithm("ppo")
    calls = ppo.graph(load_config(DEPLOYMENTS / "demo" / "ppo.yaml"))
    graph = DataflowGraph(calls, ppo.dataset_keys, name="ppo")
    return build_plan(graph, read_assignments(DEPLOYMENTS / "demo_plan.yaml", 4), Cluster(1, 4))


def test_the_picture_of_a_plan_has_its_waits_but_no_implied_ones(demo_plan):
    def longer(node):
        return (
            node.model_copy(update={"after": (*node.after, "fetch")}) if node.name == "actor_train" else node
        )

    implied = demo_plan.model_copy(update={"nodes": tuple(map(longer, demo_plan.nodes))})
    graph = needed_arrows(implied)
    assert list(graph) == [node.name for node in demo_plan.nodes]
    assert set(graph.edges) == {(before, node.name) for node in demo_plan.nodes for before in node.after}
    assert len(of_class(plan_graph(implied), "arrow")) == len(graph.edges)


def test_each_box_has_its_node_its_devices_and_what_it_waits_for(demo_plan):
    picture = plan_graph(demo_plan)
    shown = texts(picture)
    for name in short_names(demo_plan).values():
        assert any(name in line or line == f"→ {name.rpartition('→ ')[2]}" for line in shown)
    assert "0-1: dp=1 tp=2 pp=1" in shown
    assert "↻ actor_train" in shown


def test_no_two_boxes_of_a_picture_overlap(demo_plan):
    for plan in (demo_plan, small_plan()):
        boxes = [
            tuple(float(box.get(side, "0")) for side in ("x", "y", "width", "height"))
            for box in ElementTree.fromstring(plan_graph(plan).alone()).findall(".//{*}rect")
            if "%" not in box.get("width", "")
        ]
        assert len(boxes) == len(plan.nodes)
        for number, (x, y, width, height) in enumerate(boxes):
            assert x >= 0
            assert x + width <= plan_graph(plan).width
            assert not any(
                x < left + wide and left < x + width and y < top + high and top < y + height
                for left, top, wide, high in boxes[:number]
            )
