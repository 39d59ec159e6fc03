"""The search of earlier work, as a baseline: Metropolis over choices (ReaL, arXiv:2406.14088, section 5.2).

It starts greedily, each call at its fastest, changes one call per proposal to any of its options alike, and
accepts with probability min(1, exp(-(change of time) / temperature)).
"""

from collections.abc import Iterator
from itertools import count

from planner.search.annealing import CHUNK, Neighbours, State, anneal, better, start_state, uniforms
from planner.search.bounds.root_bound import Cycles
from planner.search.compiled.tables import Tables

STEPS = 5_000  # proposals of a round
TEMPERATURE = 0.01  # as a share of the best time so far


def greedy_choice(tables: Tables) -> list[int]:
    """Every call at its fastest option, alone."""
    return [min(range(len(found)), key=lambda n, found=found: found[n].seconds) for found in tables.options]


def metropolis(tables: Tables, near: Neighbours, cycles: Cycles, seed: int) -> Iterator[tuple[State, int]]:
    """After each part of a round, without end: the best state so far, and the choices that the part priced."""
    best = state = start_state(tables, greedy_choice(tables))
    for number in count():
        heat = TEMPERATURE * best.time_s
        draws = uniforms(seed, "mcmc", number, STEPS)
        for step in range(0, STEPS, CHUNK):
            part = draws[step : step + CHUNK]
            found, state, n_priced = anneal(tables.arrays, near, cycles, state, part, heat, heat, False)
            best = better(best, found)
            yield best, n_priced
