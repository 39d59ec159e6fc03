"""Which rank scores a sample is known before it has been drawn, but for some plans."""

from typing import Any

import pytest

from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.rank.samples import scored_here
from prefect_rlhf.rlhf_tasks.spec import CallAssignment, CallNode, ExecutionPlan
from tests.rlhf_tasks.roles_in_layouts import place

N = 8
BOTH = place([0, 1], dp=2)


def plan_of(
    kind: str = "grpo", n: int = 2, scoring: Any = BOTH, balance: Any = "count", **changes: Any
) -> ExecutionPlan:
    """All calls on two ranks, but for those that score."""
    config = make_config(
        {
            "type": kind,
            "models": {"actor": "a"},
            "data": {"train": "d"},
            "rewards": [{"function": "m:f"}],
            "sampling": {"max_completion_length": 4, **changes.pop("sampling", {})},
            "total_iterations": 1,
            "batch_size": N,
            "num_mini_batches": 1,
            **({"num_generations": 2} if kind == "grpo" else {}),
            **changes,
        }
    )
    known = algorithm(kind)
    calls = known.calls(config)
    assignments = {
        call.name: CallAssignment(placement=scoring, balance=balance)
        if "reward" in call.name
        else CallAssignment(placement=BOTH)
        for call in calls
    }
    return build_plan(DataflowGraph(calls, known.dataset_keys), assignments, Cluster(1, n))


def found(plan: ExecutionPlan, node: str = "actor_generate") -> list[dict[int, int]]:
    """Of iteration 1 on each rank."""
    whole = range(plan.n_seqs, 2 * plan.n_seqs)
    call = plan.node(node)
    assert isinstance(call, CallNode)
    return [scored_here(plan, call, whole, rank) for rank in range(plan.n_devices)]


def numbered(*samples: int) -> dict[int, int]:
    return {sample: number for number, sample in enumerate(samples)}


def test_where_both_calls_have_one_placement_each_rank_scores_what_it_draws():
    assert found(plan_of()) == [numbered(8, 9, 12, 13), numbered(10, 11, 14, 15)]


@pytest.mark.parametrize("balance", ["count", "tokens"])
def test_where_one_rank_scores_all_it_scores_its_own_samples_among_them(balance: str):
    assert found(plan_of(scoring=place([1]), balance=balance)) == [{}, numbered(*range(8, 16))]


def test_where_other_ranks_score_none_is_scored_here():
    plan = plan_of(n=4, scoring=place([2, 3], dp=2))
    assert found(plan)[:2] == [{}, {}]


def test_where_tokens_are_balanced_nobody_knows_before_all_are_drawn():
    assert found(plan_of(balance="tokens")) == [{}, {}]


def test_in_segments_a_sample_is_dealt_when_it_has_ended():
    assert found(plan_of(sampling={"segment_tokens": 2})) == [{}, {}]


def test_of_a_part_those_of_the_same_part():
    plan = plan_of(chunks=2)
    assert found(plan, "actor_generate_1") == [numbered(12, 13), numbered(14, 15)]


def test_each_of_two_generations_has_the_call_that_scores_its_samples():
    plan = plan_of("remax")
    every = [numbered(8, 10, 12, 14), numbered(9, 11, 13, 15)]
    assert found(plan) == found(plan, "greedy_generate") == every


def test_a_call_that_draws_nothing_asks_nothing():
    assert found(plan_of(), "reward_inference") == [{}, {}]
