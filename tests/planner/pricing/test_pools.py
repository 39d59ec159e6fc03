"""Pools: which devices they have, what is refused, and that no plan leaves them."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.pools import Pool, pools_of
from prefect_rlhf.planner.pricing.problem import ProblemError
from prefect_rlhf.planner.search.compiled.tables import Tables
from prefect_rlhf.planner.search.search import find_plan
from prefect_rlhf.rlhf_tasks.config.cluster import PlanningConfig, PoolConfig
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError

CALLS = ("actor_generate", "reward_inference", "actor_train")
TO_THE_END_S = 600.0


def pool(devices, *calls):
    return PoolConfig(devices=devices, calls=calls or ("actor",))


@pytest.mark.parametrize(
    ("pools", "cluster", "devices"),
    [
        ({"a": pool("0-2,5")}, Cluster(1, 8), {"a": {0, 1, 2, 5}}),
        ({"a": pool("hosts 1")}, Cluster(2, 4), {"a": {4, 5, 6, 7}}),
        ({"a": pool("any 2"), "b": pool("any 4", "ref")}, Cluster(1, 8), {"a": {0, 1}, "b": {4, 5, 6, 7}}),
        ({"a": pool("any 2"), "b": pool("0-1", "ref")}, Cluster(1, 4), {"a": {2, 3}, "b": {0, 1}}),
        ({"a": pool("0"), "b": pool("any 3", "ref")}, Cluster(1, 4), {"a": {0}, "b": {1, 2, 3}}),
        ({"a": pool("any 4")}, Cluster(2, 2), {"a": {0, 1, 2, 3}}),
    ],
)
def test_pools_have_the_devices_that_they_name_or_the_first_free_ones(make_graph, pools, cluster, devices):
    placed = pools_of(pools, make_graph(), cluster)
    assert {one.name: set(one.devices) for one in placed.values()} == devices


def test_a_role_means_all_its_calls(make_graph):
    placed = pools_of({"a": pool("0", "actor"), "b": pool("1", "ref_inference")}, make_graph(), Cluster(1, 2))
    assert {call: one.name for call, one in placed.items()} == {
        "actor_generate": "a",
        "actor_train": "a",
        "ref_inference": "b",
    }


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        (
            {"a": pool("0-1"), "b": pool("1-2", "ref")},
            "pools.a and planning.pools.b both have device 1. Give it to",
        ),
        ({"a": pool("3-4")}, "pools.a names device 4; the cluster has 0 to 3"),
        (
            {"a": pool("0-2"), "b": pool("any 2", "ref")},
            "pools.b asks for any 2 devices, but the cluster has 4, of",
        ),
        ({"a": pool("any 6")}, "pools.a asks for any 6 devices; a host has 4. Ask for whole hosts"),
        ({"a": pool("0", "judge")}, "pools.a.calls has 'judge', which is neither a role nor a call: actor, "),
        (
            {"a": pool("0"), "b": pool("1", "actor_train")},
            "actor_train is in planning.pools.a and in planning.pools.b",
        ),
    ],
)
def test_pools_that_overlap_or_do_not_fit_the_cluster_are_refused(make_graph, pools, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        pools_of(pools, make_graph(), Cluster(2, 4) if "any 6" in message else Cluster(1, 4))


def test_a_pool_prints_the_devices_that_it_has():
    assert str(Pool("a", frozenset({0, 1, 2, 6}))) == "pool 'a' (devices 0-2,6)"


@pytest.mark.parametrize("devices", ["", "any 0", "2-1", "gpu", "any", "0-3, 2"])
def test_devices_that_cannot_be_read_are_refused(devices):
    with pytest.raises(ValueError, match=r"pools\.a\.devices.*\n?.*Write 0-3,6, or hosts 0,2, or any 4"):
        PlanningConfig.model_validate({"pools": {"a": {"devices": devices, "calls": ["actor"]}}})


@pytest.fixture
def problem(small_problem):
    return small_problem(Cluster(1, 2), CALLS)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "pools",
    [
        {"actor_generate": {0}, "actor_train": {1}},
        {"actor_train": {1}},
        {"actor_generate": {0}, "actor_train": {0}, "reward_inference": {1}},
    ],
)
def test_the_search_is_as_good_as_the_best_choice_inside_the_pools(problem, pools):
    """By trying every choice of every call's options on all devices, those outside the pools left out."""
    named = {call: Pool("p", frozenset(devices)) for call, devices in pools.items()}
    within = replace(problem, pools=named)
    free = Tables(problem)
    inside = [
        [
            number
            for number, option in enumerate(options)
            if within.allows(call, range(option.first, option.first + option.size))
        ]
        for call, options in zip(free.calls, free.options, strict=True)
    ]
    assert any(len(some) < len(all_) for some, all_ in zip(inside, free.options, strict=True))
    values = [free.evaluate(np.array(choice)) for choice in product(*inside)]
    best_s = min(value.time_s for value in values if not value.excess_bytes)
    result = find_plan(within, "search", TO_THE_END_S)
    assert result.iteration_time_s == pytest.approx(best_s, rel=1e-9)
    assert result.lower_bound_s <= best_s * (1 + 1e-9)
    within.refuse(result.plan)
    unbound = find_plan(problem, "search", TO_THE_END_S)
    assert unbound.iteration_time_s < best_s, "the pools cost something, else they would prove nothing"
    with pytest.raises(
        ProblemError, match=r"Call '.*' is on device \d, which is not in its pool 'p' \(device \d\)"
    ):
        within.refuse(unbound.plan)


def test_a_pool_that_is_too_small_for_a_call_is_named_with_what_it_lacks(small_problem):
    tight = small_problem(Cluster(1, 2), CALLS, memory=0.32e9)
    find_plan(tight, "search", 2.0)
    within = replace(tight, pools={"actor_train": Pool("training", frozenset({1}))})
    with pytest.raises(
        ProblemError,
        match=r"'actor_train' fits no mesh of its pool 'training' \(device 1\) of a cluster of 1x2: .* lacks \d+ of",
    ):
        find_plan(within, "search", 2.0)
