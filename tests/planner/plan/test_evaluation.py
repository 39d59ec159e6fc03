"""The evaluation of a trained role: where it stands in a plan, and what it costs."""

import pytest

from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph, GraphError
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import EvaluationWork, Lengths, RoleModel, Workload
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.plans import price_plan, shortfall
from prefect_rlhf.rlhf_tasks.spec import EvaluateNode, SaveNode

EVERY = 5
ASKED = EvaluationWork(every=EVERY, rows=200, rows_at_once=64, answers=1, prompt_tokens=32, new_tokens=16)


@pytest.fixture
def evaluated(make_graph):
    """The graph of PPO, with its actor evaluated."""
    graph = make_graph(n_seqs=256)
    return DataflowGraph(graph.calls, graph.dataset_keys, name="ppo", evaluated=("actor",))


@pytest.fixture
def model_of(llama):
    def make(evaluation: EvaluationWork | None, **changes) -> CostModel:
        heads = {"actor": "lm", "ref": "lm", "critic": "scalar", "reward": "scalar"}
        models = {role: RoleModel(shape=llama(), head=head) for role, head in heads.items()}
        workload = Workload(
            prompt_tokens=128,
            new_tokens=Lengths.fixed(128),
            itemsize=2,
            recompute="full",
            evaluation=evaluation,
        )
        return CostModel(Cluster(1, 4), preset("a100-80g-sxm").model_copy(update=changes), models, workload)

    return make


def test_it_follows_the_save_on_the_training_placement_and_the_next_training_waits_for_it(
    evaluated, demo_assignments
):
    plan = build_plan(evaluated, demo_assignments, Cluster(1, 4))
    names = [node.name for node in plan.nodes]
    (node,) = [node for node in plan.nodes if isinstance(node, EvaluateNode)]
    train = plan.node("actor_train")
    assert (node.name, node.role, node.placement) == ("evaluate_actor", "actor", train.placement)
    at = names.index("actor_train")
    assert names[at : at + 3] == ["actor_train", "save_actor", "evaluate_actor"]
    assert node.after == ("actor_train",)
    assert "evaluate_actor" in train.after_previous
    without = build_plan(
        DataflowGraph(evaluated.calls, evaluated.dataset_keys, name="ppo"), demo_assignments, Cluster(1, 4)
    )
    assert [name for name in names if name != "evaluate_actor"] == [n.name for n in without.nodes]


def test_every_order_of_calls_keeps_it_behind_its_training(evaluated, demo_assignments):
    order = [call.name for call in evaluated.calls]
    plan = build_plan(evaluated, demo_assignments, Cluster(1, 4), call_order=order)
    names = [node.name for node in plan.nodes]
    assert names.index("evaluate_actor") == names.index("actor_train") + 2
    assert isinstance(plan.nodes[names.index("evaluate_actor") - 1], SaveNode)


def test_an_iteration_is_charged_its_share_and_a_deadline_the_whole(evaluated, demo_assignments, model_of):
    plan, model = build_plan(evaluated, demo_assignments, Cluster(1, 4)), model_of(ASKED)
    price, dispatch_s = price_plan(plan, model), model.classes.dispatch_s
    whole = price.longest_s["evaluate_actor"] - dispatch_s
    assert whole > 0
    assert price.duration_s["evaluate_actor"] - dispatch_s == pytest.approx(whole / EVERY)
    calls = {name: seconds for name, seconds in price.longest_s.items() if name != "evaluate_actor"}
    assert calls == {name: price.duration_s[name] for name in calls}

    rarer = price_plan(plan, model_of(ASKED.model_copy(update={"every": 50})))
    assert rarer.iteration_time_s < price.iteration_time_s
    larger = price_plan(plan, model_of(ASKED.model_copy(update={"rows": 2000})))
    assert larger.longest_s["evaluate_actor"] > 5 * price.longest_s["evaluate_actor"], "batch by batch"


def test_before_the_first_iteration_it_follows_the_fetch_and_no_iteration_is_charged(
    evaluated, demo_assignments, model_of
):
    graph = DataflowGraph(
        evaluated.calls, evaluated.dataset_keys, name="ppo", evaluated=("actor",), on_start=True
    )
    plan, model = build_plan(graph, demo_assignments, Cluster(1, 4)), model_of(ASKED)
    assert [node.name for node in plan.nodes][:2] == ["fetch", "evaluate_actor_at_start"]
    node = plan.node("evaluate_actor_at_start")
    assert isinstance(node, EvaluateNode)
    assert node.at_start
    assert node.placement == plan.node("actor_train").placement
    price = price_plan(plan, model)
    assert price.duration_s[node.name] == model.classes.dispatch_s
    assert price.longest_s[node.name] == price.longest_s["evaluate_actor"], "deadlines allow for it"


def test_the_loss_on_completions_is_priced_too(evaluated, demo_assignments, model_of):
    plan = build_plan(evaluated, demo_assignments, Cluster(1, 4))
    alone = EvaluationWork(every=EVERY, rows=200, rows_at_once=64, completion_tokens=48)
    both = ASKED.model_copy(update={"completion_tokens": 48})
    loss_s, answers_s, both_s = (
        price_plan(plan, m).longest_s["evaluate_actor"] - m.classes.dispatch_s
        for m in map(model_of, (alone, ASKED, both))
    )
    assert 0 < loss_s < answers_s
    assert both_s == pytest.approx(loss_s + answers_s)


def test_its_cache_needs_room(evaluated, demo_assignments, model_of):
    plan = build_plan(evaluated, demo_assignments, Cluster(1, 4))
    asked = ASKED.model_copy(update={"rows": 60_000, "rows_at_once": 60_000})
    small, large = (shortfall(price_plan(plan, m), m) for m in map(model_of, (ASKED, asked)))
    assert large is not None
    assert "during evaluate_actor" in large
    assert "A smaller evaluation.batch_size" in large
    assert small is None or "evaluate_actor" not in small


def test_a_frozen_role_is_not_evaluated(make_graph):
    graph = make_graph()
    with pytest.raises(GraphError, match="Role 'ref' is evaluated, but no call of ppo trains it"):
        DataflowGraph(graph.calls, graph.dataset_keys, name="ppo", evaluated=("ref",))
