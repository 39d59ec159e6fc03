import pytest

from planner.plan.build import PlanError, build_plan
from planner.plan.mesh import Cluster
from planner.search.baselines import Limits, heuristic, symmetric


def strategies(assignments) -> dict[str, str]:
    return {name: str(assignment.placement.strategy) for name, assignment in assignments.items()}


def test_data_parallel_where_one_device_holds_the_model(make_graph):
    found = heuristic(make_graph(), Cluster(2, 4))
    assert set(strategies(found).values()) == {"dp=8 tp=1 pp=1"}


def test_tp_inside_a_host_then_pp_across_hosts(make_graph):
    limits = {"actor": Limits(replica_devices=16), "ref": Limits(replica_devices=3)}
    found = strategies(heuristic(make_graph(), Cluster(4, 8), limits))
    assert found["actor_train"] == "dp=2 tp=8 pp=2"
    assert found["ref_inference"] == "dp=8 tp=4 pp=1"
    assert found["critic_train"] == "dp=32 tp=1 pp=1"


def test_a_small_batch_bounds_dp(make_graph):
    found = strategies(heuristic(make_graph(n_seqs=8), Cluster(2, 4)))
    assert found["actor_generate"] == "dp=8 tp=1 pp=1"
    assert found["actor_train"] == "dp=4 tp=2 pp=1"


def test_pipelines_get_micro_batches(make_graph):
    found = heuristic(make_graph(n_seqs=64), Cluster(2, 2), {"actor": Limits(replica_devices=4)})
    assert found["actor_train"].micro_batches == 4


def test_a_model_with_few_heads_takes_a_smaller_mesh(make_graph):
    found = heuristic(make_graph(n_seqs=4), Cluster(1, 8), {"actor": Limits(max_tp=1)})
    assert found["actor_train"].placement.devices == (0, 1)
    assert str(found["actor_train"].placement.strategy) == "dp=2 tp=1 pp=1"


def test_symmetric_calls_are_alike_and_nothing_moves(make_graph):
    graph = make_graph()
    found = symmetric(graph, Cluster(2, 4), {"actor": Limits(replica_devices=2), "ref": Limits()})
    assert set(strategies(found).values()) == {"dp=4 tp=2 pp=1"}
    plan = build_plan(graph, found, Cluster(2, 4))
    assert {node.kind for node in plan.nodes} == {"fetch", "call", "save"}


def test_no_strategy_is_said(make_graph):
    with pytest.raises(PlanError, match="no strategy on a cluster of 1x4"):
        heuristic(make_graph(), Cluster(1, 4), {"actor": Limits(replica_devices=8)})
