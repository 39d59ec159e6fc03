"""Branch and bound against enumeration, and its bound against exact prices."""

from itertools import pairwise, product
from time import monotonic

import numpy as np
import pytest
from numba import njit

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing import problem as deadlines
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.planner.pricing.problem import Deadline, Problem
from prefect_rlhf.planner.search import branch_and_bound as branch
from prefect_rlhf.planner.search.annealing import greedy_choice, neighbours, start_state
from prefect_rlhf.planner.search.bounds.cycles import call_cycles
from prefect_rlhf.planner.search.branch_and_bound import (
    DONE,
    FOUND,
    GROUP_STEP,
    LOOK_S,
    NODES,
    PAUSED,
    begin_search,
    bounds_by_groups,
    branching,
    continue_search,
    search_tree,
)
from prefect_rlhf.planner.search.compiled.tables import Tables
from prefect_rlhf.planner.search.search import bound_of
from prefect_rlhf.rlhf_tasks.algorithms.registry import in_parts
from prefect_rlhf.rlhf_tasks.spec import OnloadNode
from tests.planner.ahead import SAMPLE_AND_LEARN, problem_ahead_by
from tests.planner.random_problems import enumerated, random_problem, with_memory

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes


def proved(tables: Tables):
    """(best state, lower bound) of branch and bound that starts from the greedy choice and runs to its end."""
    start, cycles = start_state(tables, greedy_choice(tables)), call_cycles(tables.problem.graph)
    steps = branching(
        tables,
        neighbours(tables),
        cycles,
        search_tree(tables, cycles),
        [],
        start,
        bound_of(tables),
        0,
        Deadline(monotonic() + 600),
    )
    *_, (state, lower_bound_s, _) = steps
    return state, lower_bound_s


SCORED = ("actor_generate", "ref_inference", "reward_inference", "actor_train")


@pytest.mark.parametrize(
    ("cluster", "calls", "max_tp", "memory"),
    [
        (Cluster(1, 8), ("actor_generate", "ref_inference", "actor_train"), 1, 80e9),
        (Cluster(1, 8), ("actor_generate", "actor_train"), 8, 0.5e9),
        pytest.param(Cluster(1, 8), SCORED, 1, 80e9, marks=pytest.mark.slow),
        (Cluster(2, 2), ("actor_generate", "critic_inference", "critic_train"), 2, 0.6e9),
        (Cluster(2, 2), ("actor_generate", "ref_inference", "critic_inference", "critic_train"), 1, 80e9),
        (Cluster(1, 1), SCORED, 1, 0.9e9),
        (Cluster(1, 2), SCORED, 1, 0.5e9),
    ],
)
def test_equals_enumeration(small_problem, cluster, calls, max_tp, memory):
    tables = Tables(small_problem(cluster, calls, max_tp, memory))
    state, lower_bound_s = proved(tables)
    best = enumerated(tables)
    assert state.excess_bytes == 0
    assert state.time_s == pytest.approx(best, rel=1e-9)
    assert lower_bound_s == pytest.approx(best, rel=2e-9)


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize(
    "cluster", [Cluster(1, 2), pytest.param(Cluster(2, 2), marks=pytest.mark.slow)], ids=str
)
def test_equals_enumeration_where_generation_runs_ahead(small_problem, cluster, staleness):
    tables = Tables(problem_ahead_by(staleness, small_problem(cluster, SAMPLE_AND_LEARN, 1)))
    state, lower_bound_s = proved(tables)
    best = enumerated(tables)
    assert state.time_s == pytest.approx(best, rel=1e-9)
    assert lower_bound_s == pytest.approx(best, rel=2e-9)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("cluster", "links_slower"),
    [(Cluster(1, 2), 1.0), (Cluster(1, 2), 240.0), pytest.param(Cluster(2, 2), 20.0, marks=pytest.mark.slow)],
    ids=str,
)
def test_equals_enumeration_where_calls_are_cut_into_parts(small_problem, cluster, links_slower, staleness):
    problem = problem_ahead_by(
        staleness, small_problem(cluster, SCORED, 1, n_seqs=8, links_slower=links_slower)
    )
    parts = DataflowGraph(in_parts(problem.graph.calls, 2), problem.graph.dataset_keys, name="parts")
    tables = Tables(Problem(parts, problem.model))
    state, lower_bound_s = proved(tables)
    best = enumerated(tables)
    assert state.time_s == pytest.approx(best, rel=1e-9)
    assert lower_bound_s == pytest.approx(best, rel=2e-9)


