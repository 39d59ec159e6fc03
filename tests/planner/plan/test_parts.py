"""Calls that are cut into parts: one call and one assignment, a node for each part, and what that is worth."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from prefect_rlhf.planner.plan.build import PlanError, build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph, GraphError
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.order import call_orders, levels, node_order
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.report import plan_document
from prefect_rlhf.planner.search.bounds.cycles import call_cycles
from prefect_rlhf.planner.search.compiled.tables import Tables
from prefect_rlhf.planner.search.search import bound_of, find_plan
from prefect_rlhf.rlhf_tasks.algorithms.grpo import in_rounds
from prefect_rlhf.rlhf_tasks.algorithms.registry import in_parts
from prefect_rlhf.rlhf_tasks.spec import (
    CallAssignment,
    Decision,
    ExecutionPlan,
    ModelFunctionCall,
    Part,
    TransferNode,
)

MORE = Decision(name="more", function="math:floor", each_part=True)
SCORING = ("reward_inference", "ref_inference", "critic_inference")


def cut(graph: DataflowGraph, chunks: int) -> DataflowGraph:
    return DataflowGraph(in_parts(graph.calls, chunks), graph.dataset_keys, name=graph.name)


@pytest.fixture
def side_by_side(make_graph, assign) -> dict[str, CallAssignment]:
    """Generation and the actor's training on one device, all else on another."""
    return {
        call.name: assign(
            [0] if call.role == "actor" else [1], micro_batches=4 if call.mini_batches > 1 else 1
        )
        for call in make_graph().calls
    }


@pytest.fixture
def plan_of(make_graph, side_by_side) -> Callable[[int], ExecutionPlan]:
    def make(chunks: int) -> ExecutionPlan:
        graph = cut(make_graph(), chunks)
        return build_plan(graph, side_by_side, Cluster(1, 2), call_order=[c.name for c in graph.calls])

    return make


def test_all_is_cut_but_training_and_what_reads_it():
    def call(name: str, kind: str, inputs: tuple[str, ...], output: str) -> ModelFunctionCall:
        return ModelFunctionCall(
            name=name,
            role=name,
            kind=kind,
            inputs=inputs,
            outputs=(output,),
            n_seqs=8,  # type: ignore[arg-type]
        )

    calls = [
        call("draw", "generate", ("prompt_ids",), "a_ids"),
        call("score", "inference", ("a_ids",), "b"),
        call("learn", "train_step", ("a_ids", "b"), "c"),
        call("after", "inference", ("a_ids", "c"), "d"),
        call("last", "inference", ("d",), "e"),
    ]
    assert [c.chunks for c in in_parts(calls, 4)] == [4, 4, 1, 1, 1]
    assert in_parts(calls, 1) == calls
    assert in_parts(calls, 4)[0].nodes == ("draw_0", "draw_1", "draw_2", "draw_3")


def test_a_part_is_consecutive_samples():
    assert [list(Part(number, 3).ids(range(10, 16))) for number in range(3)] == [[10, 11], [12, 13], [14, 15]]


def test_each_part_waits_for_its_own_samples_and_training_for_all(plan_of):
    plan = plan_of(2)
    assert {call: len(nodes) for call, nodes in plan.calls.items() if len(nodes) > 1} == dict.fromkeys(
        ("actor_generate", *SCORING), 2
    )
    for part in (0, 1):
        transfer = plan.node(f"transfer_actor_generate_to_reward_inference_{part}")
        assert isinstance(transfer, TransferNode)
        assert transfer.part == (part, 2)
        assert f"actor_generate_{part}" in transfer.after
        assert f"actor_generate_{1 - part}" not in transfer.after
        assert plan.node(f"reward_inference_{part}").part == (part, 2)
    moved = [n for n in plan.nodes if isinstance(n, TransferNode) and n.consumer == "actor_train"]
    (whole,) = [node for node in moved if "scores" in node.keys]
    assert whole.part == (0, 1)
    assert any(name.endswith("_inference_1") for name in whole.after)


def test_scoring_of_a_part_stands_before_the_next_part_is_generated(plan_of):
    """The transfer too: the device that generates sends before it continues."""
    names = [node.name for node in plan_of(4).nodes]
    for part in range(3):
        following = names.index(f"actor_generate_{part + 1}")
        assert names.index(f"transfer_actor_generate_to_reward_inference_{part}") < following
        for call in SCORING:
            assert names.index(f"{call}_{part}") < following


def test_parts_share_their_calls_depth_and_follow_each_other(make_graph):
    graph = cut(make_graph(), 2)
    level = levels(graph)
    assert level["actor_generate_0"] < level["ref_inference_0"] < level["actor_generate_1"]
    assert level["ref_inference_1"] < level["actor_train"]
    for order in call_orders(graph)[:5]:
        nodes = node_order(graph, order)
        assert len(set(nodes)) == 2 * 4 + 2
        assert nodes[:4] == [f"{name}_0" for name in order[:4]]


