"""Branch and bound against enumeration, and its bound against exact prices."""

from itertools import product
from time import monotonic

import numpy as np
import pytest

from planner import branch
from planner.anneal import neighbours, start_state
from planner.bound import call_cycles
from planner.branch import LOOK_S, NODES, bounds_by_groups, branching, proofs
from planner.exceeds import exceeds
from planner.mcmc import greedy_choice
from planner.mesh import Cluster
from planner.problem import Problem
from planner.relaxation import APART, OPEN, UNKNOWN, lacks, move_s, moves_s, relation, relaxation
from planner.search import bound_of
from planner.tables import Tables
from planner.walk import PAUSED
from rlhf_tasks.spec import OnloadNode

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, 100 s of a core of its own


def proved(tables: Tables):
    """(best state, lower bound) of branch and bound that starts from the greedy choice and runs to its end."""
    start, cycles = start_state(tables, greedy_choice(tables)), call_cycles(tables.problem.graph)
    steps = branching(
        tables,
        neighbours(tables),
        cycles,
        proofs(tables, cycles),
        start,
        bound_of(tables),
        0,
        monotonic() + 600,
    )
    *_, (state, lower_bound_s, _) = steps
    return state, lower_bound_s


def enumerated(tables: Tables) -> float:
    """The least seconds per iteration of all choices that fit."""
    values = (tables.evaluate(choice) for choice in product(*(range(len(found)) for found in tables.options)))
    return min((value.time_s for value in values if value.excess_bytes <= 0), default=np.inf)


SCORED = ("actor_generate", "ref_inference", "reward_inference", "actor_train")