@pytest.mark.parametrize(
    ("cluster", "memory"),
    [
        pytest.param(Cluster(2, 2), 80e9, marks=pytest.mark.whole),
        (Cluster(1, 2), 80e9),
        (Cluster(1, 2), 0.79e9),
        (Cluster(1, 2), 0.45e9),
    ],
)
def test_equals_enumeration_on_all_six_calls_of_ppo(small_problem, cluster, memory):
    """Two sequences; with little memory frozen models may be offloaded, with less both train_steps must be."""
    tables = Tables(small_problem(cluster, None, 1, memory, n_seqs=2))
    assert len(tables.calls) == 6
    state, lower_bound_s = proved(tables)
    best = enumerated(tables)
    assert state.excess_bytes == 0
    assert state.time_s == pytest.approx(best, rel=1e-9)
    assert lower_bound_s == pytest.approx(best, rel=2e-9)


@pytest.mark.whole
def test_equals_enumeration_where_a_host_has_no_memory_for_the_best_plan(small_problem):
    """Two hosts of one device keep copies for commits and offloaded models. They have a bit less memory than the best
    plan keeps on the fuller one."""

    def of_host(tables, state):
        price = price_plan(tables.plan(state.choice.tolist()), tables.problem.model)
        return max(sum(parts.values()) for parts in price.hosts.values())

    wide = Tables(small_problem(Cluster(2, 1), None, 1, 0.8e9, n_seqs=2))
    best, _ = proved(wide)
    host_memory = of_host(wide, best) - 1000
    tight = Tables(small_problem(Cluster(2, 1), None, 1, 0.8e9, n_seqs=2, host_memory=host_memory))
    assert tight.evaluate(best.choice.tolist()).excess_bytes == pytest.approx(1000, abs=1)
    state, lower_bound_s = proved(tight)
    assert (state.excess_bytes, of_host(tight, state) <= host_memory) == (0, True)
    assert state.time_s == pytest.approx(enumerated(tight), rel=1e-9)
    assert state.time_s > best.time_s
    assert lower_bound_s == pytest.approx(state.time_s, rel=2e-9)


@pytest.mark.parametrize("memory", [80e9, 0.7e9, 0.6e9])
def test_equals_enumeration_of_options_that_none_was_pruned_of(small_problem, monkeypatch, memory):
    """Options that another one matches in time and memory are left out of the search: no plan gets worse."""
    problem = small_problem(
        Cluster(1, 2), ("actor_generate", "ref_inference", "actor_train"), 2, memory, n_seqs=64
    )
    tables = Tables(problem)
    state, _ = proved(tables)
    monkeypatch.setattr("prefect_rlhf.planner.pricing.options._pareto", list)
    every = Tables(problem)
    assert sum(map(len, every.options)) > sum(map(len, tables.options))
    assert state.excess_bytes == 0
    assert state.time_s == pytest.approx(enumerated(every), rel=1e-9)


@pytest.mark.parametrize("option_s", [1e-6, 1e-4, 1e-2])
def test_a_walk_looks_at_the_clock_more_often_where_options_take_longer(small_problem, monkeypatch, option_s):
    """A search without end, by a clock on which each option takes so long: it ends soon after its share of the time
    (it has more than its first look's worth of it), without a look at the clock every few options."""
    now, looks = [0.0], [0]

    def continue_search(tree, search, threshold, nodes):
        now[0] += nodes * option_s
        return PAUSED, np.inf

    def monotonic():
        looks[0] += 1
        return now[0]

    tables = Tables(small_problem(Cluster(1, 2)))
    tree = search_tree(tables, call_cycles(tables.problem.graph))
    monkeypatch.setattr(branch, "continue_search", continue_search)
    for module in (branch, deadlines):
        monkeypatch.setattr(module, "monotonic", monotonic)
    (bound_s,) = bounds_by_groups(tree, 0.0, Deadline(100.0))
    assert list(bounds_by_groups(tree, 2 * bound_s, Deadline(100.0))) == [bound_s]
    assert 90 < now[0] < 100 + NODES * option_s
    assert looks[0] < 2 * now[0] / LOOK_S


def test_a_walk_that_is_called_off_ends_at_its_next_look(small_problem, monkeypatch):
    asked = [0]

    def called_off():
        asked[0] += 1
        return asked[0] > 3

    monkeypatch.setattr(branch, "continue_search", lambda *_: (PAUSED, np.inf))
    tables = Tables(small_problem(Cluster(1, 2)))
    tree = search_tree(tables, call_cycles(tables.problem.graph))
    (bound_s,) = bounds_by_groups(tree, 0.0, Deadline(monotonic() + 3600))
    assert list(bounds_by_groups(tree, 2 * bound_s, Deadline(monotonic() + 3600, called_off))) == [bound_s]
    assert asked[0] == 5


