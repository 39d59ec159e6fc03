"""The bounds of a partial choice against the exact prices of choices that complete it."""

import numpy as np
import pytest
from numba import njit

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.device_classes import DeviceClasses
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.search.bounds.period_bound import (
    PartialChoice,
    cover_s,
    covering,
    covers,
    exceeds_period,
)
from prefect_rlhf.planner.search.bounds.relaxation import (
    OPEN,
    Relaxation,
    lacks,
    move_s,
    must_offload,
    relaxation,
)
from prefect_rlhf.planner.search.compiled.tables import Tables
from prefect_rlhf.rlhf_tasks.algorithms.registry import in_parts
from tests.planner.ahead import SAMPLE_AND_LEARN, problem_ahead_by
from tests.planner.partial import GROUP, MESH, OPTION, PLACEMENT, checked_after_training, partial_choices
from tests.planner.random_problems import crowded_problem

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes


@pytest.mark.parametrize("cluster", [Cluster(2, 2), Cluster(1, 4)], ids=str)
def test_the_bound_of_a_partial_choice_lies_below_every_completion(small_problem, cluster):
    """On PPO: calls open or known by option, placement, mesh or size."""
    tables = Tables(small_problem(cluster, memory=0.5e9))
    assert any(option.offload for options in tables.options for option in options)
    r, tight, lacking = relaxation(tables), dict.fromkeys((OPTION, PLACEMENT, MESH, GROUP), 0), 0
    slower = 0
    allowed = np.zeros(r.arrays.n_calls)
    for p in partial_choices(tables, r, 200):
        _holds(r, p, allowed)
        assert p.excess_bytes > 0 or not lacks(r, p.rows, OPEN)
        if p.rungs is not None:
            tight[p.rungs] += exceeds_period(r, p.rows, p.meet, p.moves, 0.7 * p.bounded_s, allowed)
            lacking += p.excess_bytes > 0 and lacks(r, p.rows, OPEN)
            slower += p.excess_bytes == 0 and bool(_must_offload(r, p).any())
    assert tight[OPTION] > 150
    assert tight[PLACEMENT] > 150
    assert tight[MESH] > 100
    assert tight[GROUP] > 50
    assert lacking > 30
    assert slower > 10


@pytest.mark.parametrize("cluster", [Cluster(2, 2), Cluster(1, 4)], ids=str)
def test_it_does_where_generation_runs_ahead(small_problem, cluster):
    tables = Tables(problem_ahead_by(1, small_problem(cluster, calls=SAMPLE_AND_LEARN)))
    r = relaxation(tables)
    allowed, tight = np.zeros(r.arrays.n_calls), 0
    for p in partial_choices(tables, r, 150):
        _holds(r, p, allowed)
        tight += exceeds_period(r, p.rows, p.meet, p.moves, 0.7 * p.bounded_s, allowed)
    assert tight > 50


@pytest.mark.parametrize(
    ("cluster", "slower"),
    [
        *((Cluster(2, 2), slower) for slower in (1, 30, 1000)),
        (Cluster(1, 4), 30),  # the same without hosts, whose links are others
        *(pytest.param(Cluster(1, 4), slower, marks=pytest.mark.slow) for slower in (1, 1000)),
    ],
    ids=str,
)
@pytest.mark.parametrize("checked", [False, True], ids=["ppo", "checked"])
def test_it_does_where_moves_take_longer_than_calls(small_problem, cluster, checked, slower):
    """Then a slower option that needs a shorter move, or none, is the faster one: what it costs counts once."""
    problem = small_problem(cluster, links_slower=slower)
    tables = Tables(checked_after_training(problem) if checked else problem)
    r = relaxation(tables)
    assert not checked or 0 in r.delay
    allowed, tight = np.zeros(r.arrays.n_calls), 0
    for p in partial_choices(tables, r, 150):
        _holds(r, p, allowed)
        tight += exceeds_period(r, p.rows, p.meet, p.moves, 0.7 * p.bounded_s, allowed)
    assert tight > 100


