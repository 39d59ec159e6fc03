from itertools import product
from math import inf

import pytest

from prefect_rlhf.planner.plan.build import PlanError, build_plan
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.plans import shortfall
from prefect_rlhf.planner.pricing.problem import Deadline, Problem
from prefect_rlhf.planner.search import baselines
from prefect_rlhf.planner.search.baselines import (
    Limits,
    colocated_choice,
    divisions,
    heuristic,
    heuristic_plan,
    hybrid,
    hybrid_plan,
    symmetric,
    symmetric_plan,
)
from prefect_rlhf.planner.search.compiled.tables import Tables, assignments_of
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from tests.planner.sampled import ALL_FOR_TENSORS


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


@pytest.mark.parametrize(
    ("max_tp", "actor", "ref"),
    [(1, "dp=4 tp=1 pp=4", "dp=8 tp=1 pp=2"), (3, "dp=4 tp=2 pp=2", "dp=8 tp=2 pp=1")],
)
def test_where_tp_is_limited_stages_take_the_rest_of_a_host(make_graph, max_tp, actor, ref):
    limits = {"actor": Limits(replica_devices=4), "ref": Limits(replica_devices=2)}
    found = strategies(heuristic(make_graph(n_seqs=64), Cluster(2, 8), limits, max_tp))
    assert found["actor_train"] == actor
    assert found["ref_inference"] == ref
    assert found["critic_train"] == "dp=16 tp=1 pp=1"


@pytest.mark.parametrize("rule", [heuristic_plan, symmetric_plan, hybrid_plan])
@pytest.mark.parametrize("max_tp", [1, 2])
def test_a_plan_by_rule_has_no_larger_tp_than_its_problem_allows(make_graph, ppo_cost, rule, max_tp):
    """7B models on hosts of eight 40 GB devices: a replica of one that is trained needs four of them."""
    small = preset("a100-80g-sxm").model_copy(update={"memory_bytes": 40 * 10**9, **ALL_FOR_TENSORS})
    model = ppo_cost(Cluster(2, 8), device=small)
    problem = Problem(make_graph(n_seqs=128, mini_batches=4), model, max_tp)
    found = rule(problem)
    assert shortfall(found.price, model) is None
    chosen = {name: given.placement.strategy for name, given in assignments_of(found.plan).items()}
    assert {one.tp for one in chosen.values()} <= {1, max_tp}
    assert chosen["actor_train"].tp == max_tp
    assert chosen["actor_train"].pp == 4 // max_tp


def test_a_small_batch_bounds_dp(make_graph):
    found = strategies(heuristic(make_graph(n_seqs=8), Cluster(2, 4)))
    assert found["actor_generate"] == "dp=8 tp=1 pp=1"
    assert found["actor_train"] == "dp=4 tp=2 pp=1"


def test_generation_of_the_hybrid_engine_has_tensor_parallelism_over_a_host(make_graph):
    limits = {"actor": Limits(replica_devices=1, max_tp=4), "ref": Limits(replica_devices=3)}
    found = strategies(hybrid(make_graph(n_seqs=64), Cluster(2, 8), limits))
    assert found["actor_generate"] == "dp=4 tp=4 pp=1", "as many as it has heads"
    assert found["actor_train"] == found["critic_inference"] == "dp=16 tp=1 pp=1"
    assert found["ref_inference"] == "dp=4 tp=4 pp=1", "the smallest replica that fits"


def test_roles_have_as_many_divisions_into_sets_as_bells_number_says():
    found = [{frozenset(own) for own in sets} for sets in divisions(["a", "b", "c", "d"])]
    assert len(found) == 15
    assert all(found.count(one) == 1 for one in found)
    assert found[0] == {frozenset("abcd")}
    assert found[-1] == {frozenset(role) for role in "abcd"}


@pytest.mark.parametrize("cluster", [Cluster(1, 2), Cluster(2, 1)], ids=str)
def test_the_colocated_plan_is_the_best_of_its_class(small_problem, cluster):
    """Against all choices in which a role has one mesh, two roles' meshes are equal or share no device, and
    generation's tp and pp divide those of training."""
    problem = small_problem(cluster, ["actor_generate", "ref_inference", "actor_train"])
    tables = Tables(problem)
    calls = {call.name: i for i, call in enumerate(problem.graph.calls)}

    def belongs(choice: tuple[int, ...]) -> bool:
        drawn, ref, trained = (tables.options[i][choice[i]] for i in range(3))
        meshes = [(one.first, one.first + one.size) for one in (drawn, ref, trained)]
        regroups = not (trained.strategy.tp % drawn.strategy.tp or trained.strategy.pp % drawn.strategy.pp)
        (a, b), (c, d) = meshes[0], meshes[1]
        return meshes[0] == meshes[2] and regroups and ((a, b) == (c, d) or b <= c or d <= a)

    assert list(calls) == ["actor_generate", "ref_inference", "actor_train"]
    values = [
        tables.evaluate(list(choice))
        for choice in product(*(range(len(own)) for own in tables.options))
        if belongs(choice)
    ]
    best = min(value.time_s for value in values if value.excess_bytes <= 0)
    choice, evaluations = colocated_choice(tables)
    assert belongs(tuple(choice))
    assert evaluations < len(values)
    assert tables.evaluate(choice).time_s == pytest.approx(best, rel=1e-9)
    assert len(values) < len(list(product(*tables.options))), "other plans exist"


