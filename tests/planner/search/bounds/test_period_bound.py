"""The bound of a partial choice against the exact prices of choices that complete it."""

import numpy as np
import pytest

from planner.plan.mesh import Cluster
from planner.search.bounds.period_bound import exceeds_period
from planner.search.bounds.relaxation import OPEN, lacks, must_offload, relaxation
from planner.search.compiled.tables import Tables
from tests.planner.ahead import SAMPLE_AND_LEARN, problem_ahead_by
from tests.planner.partial import GROUP, KIND, OPTION, PLACEMENT, checked_after_training, partial_choices

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes


@pytest.mark.parametrize("cluster", [Cluster(2, 2), Cluster(1, 4)], ids=str)
def test_the_bound_of_a_partial_choice_lies_below_every_completion(small_problem, cluster):
    """On PPO: calls open or known by option, placement, strategy or size."""
    tables = Tables(small_problem(cluster, memory=0.5e9))
    assert any(option.offload for options in tables.options for option in options)
    r, tight, lacking = relaxation(tables), dict.fromkeys((OPTION, PLACEMENT, KIND, GROUP), 0), 0
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
    assert tight[KIND] > 100
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