def test_it_does_on_devices_of_two_classes(small_problem):
    """Meshes of one size then take different seconds."""
    alike = small_problem(Cluster(2, 2), links_slower=30)
    fast = alike.model.classes.profiles[0]
    slow = fast.model_copy(update={"name": "slow", "flops_per_s": fast.flops_per_s / 3})
    classes = DeviceClasses.host_by_host(alike.cluster, [slow, fast])
    model = CostModel(alike.cluster, classes, alike.model.models, alike.model.workload)
    r = relaxation(tables := Tables(Problem(alike.graph, model)))
    allowed, tight = np.zeros(r.arrays.n_calls), 0
    for p in partial_choices(tables, r, 150):
        _holds(r, p, allowed)
        tight += exceeds_period(r, p.rows, p.meet, p.moves, 0.7 * p.bounded_s, allowed)
    assert tight > 100


@pytest.fixture(params=["whole", "two hosts", "adapters on shared weights", "sharded", "checked"])
def scarce(request, small_problem, lora):
    """A problem whose choices lack memory, most of them."""
    made = {
        "whole": lambda: small_problem(Cluster(1, 2), memory=0.3e9),
        "two hosts": lambda: small_problem(Cluster(2, 2), memory=0.35e9),
        "adapters on shared weights": lambda: small_problem(Cluster(2, 2), memory=0.25e9, lora=lora),
        "sharded": lambda: crowded_problem(15),
        "checked": lambda: checked_after_training(
            small_problem(Cluster(1, 2), memory=0.3e9), ("critic_inference", "critic_train")
        ),
    }
    return made[request.param]()


def test_what_has_just_the_memory_of_a_plan_lacks_none(scarce):
    """Nor must it offload what the plan keeps; however little of the plan is known."""
    r = relaxation(tables := Tables(scarce))
    looked = 0
    for p in partial_choices(tables, r, 300):
        if p.excess_bytes > 0:
            memories = r.arrays.memories.copy()
            memories["bytes"] += p.excess_bytes + 1.0
            enough = r._replace(arrays=r.arrays._replace(memories=memories))
            assert not lacks(enough, p.rows, OPEN)
            assert not (_must_offload(enough, p) & ~p.away).any()
            looked += 1
    assert looked > 300


def _must_offload(r, p):
    """[calls] bool: the train_steps whose optimizers have no room on their devices."""
    return np.array([must_offload(r, p.rows, call) for call in range(r.arrays.n_calls)])


def _holds(r, p, allowed):
    """No completion is cut, and no option of it forbidden. What keeps an optimizer that has no room is none."""
    if (_must_offload(r, p) & ~p.away).any():
        assert p.excess_bytes > 0
        return
    assert not exceeds_period(r, p.rows, p.meet, p.moves, p.time_s * (1 + 1e-9), allowed)
    seconds, loose = r.arrays.options.seconds[p.chosen], p.rows != p.chosen
    assert all(seconds[loose] <= allowed[loose] * (1 + 1e-9))


