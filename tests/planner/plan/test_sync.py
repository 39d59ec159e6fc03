"""A role that follows another: where the blend stands in a plan, and what it costs."""

import pytest

from prefect_rlhf.planner.plan.build import PlanError, build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph, GraphError
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.rlhf_tasks.spec import CallAssignment, ExecutionPlan, ReallocateNode, SyncNode


@pytest.fixture
def following(make_graph):
    """The graph of PPO, with a reference that follows the actor."""
    graph = make_graph(n_seqs=256)
    return DataflowGraph(graph.calls, graph.dataset_keys, name="ppo", follows={"ref": "actor"})


def follow(plan: ExecutionPlan) -> list[str]:
    """The names of the nodes that serve the reference's changes, in the plan's order."""
    return [node.name for node in plan.nodes if node.name in ("sync_ref", "save_ref")]


def test_the_blend_follows_the_training_and_the_next_use_of_both_models_waits_for_it(
    following, demo_assignments
):
    plan = build_plan(following, demo_assignments, Cluster(1, 4))
    names = [node.name for node in plan.nodes]
    sync, train, reads = plan.node("sync_ref"), plan.node("actor_train"), plan.node("ref_inference")
    assert isinstance(sync, SyncNode)
    assert (sync.role, sync.leader) == ("ref", "actor")
    assert (sync.source, sync.destination) == (train.placement, reads.placement)
    assert set(sync.devices) == {*train.placement.devices, *reads.placement.devices}
    assert names.index("save_ref") > names.index("sync_ref") > names.index("actor_train")
    assert sync.after == ("actor_train",), "the reference's own call comes before that"
    assert "save_ref" in reads.after_previous, (
        "which waits for the sync; the next training waits for this call"
    )
    assert plan.node("save_ref").after == ("sync_ref",)
    ref = plan.roles["ref"]
    assert (ref.trained, ref.follows, ref.changes) == (False, "actor", True)
    assert not plan.roles["reward"].changes


def test_without_it_the_plan_is_as_it_was(following, demo_assignments):
    plan = build_plan(following, demo_assignments, Cluster(1, 4))
    frozen = DataflowGraph(following.calls, following.dataset_keys, name="ppo")
    without = build_plan(frozen, demo_assignments, Cluster(1, 4))
    ours = [node.name for node in plan.nodes if node.name not in follow(plan)]
    assert ours == [node.name for node in without.nodes]
    assert follow(without) == []
    assert not without.roles["ref"].changes


def test_every_order_of_calls_keeps_it_behind_both(following, demo_assignments):
    order = [call.name for call in following.calls]
    names = [n.name for n in build_plan(following, demo_assignments, Cluster(1, 4), call_order=order).nodes]
    at = names.index("sync_ref")
    assert names[at + 1] == "save_ref"
    assert at > max(names.index("actor_train"), names.index("ref_inference"))


def test_its_weights_lie_where_its_model_runs_and_python_rewards_beside_it_read_none(make_graph, assign):
    graph = make_graph(n_seqs=16, scoring_role="ref")
    graph = DataflowGraph(graph.calls, graph.dataset_keys, name="ppo", follows={"ref": "actor"})
    places = dict.fromkeys((call.name for call in graph.calls), assign([0, 1], dp=2))
    plan = build_plan(graph, {**places, "reward_inference": assign([1])}, Cluster(1, 2))
    (sync,) = [node for node in plan.nodes if isinstance(node, SyncNode)]
    assert sync.destination == plan.roles["ref"].placements[0] == places["ref_inference"].placement


def test_it_is_not_offloaded(following, demo_assignments):
    offloaded = demo_assignments["ref_inference"].model_copy(update={"offload": True})
    with pytest.raises(PlanError, match="offload is for frozen roles, and 'ref' follows 'actor'"):
        build_plan(following, {**demo_assignments, "ref_inference": offloaded}, Cluster(1, 4))


@pytest.mark.parametrize(
    ("follows", "said"),
    [
        ({"ref": "reward"}, "Role 'ref' cannot follow 'reward'"),
        ({"critic": "actor"}, "Role 'critic' cannot follow 'actor'"),
        ({"teacher": "actor"}, "one call must run its model, not none"),
    ],
)
def test_only_a_role_that_does_not_train_follows_one_that_does(make_graph, follows, said):
    graph = make_graph()
    with pytest.raises(GraphError, match=said):
        DataflowGraph(graph.calls, graph.dataset_keys, name="ppo", follows=follows)


def test_an_iteration_is_charged_its_share_of_the_reallocation_and_a_deadline_the_whole(
    following, ppo_cost, assign
):
    whole = assign([0, 1, 2, 3], tp=4)
    places: dict[str, CallAssignment] = dict.fromkeys((call.name for call in following.calls), whole)
    apart = build_plan(
        following, {**places, "actor_generate": assign([0, 1], tp=2), "ref_inference": assign([0, 1], tp=2)},
        Cluster(1, 4),
    )  # fmt: skip
    (copy,) = [node for node in apart.nodes if isinstance(node, ReallocateNode)]
    model = ppo_cost(Cluster(1, 4), sync_every=5)
    price, dispatch_s = price_plan(apart, model), model.classes.dispatch_s
    moved_s = price.duration_s[copy.name] - dispatch_s
    assert price.longest_s["sync_ref"] - dispatch_s == pytest.approx(moved_s)
    assert price.duration_s["sync_ref"] - dispatch_s == pytest.approx(moved_s / 5)
    assert price.moved_bytes["sync_ref"] == price.moved_bytes[copy.name] > 0


def test_a_reference_that_follows_takes_its_master_weights_and_for_a_while_the_others_weights(
    following, ppo_cost, demo_assignments, make_graph
):
    model = ppo_cost(Cluster(1, 4))
    place = demo_assignments["ref_inference"].placement
    weights, held = model.parameter_bytes("ref", place)[0], model.following_bytes("ref", place)[0]
    assert held == weights + weights / 2 * 4 / place.strategy.dp, "of 2 bytes, and 4 in float32 over dp"

    def parts(graph):
        return price_plan(build_plan(graph, places, Cluster(1, 4)), model).peaks[0].parts

    places = dict.fromkeys((call.name for call in following.calls), demo_assignments["critic_inference"])
    places["ref_inference"] = demo_assignments["ref_inference"]
    assert parts(make_graph(n_seqs=256))["ref: frozen parameters"] == weights
    alone = parts(following)
    assert alone == {"ref: parameters, master weights": held, "actor: copy": weights}