def test_a_part_costs_what_its_samples_cost(make_graph, ppo_cost, assign):
    """Half the sequences: at most all of the whole's time, at least half of it."""
    model, place = ppo_cost(Cluster(1, 2)), assign([0, 1], dp=2)
    for name in ("actor_generate", *SCORING):
        whole, half = make_graph().call(name), cut(make_graph(), 2).call(name)
        alone = whole.model_copy(update={"n_seqs": whole.n_seqs // 2})
        assert model.call(half, place) == model.call(alone, place)
        assert model.call(whole, place).seconds / 2 <= model.call(half, place).seconds
        assert model.call(half, place).seconds <= model.call(whole, place).seconds


def test_parts_shorten_an_iteration_where_scoring_has_devices_of_its_own(
    plan_of, make_graph, side_by_side, ppo_cost, assign
):
    model = ppo_cost(Cluster(1, 2))
    times = [price_plan(plan_of(chunks), model).iteration_time_s for chunks in (1, 2, 4)]
    assert times[1] < 0.99 * times[0]
    graph = cut(make_graph(), 2)
    by_search = build_plan(graph, side_by_side, Cluster(1, 2))  # without an order of the calls
    assert price_plan(by_search, model).iteration_time_s < 0.99 * times[0]
    together = {
        name: assign([0, 1], dp=2, micro_batches=given.micro_batches) for name, given in side_by_side.items()
    }
    alike = [
        price_plan(build_plan(cut(make_graph(), chunks), together, Cluster(1, 2)), model).iteration_time_s
        for chunks in (1, 2)
    ]
    assert alike[1] >= alike[0] * (1 - 1e-9), "nothing runs beside anything"


def test_a_plan_names_a_call_once(plan_of, make_graph):
    document = plan_document(plan_of(4))
    assert list(document) == [call.name for call in make_graph().calls]


def test_a_part_has_a_group_for_each_replica(make_graph, assign):
    graph = cut(make_graph(n_seqs=8, mini_batches=1), 4)
    places = dict.fromkeys((call.name for call in graph.calls), assign([0, 1], dp=2))
    build_plan(graph, places, Cluster(1, 2))
    places["actor_generate"] = assign([0, 1, 2, 3], dp=4)
    with pytest.raises(PlanError, match=r"batch of 8 sequences is smaller than dp=4 x 4 parts = 16"):
        build_plan(graph, places, Cluster(1, 4))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("actor_train", {"chunks": 2}, "'actor_train' trains: it takes all samples"),
        ("actor_generate", {"chunks": 3}, "cuts 64 sequences into 3 parts, which would not be equal"),
        ("ref_inference", {"chunks": 2}, "'actor_generate', which makes 'input_ids' for it, into 1"),
        ("ref_inference", {"when": "more"}, "'ref_inference' runs by 'more', which no call decides"),
        (
            "ref_inference",
            {"decides": (MORE,), "when": "more"},
            "in 1 parts runs by 'more', which .* decides in 1",
        ),
    ],
)
def test_graphs_that_cannot_be_cut_so_are_refused(make_graph, name, changes, message):
    graph = make_graph()
    calls = [c.model_copy(update=changes) if c.name == name else c for c in graph.calls]
    with pytest.raises(GraphError, match=message):
        DataflowGraph(calls, graph.dataset_keys)


def test_rounds_follow_each_other_by_their_scores(make_graph, assign):
    """No score moves: what the rounds before have brought is decided on the controller, and awaited by edges."""
    sizes = {"beta": 0.1, "mask_truncated_completions": False, "max_rounds": 1}
    graph = make_graph("grpo", n_seqs=16, **sizes)
    graph = DataflowGraph(in_rounds(graph.calls, 3), graph.dataset_keys, name="grpo")
    assert graph.n_seqs == 48
    places = {c.name: assign([1] if c.name == "reward_inference" else [0]) for c in graph.calls}
    plan = build_plan(graph, places, Cluster(1, 2), call_order=[c.name for c in graph.calls])
    assert not [n for n in plan.nodes if isinstance(n, TransferNode) and n.consumer == "actor_generate"]
    assert plan.n_seqs == 48
    for made in (plan, build_plan(graph, dict.fromkeys(places, assign([0])), Cluster(1, 1))):
        assert "reward_inference_1" in made.node("actor_generate_2").after
        assert "reward_inference_0" not in made.node("ref_inference_0").after


# What is certified


def test_of_the_cut_calls_on_a_cycle_one_counts_whole(make_graph):
    graph = cut(make_graph(), 4)
    names = [call.name for call in graph.calls]
    cycles = call_cycles(graph)
    of_ref = {
        tuple(row[names.index(name)] for name in ("actor_generate", "ref_inference", "actor_train"))
        for row, delay in zip(cycles.members, cycles.delays, strict=True)
        if delay == 1 and row[names.index("ref_inference")] and row[names.index("actor_train")]
    }
    assert of_ref == {(1.0, 0.25, 1.0), (0.25, 1.0, 1.0)}


def test_no_plan_beats_the_bound_of_a_graph_in_parts(small_problem):
    """Against every choice of options of three calls on two devices."""
    problem = small_problem(Cluster(1, 2), ["actor_generate", "reward_inference", "actor_train"], n_seqs=8)
    tables = Tables(Problem(cut(problem.graph, 4), problem.model))
    bound_s, rng = bound_of(tables), np.random.default_rng(0)
    choices = list(product(*(range(len(options)) for options in tables.options)))
    some = [choices[i] for i in rng.permutation(len(choices))[:400]]
    best = min(tables.evaluate(choice).time_s for choice in some)
    assert 0 < bound_s <= best * (1 + 1e-9)
    found = find_plan(Problem(cut(problem.graph, 4), problem.model), "search", 2.0)
    assert bound_s * (1 - 1e-9) <= found.lower_bound_s <= found.iteration_time_s <= best * (1 + 1e-9)