@pytest.mark.parametrize(
    ("cluster", "calls", "max_tp", "memory"),
    [
        (Cluster(1, 8), ("actor_generate", "ref_inference", "actor_train"), 1, 80e9),
        (Cluster(1, 8), ("actor_generate", "actor_train"), 8, 0.5e9),
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


@pytest.mark.parametrize("memory", [80e9, 0.79e9])
def test_equals_enumeration_on_all_six_calls_of_ppo(small_problem, memory):
    """Two sequences on two devices; with little memory frozen models may be offloaded, and the best is slower."""
    tables = Tables(small_problem(Cluster(1, 2), None, 1, memory, n_seqs=2))
    assert len(tables.calls) == 6
    state, lower_bound_s = proved(tables)
    best = enumerated(tables)
    assert state.excess_bytes == 0
    assert state.time_s == pytest.approx(best, rel=1e-9)
    assert lower_bound_s == pytest.approx(best, rel=2e-9)


@pytest.mark.parametrize("memory", [80e9, 0.7e9, 0.6e9])
def test_equals_enumeration_of_options_that_none_was_pruned_of(small_problem, monkeypatch, memory):
    """Options that another one matches in time and memory are left out of the search: no plan gets worse."""
    problem = small_problem(
        Cluster(1, 2), ("actor_generate", "ref_inference", "actor_train"), 2, memory, n_seqs=64
    )
    tables = Tables(problem)
    state, _ = proved(tables)
    monkeypatch.setattr("planner.options._pareto", list)
    every = Tables(problem)
    assert sum(map(len, every.options)) > sum(map(len, tables.options))
    assert state.excess_bytes == 0
    assert state.time_s == pytest.approx(enumerated(every), rel=1e-9)


@pytest.mark.parametrize("option_s", [1e-6, 1e-4, 1e-2])
def test_a_walk_looks_at_the_clock_more_often_where_options_take_longer(small_problem, monkeypatch, option_s):
    """A walk without end, by a clock on which each option takes so long: it ends soon after its share of the time
    (it has more than its first look's worth of it), without a look at the clock every few options."""
    now, looks = [0.0], [0]

    def walk_on(relaxation, tree, walk, threshold, nodes):
        now[0] += nodes * option_s
        return PAUSED, np.inf

    def monotonic():
        looks[0] += 1
        return now[0]

    monkeypatch.setattr(branch, "walk_on", walk_on)
    monkeypatch.setattr(branch, "monotonic", monotonic)
    tables = Tables(small_problem(Cluster(1, 2)))
    found = proofs(tables, call_cycles(tables.problem.graph))
    assert list(bounds_by_groups(found, 1.0, 2.0, deadline=100.0)) == []
    assert 90 < now[0] < 100 + NODES * option_s
    assert looks[0] < 2 * now[0] / LOOK_S


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


def raised(r, row: int, rungs: int) -> int:
    """The row so many rungs above an option."""
    for _ in range(rungs):
        row = r.above[row]
    return row


@pytest.mark.parametrize("cluster", [Cluster(2, 2), Cluster(1, 4)], ids=str)
def test_the_bound_of_a_partial_choice_lies_below_every_completion(small_problem, cluster):
    """Random choices of PPO; then some calls are open, others known by placement, strategy or size alone, and of some
    pairs it is known whether their meshes share a device."""
    tables = Tables(small_problem(cluster, memory=1e9))
    assert any(option.offload for options in tables.options for option in options)
    r, random = relaxation(tables), np.random.default_rng(0)
    starts, n = r.arrays.start[:-1], r.arrays.n_calls
    allowed, tight, lacking = np.zeros(n), {0: 0, 1: 0, 2: 0, 3: 0}, 0
    for _ in range(200):
        choice = np.array([random.integers(len(found)) for found in tables.options])
        time_s, excess_bytes, _ = tables.evaluate(choice)
        chosen = choice + starts
        chosen -= (chosen >= r.arrays.offloaded) * (r.arrays.offloaded - starts)
        for without, rungs in ((0.0, 0), (0.5, 0), (0.0, 1), (0.0, 2), (0.0, 3), (0.2, None)):
            raises = random.integers(4, size=n) if rungs is None else np.full(n, rungs)
            rows = np.array([raised(r, *pair) for pair in zip(chosen, raises, strict=True)])
            rows[random.random(n) < without] = OPEN
            meet = np.array([[relation(r.arrays.options, r.n_devices, a, b) for b in rows] for a in rows])
            for a, b in product(range(n), repeat=2):
                if OPEN not in (rows[a], rows[b]) and (rungs is not None or random.random() < 0.3):
                    meet[a, b] = meet[b, a] = relation(r.arrays.options, r.n_devices, chosen[a], chosen[b])
            moves = np.zeros((len(r.trainer), 4))
            for k, (a, b) in enumerate(zip(r.trainer, r.reader, strict=True)):
                if OPEN not in (rows[a], rows[b]):
                    moves_s(r, k, rows[a], rows[b], meet[a, b], random.random() < 0.5, moves[k])
            assert not exceeds(r, rows, meet, moves, time_s * (1 + 1e-9), allowed)
            seconds, loose = r.arrays.options.seconds[chosen], rows != chosen
            assert all(seconds[loose] <= allowed[loose] * (1 + 1e-9))
            assert excess_bytes > 0 or not lacks(r, rows)
            if rungs is not None and not without:
                tight[rungs] += exceeds(r, rows, meet, moves, 0.7 * time_s, allowed)
                lacking += excess_bytes > 0 and lacks(r, rows)
    assert tight[0] > 150
    assert tight[1] > 150
    assert tight[2] > 100
    assert tight[3] > 50
    assert lacking > 30


@pytest.mark.parametrize("cluster", [Cluster(2, 2), Cluster(1, 4)], ids=str)
def test_a_row_is_as_good_as_each_option_that_it_stands_for(small_problem, cluster):
    """In seconds, load, save and bytes; and a move with those beside it takes no less than the least of it."""
    r, random = relaxation(Tables(small_problem(cluster))), np.random.default_rng(1)
    o, options = r.arrays.options, np.arange(r.arrays.start[-1])
    options = options[r.above[options] != OPEN]
    for rungs in (1, 2, 3):
        above = np.array([raised(r, row, rungs) for row in options])
        assert (o["size"][above] == o["size"][options]).all()
        assert all((o.strategy[above] == o.strategy[options]) if rungs < 3 else o.strategy[above] == OPEN)
        assert all((o.place[above] == o.place[options]) if rungs < 2 else o.place[above] == OPEN)
        for figures in (o.seconds, o.save_s, r.load):
            assert (figures[above] <= figures[options]).all()
        assert (r.least[above] <= r.least[options]).all()
    least, joined, apart = np.zeros(4), 0, 0
    for _ in range(600):
        k = random.integers(len(r.trainer))
        ends = [random.choice(_of_call(r, call)) for call in (r.trainer[k], r.reader[k])]
        moved_s, related = move_s(r, k, *ends, True), relation(r.arrays.options, r.n_devices, *ends)
        known = [raised(r, row, random.integers(4)) for row in ends]
        moves_s(r, k, *known, related, False, least)
        slower = [o.seconds[row] - o.seconds[other] for row, other in zip(ends, known, strict=True)]
        taken = moved_s + np.array([0.0, slower[0], slower[1], sum(slower)])
        assert all(least <= taken + 1e-12)
        moves_s(r, k, *known, UNKNOWN, False, least)
        assert all(least <= taken + 1e-12)
        joined += least[3] > least[0]
        apart += related == APART
    assert joined > 20
    assert apart > 50


def _of_call(r, call: int) -> np.ndarray:
    """A call's resident rows."""
    return np.arange(r.arrays.start[call], r.arrays.offloaded[call])


def test_an_interrupt_leaves_a_state_and_a_bound(small_problem):
    tables = Tables(small_problem(Cluster(1, 4)))
    state = start_state(tables, greedy_choice(tables))
    cycles = call_cycles(tables.problem.graph)
    found = proofs(tables, cycles)
    steps = branching(tables, neighbours(tables), cycles, found, state, bound_of(tables), 0, monotonic())
    assert len(list(steps)) <= 1


def test_bounds_by_groups_rise_and_stay_below_the_best_plan(small_problem):
    tables = Tables(small_problem(Cluster(2, 2), ("actor_generate", "ref_inference", "actor_train"), 1))
    best, root = enumerated(tables), bound_of(tables)
    found = proofs(tables, call_cycles(tables.problem.graph))
    bounds = [*bounds_by_groups(found, root, 2 * best, monotonic() + 600)]
    assert bounds == sorted(bounds)
    assert root < bounds[-1] <= best


def test_where_nothing_fits_the_search_ends_with_what_lacks_least(small_problem):
    """Each call fits alone, together they do not."""
    tables = Tables(small_problem(Cluster(1, 1), max_tp=1, memory=1.0e9))
    state, lower_bound_s = proved(tables)
    assert state.excess_bytes > 0
    assert lower_bound_s > state.time_s


@pytest.mark.parametrize("cluster", [Cluster(2, 4), Cluster(4, 2), Cluster(3, 4)], ids=str)
def test_a_move_takes_no_less_than_its_least_seconds(make_graph, ppo_cost, llama, cluster):
    """With shapes that no tp or pp divides, which fill the stages and ranks of a placement unequally."""
    shape = llama(
        hidden_size=512, num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=3, vocab_size=1001
    )
    r = relaxation(Tables(Problem(make_graph(n_seqs=8), ppo_cost(cluster, shape))))
    random, starts, bounded = np.random.default_rng(0), r.arrays.start, 0
    for _ in range(300):
        k = random.integers(len(r.trainer))
        ends = [random.integers(starts[call], starts[call + 1]) for call in (r.trainer[k], r.reader[k])]
        least_s, exact_s = (move_s(r, k, *ends, exact) for exact in (False, True))
        assert least_s <= exact_s * (1 + 1e-9)
        bounded += least_s > 0.5 * exact_s
    assert bounded > 100
