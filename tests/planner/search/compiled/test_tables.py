"""What a choice costs, compared with the plan that is built from it."""

import gc
import random

import pytest

from planner.plan.mesh import Cluster
from planner.pricing.plans import price_plan
from planner.pricing.problem import Problem
from planner.search.compiled.tables import Tables, uncollected


@pytest.fixture
def small(make_graph, ppo_cost, llama):
    """PPO of four tiny models on a small cluster."""

    def make(hosts=1, devices=4) -> Tables:
        shape = llama(
            hidden_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=1024,
            vocab_size=1000,
        )
        return Tables(Problem(make_graph(n_seqs=16), ppo_cost(Cluster(hosts, devices), shape)))

    return make


def test_a_choice_costs_what_its_plan_costs(small):
    tables = small()
    rng = random.Random(1)
    for _ in range(3):
        choice = [rng.randrange(len(options)) for options in tables.options]
        value = tables.evaluate(choice)
        price = price_plan(tables.plan(choice), tables.problem.model)
        assert value.time_s == pytest.approx(price.iteration_time_s, rel=1e-9)
        assert value.excess_bytes == 0


def test_the_best_of_all_orders_is_taken(small):
    tables = small()
    assert len(tables.orders) == 12
    assert tables.orders[0] == tables.calls


def test_the_garbage_collector_is_on_again_after_a_pause():
    def fail():
        with uncollected():
            assert not gc.isenabled()
            with uncollected():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()
