from collections import Counter
from itertools import islice

import numpy as np
import pytest

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.search import annealing as module
from prefect_rlhf.planner.search.annealing import (
    ACCEPTED,
    AGREE,
    ALIKE,
    CALL,
    CHUNK,
    DRAWS,
    FIRST,
    PAIRED,
    PEER,
    STEPS,
    WHERE,
    anneal,
    annealing,
    better,
    descend,
    greedy_choice,
    metropolis,
    neighbours,
    polishing,
    start_state,
    uniforms,
)
from prefect_rlhf.planner.search.bounds.cycles import call_cycles
from prefect_rlhf.planner.search.compiled.tables import Tables

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes


def test_uniforms_are_a_pure_function_of_seed_purpose_and_round():
    first = uniforms(3, "annealing", 1, 1000)
    assert first.shape == (1000, DRAWS)
    assert np.array_equal(first, uniforms(3, "annealing", 1, 1000))
    assert not np.array_equal(first, uniforms(4, "annealing", 1, 1000))
    assert not np.array_equal(first, uniforms(3, "annealing", 2, 1000))
    assert 0 <= first.min() < first.max() < 1
    assert abs(first.mean() - 0.5) < 0.02


def test_neighbours_hold_every_option_once(small_problem):
    tables = Tables(small_problem(Cluster(2, 2)))
    near = neighbours(tables)
    for call, options in enumerate(tables.options):
        found = []
        for mesh in range(near.start[call], near.start[call + 1]):
            numbers = near.by_speed[near.begin[mesh] : near.begin[mesh + 1]]
            assert {(options[n].first, options[n].size) for n in numbers} == {
                (near.first[mesh], near.size[mesh])
            }
            assert sorted(numbers, key=lambda n: options[n].seconds) == list(numbers)
            found += list(numbers)
        assert sorted(found) == list(range(len(options)))


def test_rounds_only_get_better_and_states_are_priced_right(small_problem):
    tables = Tables(small_problem(Cluster(2, 2)))
    cycles, near = call_cycles(tables.problem.graph), neighbours(tables)
    start = greedy_choice(tables)
    states = [state for state, _ in annealing(tables, near, cycles, [start], seed=0)]
    times = [state.time_s for state in states]
    assert times == sorted(times, reverse=True)
    assert times[-1] < start_state(tables, start).time_s
    assert tables.evaluate(states[-1].choice)[:2] == (times[-1], 0)
    *_, (final, _) = polishing(tables, near, cycles, states[-1], 0, 0)
    assert final.time_s <= times[-1]


def test_annealing_ends_when_enough_rounds_have_met_the_best_plan(small_problem):
    """Few options: every round meets the same best plan."""
    tables = Tables(small_problem(Cluster(1, 2), ("actor_generate", "actor_train"), 1))
    cycles, near = call_cycles(tables.problem.graph), neighbours(tables)
    states = [state for state, _ in annealing(tables, near, cycles, [greedy_choice(tables)], seed=0)]
    parts = sum(steps // CHUNK for steps in STEPS[:AGREE])
    descents = AGREE * len(tables.calls)  # no call has a better option
    assert len(states) == parts + descents


def test_a_cold_round_never_gets_worse(small_problem):
    """Without heat nothing slower is accepted: the last state is as fast as the best one."""
    tables = Tables(small_problem(Cluster(1, 4)))
    start = start_state(tables, greedy_choice(tables))
    cycles, near = call_cycles(tables.problem.graph), neighbours(tables)
    best, last, n_priced = anneal(
        tables.arrays, near, cycles, start, uniforms(0, "x", 0, 2000), 1e-9, 1e-9, True
    )
    assert last.time_s == pytest.approx(best.time_s, rel=1e-6)
    assert last.excess_bytes == best.excess_bytes
    assert best.time_s < start.time_s
    assert 0 < n_priced < 2000


def test_which_option_is_proposed_is_drawn_apart_from_whether_it_is_like_the_peers(small_problem):
    """Proposals for one call on its own mesh, whose peer is itself. All are accepted: it is hot."""
    tables = Tables(small_problem(Cluster(1, 4)))
    near, cycles, call, n = neighbours(tables), call_cycles(tables.problem.graph), 1, 3000
    mesh = near.start[call] + np.argmax(np.diff(near.begin)[near.start[call] : near.start[call + 1]])
    ranked = near.by_speed[near.begin[mesh] : near.begin[mesh + 1]].tolist()
    strategies = [tables.options[call][option].strategy for option in ranked]
    start = start_state(tables, changed(greedy_choice(tables), call, ranked[-1]))
    draws = uniforms(0, "x", 0, n)
    draws[:, [ACCEPTED, PAIRED, FIRST + WHERE]] = (0.5, 0.99, 0.0)
    draws[:, [FIRST + CALL, FIRST + PEER]] = (call + 0.5) / len(tables.calls)
    proposed = Counter()
    for step in range(n):
        _, last, _ = anneal(tables.arrays, near, cycles, start, draws[step : step + 1], 1e9, 1e9, True)
        proposed[ranked.index(last.choice[call])] += 1
    shares = (1 - ALIKE) * np.diff(np.sqrt(np.arange(len(ranked) + 1) / len(ranked)))
    shares[strategies.index(strategies[-1])] += ALIKE
    found = [proposed[rank] / n for rank in range(len(ranked))]
    assert len(ranked) > 11, "where fewer share a mesh, the fastest is met anyway"
    assert found == pytest.approx(shares.tolist(), abs=4 * 0.5 / n**0.5)


def changed(choice, call, option):
    return [*choice[:call], option, *choice[call + 1 :]]


def test_a_descent_gives_a_call_its_best_option(small_problem):
    tables = Tables(small_problem(Cluster(2, 2)))
    cycles, choice = call_cycles(tables.problem.graph), [len(options) - 1 for options in tables.options]
    start = start_state(tables, choice)
    assert start.excess_bytes == 0
    for call, options in enumerate(tables.options):
        states = [start_state(tables, changed(choice, call, number)) for number in range(len(options))]
        least = min(state.time_s for state in states if state.excess_bytes == 0)
        best, _ = descend(tables.arrays, neighbours(tables), cycles, start, call)
        assert (best.excess_bytes, best.time_s) == (0, least)
        barred = call, options[best.choice[call]].first, options[best.choice[call]].size
        other, _ = descend(tables.arrays, neighbours(tables, barred), cycles, start, call)
        assert tuple(barred[1:]) != options[other.choice[call]][:2] or other.choice[call] == choice[call]


def test_no_call_has_a_better_option_at_the_end_of_a_round(small_problem, monkeypatch):
    """Too short a round to settle by itself."""
    monkeypatch.setattr(module, "STEPS", (CHUNK,))
    tables = Tables(small_problem(Cluster(2, 2)))
    cycles, near = call_cycles(tables.problem.graph), neighbours(tables)
    start = start_state(tables, greedy_choice(tables))
    *_, (state, _) = polishing(tables, near, cycles, start, 0, 0)
    choice = state.choice.tolist()
    for call, options in enumerate(tables.options):
        for number in range(len(options)):
            other = start_state(tables, changed(choice, call, number))
            assert (other.excess_bytes, other.time_s * (1 + 1e-9)) >= (state.excess_bytes, state.time_s)


def test_missing_memory_ranks_before_time(small_problem):
    state = start_state(Tables(small_problem(Cluster(1, 1))), [0] * 6)
    assert better(state._replace(excess_bytes=1.0), state) is state
    slow = state._replace(time_s=9 * state.time_s)
    assert better(slow, state) is state


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
