from itertools import islice

import pytest

from planner.plan.mesh import Cluster
from planner.search.annealing import neighbours, start_state
from planner.search.bounds.root_bound import call_cycles
from planner.search.compiled.tables import Tables
from planner.search.mcmc import greedy_choice, metropolis

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes


def test_it_starts_greedily(small_problem):
    tables = Tables(small_problem(Cluster(2, 2)))
    for options, number in zip(tables.options, greedy_choice(tables), strict=True):
        assert options[number].seconds == min(option.seconds for option in options)


def test_chains_are_repeatable_and_never_lose_their_best(small_problem):
    tables = Tables(small_problem(Cluster(2, 2)))
    near, cycles = neighbours(tables), call_cycles(tables.problem.graph)
    chains = [list(islice(metropolis(tables, near, cycles, seed), 3)) for seed in (0, 0, 1)]
    times, counts = ([[step[i] for step in chain] for chain in chains] for i in (0, 1))
    times = [[state.time_s for state in chain] for chain in times]
    assert (times[0], counts[0]) == (times[1], counts[1])
    assert counts[0] != counts[2]
    assert times[0] == sorted(times[0], reverse=True)
    assert times[0][-1] < start_state(tables, greedy_choice(tables)).time_s
