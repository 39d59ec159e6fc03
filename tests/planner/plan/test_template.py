"""Onloads and offloads among the slots of a plan: where they stand, and which roles may have them."""

import pytest

from prefect_rlhf.planner.plan.build import PlanError, build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.order import call_orders
from prefect_rlhf.rlhf_tasks.spec import (
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
            "'critic_inference': .* or give it to 'critic_train': host memory then keeps its optimizer, and its para",
        ),
    ],
)
def test_weights_that_train_are_not_offloaded(make_graph, assign, changed, message):
    graph = make_graph()
    places = {c.name: assign([0], offload=c.name == changed) for c in graph.calls}
    with pytest.raises(PlanError, match=message):
        build_plan(graph, places, Cluster(1, 1))


CRITIC_TRAINS = ("onload_critic_to_critic_train", "offload_critic_of_critic_train")


def test_parameters_that_train_come_for_their_first_reader_and_go_after_the_last(make_graph, assign):
    """The values are inferred where the critic trains, and it is evaluated after each step and before the first."""
    made, cluster = make_graph(), Cluster(1, 2)
    graph = DataflowGraph(made.calls, made.dataset_keys, evaluated=("critic",), on_start=True)
    places = {c.name: assign([0, 1], tp=2, offload=c.name == "critic_train") for c in graph.calls}
    for order in (None, *call_orders(graph)):
        plan = build_plan(graph, places, cluster, call_order=order)
        names = [node.name for node in plan.nodes]
        onload, offload = map(names.index, CRITIC_TRAINS)
        assert names.index("actor_generate") < onload < names.index("critic_inference")
        assert names[offload - 3 : offload] == ["critic_train", "save_critic", "evaluate_critic"]
        assert CRITIC_TRAINS[0] not in plan.node("evaluate_critic_at_start").after, (
            "it brings them for itself"
        )
        assert CRITIC_TRAINS[0] in plan.node("critic_inference").after
        assert onloads(plan) == [CRITIC_TRAINS[0]]
        assert plan.onloaded == {("critic", places["critic_train"].placement)}
        assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan
    resident = {name: given.model_copy(update={"offload": False}) for name, given in places.items()}
    left = [name for name in names if name not in CRITIC_TRAINS]
    assert left == [node.name for node in build_plan(graph, resident, cluster, call_order=order).nodes]


def test_a_copy_is_made_of_parameters_that_have_come(make_graph, assign):
    """The values are inferred elsewhere: the reallocation reads first."""
    graph = make_graph()
    places = {c.name: assign([0]) for c in graph.calls}
    places |= {"critic_inference": assign([1]), "critic_train": assign([0], offload=True)}
    for order in (None, *call_orders(graph)):
        plan = build_plan(graph, places, Cluster(1, 2), call_order=order)
        names = [node.name for node in plan.nodes]
        copied = names.index("reallocate_critic_to_critic_inference")
        assert names.index(CRITIC_TRAINS[0]) < copied
        assert order is None or names.index("actor_generate") < names.index(CRITIC_TRAINS[0])
        assert CRITIC_TRAINS[0] in plan.node("reallocate_critic_to_critic_inference").after
        assert names[names.index(CRITIC_TRAINS[1]) - 1] == "save_critic"


def test_parameters_stay_where_nothing_else_runs_while_they_are_idle(make_graph, assign):
    """Only the optimizer's state is in host memory of a critic on devices of its own, and of GRPO's actor, which
    generates first and trains last."""
    graph = make_graph()
    places = {c.name: assign([0], offload=c.name == "critic_train") for c in graph.calls}
    places |= {
        name: assign([1], offload=name == "critic_train") for name in ("critic_inference", "critic_train")
    }
    plan = build_plan(graph, places, Cluster(1, 2))
    assert onloads(plan) == []
    assert plan.roles["critic"].offloaded == (places["critic_train"].placement,)
    scored = build_plan(graph, {**places, "reward_inference": assign([1])}, Cluster(1, 2))
    assert onloads(scored) == [CRITIC_TRAINS[0]]

    graph = make_graph("grpo", group_size=8, beta=0.1, max_rounds=1, mask_truncated_completions=False)
    places = {c.name: assign([0], offload=c.kind == "train_step") for c in graph.calls}
    plan = build_plan(graph, places, Cluster(1, 1))
    assert onloads(plan) == []
    assert plan.roles["actor"].offloaded == (plan.node("actor_train").placement,)
    assert plan.roles["ref"].offloaded == ()
    assert plan.onloaded == frozenset()


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