def test_more_memory_and_more_options_are_never_worse(small_problem):
    calls = ("actor_generate", "ref_inference", "actor_train")
    times = [
        proved(Tables(small_problem(Cluster(1, 4), calls, max_tp, memory)))[0].time_s
        for max_tp, memory in ((1, 0.27e9), (1, 80e9), (4, 80e9))
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


@pytest.mark.parametrize(("memory", "offloads"), [(0.9e9, True), (0.95e9, False)])
def test_roles_are_offloaded_where_memory_lacks_and_only_there(small_problem, memory, offloads):
    """One device: with 0.9 GB it cannot hold both frozen models all the time, with 0.95 it can."""
    tables = Tables(small_problem(Cluster(1, 1), SCORED, 1, memory))
    state, _ = proved(tables)
    chosen = [options[number] for options, number in zip(tables.options, state.choice, strict=True)]
    assert state.excess_bytes == 0
    assert any(option.offload for option in chosen) == offloads
    plan = tables.plan(state.choice.tolist())
    assert any(isinstance(node, OnloadNode) for node in plan.nodes) == offloads
    resident = [[i for i, option in enumerate(own) if not option.offload] for own in tables.options]
    values = [tables.evaluate(choice) for choice in product(*resident)]
    fitting = [value.time_s for value in values if value.excess_bytes <= 0]
    assert bool(fitting) != offloads
    assert state.time_s <= min(fitting, default=np.inf) * (1 + 1e-9)


@pytest.mark.parametrize(("cluster", "memory"), [(Cluster(1, 1), 0.4e9), (Cluster(1, 2), 0.24e9)], ids=str)
def test_equals_enumeration_where_generation_fits_only_while_the_critic_is_in_host_memory(
    small_problem, cluster, memory
):
    calls = ("actor_generate", "critic_inference", "critic_train")
    tables = Tables(small_problem(cluster, calls, None, memory, n_seqs=2))
    state, lower_bound_s = proved(tables)
    best = enumerated(tables)
    assert state.excess_bytes == 0
    assert state.time_s == pytest.approx(best, rel=1e-9)
    assert lower_bound_s == pytest.approx(best, rel=2e-9)
    plan, model = tables.plan(state.choice.tolist()), tables.problem.model
    place, price = plan.node("critic_train").placement, price_plan(plan, model)
    assert price.iteration_time_s == pytest.approx(state.time_s)
    assert ("critic", place) in plan.onloaded
    held = price.call_bytes["actor_generate"]
    assert held <= memory < held + max(model.parameter_bytes("critic", place))
    assert "critic: offloaded parameters" in price.hosts[0]


@pytest.mark.parametrize(("cluster", "memory"), [(Cluster(1, 1), 0.6e9), (Cluster(1, 2), 0.36e9)], ids=str)
def test_equals_enumeration_where_training_fits_only_with_its_optimizer_in_host_memory(
    small_problem, cluster, memory
):
    """Of the 41 million parameters float32 gradients and state alone take 660 MB, or half of that on two devices."""
    tables = Tables(small_problem(cluster, SAMPLE_AND_LEARN, 1, memory))
    state, lower_bound_s = proved(tables)
    best = enumerated(tables)
    assert state.excess_bytes == 0
    assert state.time_s == pytest.approx(best, rel=1e-9)
    assert lower_bound_s == pytest.approx(best, rel=2e-9)
    plan = tables.plan(state.choice.tolist())
    assert plan.node("actor_train").assignment.offload
    assert plan.roles["actor"].offloaded
    assert "actor: offloaded optimizer" in price_plan(plan, tables.problem.model).hosts[0]
    roomy = Tables(small_problem(cluster, SAMPLE_AND_LEARN, 1))
    assert not any(option.offload for own in roomy.options for option in own)


def test_an_interrupt_leaves_a_state_and_a_bound(small_problem):
    tables = Tables(small_problem(Cluster(1, 4)))
    state = start_state(tables, greedy_choice(tables))
    cycles = call_cycles(tables.problem.graph)
    tree = search_tree(tables, cycles)
    steps = branching(
        tables, neighbours(tables), cycles, tree, [], state, bound_of(tables), 0, Deadline(monotonic())
    )
    assert len(list(steps)) <= 1


@pytest.mark.parametrize("calls", [("actor_generate", "ref_inference", "actor_train"), None])
def test_bounds_by_groups_rise_to_what_cycles_and_load_allow_and_stay_below_the_best_plan(
    small_problem, calls
):
    """Of each call, the fastest option on meshes of each size."""
    tables = Tables(small_problem(Cluster(2, 2), *((calls, 1) if calls else ())))
    cycles, o, start = call_cycles(tables.problem.graph), tables.arrays.options, tables.arrays.start
    sizes = [[min(o.seconds[a:b][o["size"][a:b] == size]) for size in (1, 2, 4)] for a, b in pairwise(start)]
    least = np.inf
    for seconds in product(*(zip(own, (1, 2, 4), strict=True) for own in sizes)):
        taken = np.array([s for s, _ in seconds])
        load = sum(s * size for s, size in seconds) / 4
        least = min(least, max(load, (cycles.members @ taken / cycles.delays).max()))
    tree, best = search_tree(tables, cycles), proved(tables)[0].time_s
    bounds = [*bounds_by_groups(tree, 2 * best, Deadline(monotonic() + 600))]
    assert bounds == sorted(bounds)
    assert least * (1 - 2 * GROUP_STEP) <= bounds[-1] <= best
    assert len(bounds) > 1


def test_where_nothing_fits_the_search_ends_with_what_lacks_least(small_problem):
    """Each call fits alone, together they do not."""
    tables = Tables(small_problem(Cluster(1, 1), max_tp=1, memory=0.6e9))
    state, lower_bound_s = proved(tables)
    assert state.excess_bytes > 0
    assert lower_bound_s > state.time_s


pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes


def walked(tree, threshold: float, nodes: int) -> tuple[list[tuple[float, tuple[int, ...]]], int]:
    """Every choice that a search finds, each faster than the one before, and the steps that it takes."""
    state, faster = begin_search(tree, tree.to_options), []
    while True:
        code, time_s = continue_search(tree, state, threshold, nodes)
        if code == DONE:
            return faster, int(state.counts[0])
        if code == FOUND:
            faster.append((time_s, tuple(state.found.tolist())))
            threshold = time_s * (1 - 1e-9)


@pytest.mark.parametrize("slower", [1, 100])
def test_a_walk_in_pieces_finds_the_same_and_the_best(small_problem, slower):
    calls = ("actor_generate", "critic_inference", "critic_train")
    tables = Tables(small_problem(Cluster(2, 2), calls, 2, links_slower=slower))
    tree = search_tree(tables, call_cycles(tables.problem.graph))
    values = [tables.evaluate(choice) for choice in product(*(range(len(own)) for own in tables.options))]
    times = [value.time_s for value in values if value.excess_bytes <= 0]
    whole = walked(tree, 1.1 * float(np.median(times)), nodes=10**9)
    assert whole == walked(tree, 1.1 * float(np.median(times)), nodes=0)
    assert len(whole[0]) > 1
    assert whole[0][-1][0] == pytest.approx(min(times), rel=1e-9)


def test_of_a_choices_offloaded_twins_the_fastest_is_found(small_problem):
    """One device that cannot hold both frozen models all the time: either may be away, or both."""
    calls = ("actor_generate", "ref_inference", "reward_inference", "actor_train")
    tables = Tables(small_problem(Cluster(1, 1), calls, 1, 0.9e9))
    tree = search_tree(tables, call_cycles(tables.problem.graph))
    values = [tables.evaluate(choice) for choice in product(*(range(len(own)) for own in tables.options))]
    times = [value.time_s for value in values if value.excess_bytes <= 0]
    (*_, (fastest_s, _)), _ = walked(tree, 1.5 * max(times), nodes=10**9)
    assert fastest_s == pytest.approx(min(times), rel=1e-9)


_inner = branch._fast_enough


@njit
def fast_enough(relaxation, state, threshold: float) -> bool:
    return _inner(relaxation, state, threshold)


def test_no_placement_is_cut_because_its_fastest_option_fits_only_offloaded():
    """A slower option there that stays may make the faster plan: it needs no onload."""
    tables = Tables(with_memory(random_problem(9), 0.5674e9))
    tree = search_tree(tables, call_cycles(tables.problem.graph))
    r, state = tree.relaxation, begin_search(tree, tree.to_options)
    first, onloaded, random = r.arrays.start[:-1], r.arrays.options.onloaded, np.random.default_rng(0)
    stays = [
        (call, row)
        for call in range(r.arrays.n_calls)
        for row in range(first[call], r.arrays.offloaded[call])
        if onloaded[r.below[r.begin[r.above[row] - r.arrays.start[-1]]]] and not onloaded[row]
    ]
    checked = 0
    for _ in range(2000):
        choice = first + [random.integers(len(options)) for options in tables.options]
        call, row = stays[random.integers(len(stays))]
        choice[call] = row
        found = tables.evaluate((choice - first).tolist())
        if found.excess_bytes <= 0:
            resident = choice - (choice >= r.arrays.offloaded) * (r.arrays.offloaded - first)
            state.choice[:] = r.above[resident]
            assert fast_enough(r, state, found.time_s * (1 + 1e-9))
            checked += 1
    assert checked > 50
