"""Onloads and offloads among the slots of a plan: where they stand, and which roles may have them."""

import pytest

from planner.plan.build import PlanError, build_plan
from planner.plan.graph import DataflowGraph
from planner.plan.mesh import Cluster
from rlhf_tasks.spec import (
    CallNode,
    ExecutionPlan,
    ModelFunctionCall,
    OnloadNode,
)


def onloads(plan: ExecutionPlan) -> list[str]:
    return [node.name for node in plan.nodes if isinstance(node, OnloadNode)]


@pytest.fixture
def offloading(make_graph, assign) -> ExecutionPlan:
    """ref and reward on the devices of all others, the one offloaded, the other not."""
    graph = make_graph()
    places = dict.fromkeys((c.name for c in graph.calls), assign([0, 1], tp=2))
    places["ref_inference"] = assign([0, 1], tp=2, offload=True)
    return build_plan(graph, places, Cluster(1, 2))


def test_an_offloaded_role_is_loaded_for_its_call_and_freed_after_it(offloading):
    order = [node.name for node in offloading.nodes]
    place = offloading.node("ref_inference").placement
    assert onloads(offloading) == ["onload_ref_to_ref_inference"]
    assert offloading.node("onload_ref_to_ref_inference").placement == place
    assert "onload_ref_to_ref_inference" in offloading.node("ref_inference").after
    assert offloading.node("offload_ref_of_ref_inference").after == ("ref_inference",)
    assert order[order.index("ref_inference") + 1] == "offload_ref_of_ref_inference"
    assert offloading.roles["ref"].offloaded == (place,)
    assert offloading.roles["reward"].offloaded == ()


def test_the_next_call_on_the_devices_waits_for_the_memory(offloading):
    order = [node.name for node in offloading.nodes]
    later = order[order.index("offload_ref_of_ref_inference") + 1 :]
    following = next(name for name in later if isinstance(offloading.node(name), CallNode))
    assert "offload_ref_of_ref_inference" in offloading.node(following).after


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            "actor_generate",
            "'actor_generate': offload is for frozen roles and for training, and 'actor' is trained by 'actor_train'",
        ),
        (
            "critic_inference",
            "'critic_inference': .* or give it to 'critic_train': host memory then keeps its optim",
        ),
    ],
)
def test_weights_that_train_are_not_offloaded(make_graph, assign, changed, message):
    graph = make_graph()
    places = {c.name: assign([0], offload=c.name == changed) for c in graph.calls}
    with pytest.raises(PlanError, match=message):
        build_plan(graph, places, Cluster(1, 1))


def test_an_offloaded_optimizer_needs_no_nodes(make_graph, assign):
    graph = make_graph()
    plans = [
        build_plan(
            graph,
            {c.name: assign([0], offload=offload and c.kind == "train_step") for c in graph.calls},
            Cluster(1, 1),
        )
        for offload in (False, True)
    ]
    names = [[node.name for node in plan.nodes] for plan in plans]
    assert names[0] == names[1]
    assert plans[1].roles["actor"].offloaded == (plans[1].node("actor_train").placement,)
    assert plans[1].roles["ref"].offloaded == plans[0].roles["actor"].offloaded == ()


@pytest.fixture
def two_scorers() -> DataflowGraph:
    """A frozen role with two calls beside one that trains."""
    early = {
        "name": "early",
        "role": "judge",
        "kind": "inference",
        "inputs": ("input_ids",),
        "outputs": ("a",),
    }
    call = ModelFunctionCall(**early, n_seqs=8)
    calls = [
        call,
        call.model_copy(update={"name": "late", "inputs": ("input_ids", "a"), "outputs": ("b",)}),
        ModelFunctionCall(name="train", role="actor", kind="train_step", inputs=("input_ids", "b"), n_seqs=8),
    ]
    return DataflowGraph(calls, ("input_ids",), name="judged")


def test_calls_of_one_role_on_one_placement_share_an_onload(two_scorers, assign):
    places = {"early": assign([0], offload=True), "late": assign([0], offload=True), "train": assign([0])}
    plan = build_plan(two_scorers, places, Cluster(1, 2))
    assert onloads(plan) == ["onload_judge_to_early"]
    assert plan.node("offload_judge_of_early").after == ("late",)
    apart = build_plan(two_scorers, {**places, "late": assign([1])}, Cluster(1, 2))
    assert onloads(apart) == ["onload_judge_to_early"]
    assert apart.node("offload_judge_of_early").after == ("early",)
    both = build_plan(two_scorers, {**places, "late": assign([1], offload=True)}, Cluster(1, 2))
    assert onloads(both) == ["onload_judge_to_early", "onload_judge_to_late"]


def test_calls_of_one_role_on_one_placement_agree_on_offload(two_scorers, assign):
    places = {"early": assign([0], offload=True), "late": assign([0]), "train": assign([0])}
    message = r"'early' and 'late' share one copy of 'judge' on devices \[0\], but offload is True for one and False"
    with pytest.raises(PlanError, match=message):
        build_plan(two_scorers, places, Cluster(1, 1))
