"""A search finds what is below its threshold, in pieces as in one."""

from itertools import product

import numpy as np
import pytest

from planner.plan.mesh import Cluster
from planner.search.bounds.root_bound import call_cycles
from planner.search.bounds.tree_search import DONE, FOUND, begin_search, continue_search
from planner.search.branch_and_bound import proofs
from planner.search.compiled.tables import Tables

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes


def walked(found, threshold: float, nodes: int) -> tuple[list[tuple[float, tuple[int, ...]]], int]:
    """Every choice that a search finds, each faster than the one before, and the steps that it takes."""
    state, faster = begin_search(found.relaxation, found.to_options), []
    while True:
        code, time_s = continue_search(found.relaxation, found.tree, state, threshold, nodes)
        if code == DONE:
            return faster, int(state.counts[0])
        if code == FOUND:
            faster.append((time_s, tuple(state.found.tolist())))
            threshold = time_s * (1 - 1e-9)


@pytest.mark.parametrize("slower", [1, 100])
def test_a_walk_in_pieces_finds_the_same_and_the_best(small_problem, slower):
    calls = ("actor_generate", "critic_inference", "critic_train")
    tables = Tables(small_problem(Cluster(2, 2), calls, 2, links_slower=slower))
    found = proofs(tables, call_cycles(tables.problem.graph))
    values = [tables.evaluate(choice) for choice in product(*(range(len(own)) for own in tables.options))]
    times = [value.time_s for value in values if value.excess_bytes <= 0]
    whole = walked(found, 1.1 * float(np.median(times)), nodes=10**9)
    assert whole == walked(found, 1.1 * float(np.median(times)), nodes=0)
    assert len(whole[0]) > 1
    assert whole[0][-1][0] == pytest.approx(min(times), rel=1e-9)


def test_of_a_choices_offloaded_twins_the_fastest_is_found(small_problem):
    """One device that cannot hold both frozen models all the time: either may be away, or both."""
    calls = ("actor_generate", "ref_inference", "reward_inference", "actor_train")
    tables = Tables(small_problem(Cluster(1, 1), calls, 1, 0.9e9))
    found = proofs(tables, call_cycles(tables.problem.graph))
    values = [tables.evaluate(choice) for choice in product(*(range(len(own)) for own in tables.options))]
    times = [value.time_s for value in values if value.excess_bytes <= 0]
    (*_, (fastest_s, _)), _ = walked(found, 1.5 * max(times), nodes=10**9)
    assert fastest_s == pytest.approx(min(times), rel=1e-9)