def parts_of(r: Relaxation, rows: np.ndarray, seconds: np.ndarray, *, places: bool) -> PartialChoice:
    """A complete choice, or of the same only how large its meshes are and what its reallocations take at least."""
    o = r.arrays.options
    size, first = o["size"][rows], o.first[rows]
    meet = size[:, None] + size > r.n_devices
    if places:
        meet = (first[:, None] < first + size) & (first < (first + size)[:, None])
    ends = list(zip(rows[r.trainer], rows[r.reader], strict=True))
    moved_s = np.array([move_s(r, k, a, b) for k, (a, b) in enumerate(ends)]) * (r.delay == 1) * r.alone
    return PartialChoice(
        seconds,
        size.astype(np.int64),
        meet & ~np.eye(len(rows), dtype=bool),
        r.trainer,
        r.reader,
        moved_s > 0,
        moved_s,
    )


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("cluster", [Cluster(1, 4), Cluster(3, 2)], ids=str)
def test_lies_below_every_plan(small_problem, cluster, staleness):
    """Random choices of PPO, by sizes alone and by places; and with fewer facts it says no more."""
    problem = small_problem(cluster)
    if staleness:
        problem = problem_ahead_by(staleness, small_problem(cluster, SAMPLE_AND_LEARN))
    tables = Tables(problem)
    r, known, random = relaxation(tables), covering(tables.problem.graph), np.random.default_rng(0)
    tight = 0
    for _ in range(300):
        choice = np.array([random.integers(len(found)) for found in tables.options])
        rows = choice + r.arrays.start[:-1]
        seconds = r.arrays.options.seconds[rows]
        time_s = tables.evaluate(choice.tolist()).time_s
        placed, sized = (
            cover_s(known, parts_of(r, rows, seconds, places=places), r.n_devices) for places in (True, False)
        )
        assert sized <= placed * (1 + 1e-9)
        assert placed <= time_s * (1 + 1e-9)
        tight += placed > 0.6 * time_s
    assert tight > 150


def test_generation_inference_and_training_of_the_actor_alternate(make_graph):
    """So do the critic's two calls; its training may run beside everything else."""
    graph = make_graph()
    names = [call.name for call in graph.calls]
    ahead = covering(graph).ahead
    number = {name: i for i, name in enumerate(names)}
    generate, train = number["actor_generate"], number["actor_train"]
    assert (ahead[generate, train], ahead[train, generate]) == (0, 1)
    assert ahead[number["critic_train"], number["critic_inference"]] == 1
    assert ahead[number["critic_train"], generate] > 1


def test_idle_devices_count_where_nothing_can_run(small_problem):
    """Two calls that alternate, each on a half: the cluster is busy for the sum of their seconds."""
    tables = Tables(small_problem(Cluster(1, 4), ("actor_generate", "actor_train")))
    none = np.zeros(0, np.int64)
    seconds, sizes = np.array([2.0, 3.0]), np.array([2, 2])
    parts = PartialChoice(seconds, sizes, np.zeros((2, 2), bool), none, none, np.zeros(0, bool), np.zeros(0))
    assert cover_s(covering(tables.problem.graph), parts, 4) == 5.0


def test_only_calls_that_are_cut_may_run_while_what_they_read_is_made(make_graph):
    """A part is scored while the next is generated. Training waits for all parts."""
    graph = make_graph()
    parts = DataflowGraph(in_parts(graph.calls, 2), graph.dataset_keys, name="parts")

    def together(of: DataflowGraph) -> set[frozenset[str]]:
        names = [call.name for call in of.calls]
        return {frozenset(np.array(names)[row].tolist()) for row in covering(of).sets}

    pair = frozenset(("actor_generate", "reward_inference"))
    assert pair not in together(graph)
    assert pair in together(parts)
    assert not any({"actor_generate", "actor_train"} <= each for each in together(parts))


@njit
def covered(r, c, choice, meet, moves, threshold):
    return covers(r, c, choice, meet, moves, threshold)


@pytest.mark.parametrize("cluster", [Cluster(2, 2), Cluster(1, 4)], ids=str)
@pytest.mark.parametrize("slower", [1, 100])
def test_a_choice_has_the_room_that_its_partial_choices_need(small_problem, cluster, slower):
    tables = Tables(small_problem(cluster, memory=0.5e9, links_slower=slower))
    r, known, denied = relaxation(tables), covering(tables.problem.graph), 0
    for p in partial_choices(tables, r, 150):
        assert covered(r, known, p.rows, p.meet, p.moves, p.time_s * (1 + 1e-9))
        denied += not covered(r, known, p.rows, p.meet, p.moves, 0.6 * p.time_s)
    assert denied > 20