def test_what_no_division_fits_is_said(small_problem):
    with pytest.raises(PlanError, match=r"No division of the roles .* fits a cluster of 1x1.*another mode"):
        colocated_choice(Tables(small_problem(Cluster(1, 1), memory=0.8e9)))


def test_pipelines_get_micro_batches(make_graph):
    found = heuristic(make_graph(n_seqs=64), Cluster(2, 2), {"actor": Limits(replica_devices=4)})
    assert found["actor_train"].micro_batches == 4


@pytest.mark.parametrize("rule", [heuristic, symmetric])
def test_a_generation_on_a_pipeline_decodes_all_sequences_at_once(make_graph, rule):
    """Its micro-batches would take turns; as many groups as stages are in flight without them."""
    found = rule(make_graph(n_seqs=64), Cluster(2, 2), {"actor": Limits(replica_devices=4)})
    assert found["actor_generate"].placement.strategy.pp == 2
    assert found["actor_generate"].micro_batches == 1
    assert found["actor_train"].micro_batches == 4


def test_a_generation_whose_replica_cannot_grow_decodes_fewer_sequences_at_a_time(
    make_graph, ppo_cost, llama
):
    """One device: a cache of all 64 sequences does not fit, that of some does."""
    layers = {"num_hidden_layers": 2, "hidden_size": 768, "intermediate_size": 2048}
    shape = llama(**layers, num_attention_heads=4, num_key_value_heads=4, vocab_size=8192)
    small = preset("a100-80g-sxm").model_copy(update={"memory_bytes": int(2.0e9), **ALL_FOR_TENSORS})
    model = ppo_cost(Cluster(1, 1), shape, small, new_tokens=Lengths.fixed(3000))
    found = heuristic_plan(Problem(make_graph(n_seqs=64, mini_batches=1), model))
    generate = assignments_of(found.plan)["actor_generate"]
    assert generate.micro_batches > 1
    assert shortfall(found.price, model) is None


def test_no_plan_is_built_whose_weights_alone_do_not_fit(make_graph, ppo_cost, llama, monkeypatch):
    """Each try is a plan of the whole cluster: where it has many devices, tries in vain take long."""
    tried: list[int] = []

    def counted(graph, model, assignments):
        tried.append(min(a.placement.strategy.tp * a.placement.strategy.pp for a in assignments.values()))
        return built(graph, model, assignments)

    built = baselines._plan
    monkeypatch.setattr(baselines, "_plan", counted)
    model = ppo_cost(Cluster(4, 8), llama(num_hidden_layers=80, hidden_size=6656, intermediate_size=17920))
    (weights,) = model.parameter_bytes("actor", Placement((0,), ParallelStrategy()))
    heuristic_plan(Problem(make_graph(n_seqs=512, mini_batches=1), model))
    assert tried[0] > 1
    assert min(tried) >= weights / model.classes.room_bytes(0)


def test_a_rule_ends_its_first_try_and_begins_no_other_after_the_deadline(make_graph, ppo_cost, llama):
    """Each try is a plan of the whole cluster. The first one of this problem does not fit, a later one does."""
    model = ppo_cost(Cluster(4, 8), llama(num_hidden_layers=80, hidden_size=6656, intermediate_size=17920))
    problem, polled = Problem(make_graph(n_seqs=512, mini_batches=1), model), list[bool]()
    past = Deadline(inf, lambda: not polled.append(True))
    with pytest.raises(PlanError, match="bytes"):
        heuristic_plan(problem, past)
    assert len(polled) == 1
    assert shortfall(heuristic_plan(problem).price, model) is None


def test_divisions_that_were_not_tried_in_time_are_not_said_to_fail(small_problem):
    past = Deadline(inf, lambda: True)
    with pytest.raises(PlanError, match="none of those tried in time fits"):
        colocated_choice(Tables(small_problem(Cluster(1, 1), memory=0.8e9)), past)


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
