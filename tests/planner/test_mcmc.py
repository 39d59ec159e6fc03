from itertools import islice

from planner.anneal import neighbours, start_state
from planner.bound import call_cycles
from planner.mcmc import greedy_choice, metropolis
from planner.mesh import Cluster
from planner.tables import Tables


def test_it_starts_greedily(small_problem):
    tables = Tables(small_problem(Cluster(2, 2)))
    for options, number in zip(tables.options, greedy_choice(tables), strict=True):
        assert options[number].seconds == min(option.seconds for option in options)


def test_chains_are_repeatable_and_never_lose_their_best(small_problem):
    tables = Tables(small_problem(Cluster(2, 2)))
    near, cycles = neighbours(tables), call_cycles(tables.problem.graph)
    chains = [[s.time_s for s, _ in islice(metropolis(tables, near, cycles, seed), 3)] for seed in (0, 0, 1)]
    assert chains[0] == chains[1] != chains[2]
    assert chains[0] == sorted(chains[0], reverse=True)
    assert chains[0][-1] < start_state(tables, greedy_choice(tables)).time_s
