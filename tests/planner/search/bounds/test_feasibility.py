"""Whether calls find room: never denied to a choice that has it."""

import numpy as np
import pytest
from numba import njit

from planner.plan.mesh import Cluster
from planner.search.bounds.feasibility import covers, groups_fit, least_load
from planner.search.bounds.relaxation import OPEN, relaxation
from planner.search.bounds.root_bound import call_cycles
from planner.search.bounds.tree_order import tree
from planner.search.compiled.tables import Tables
from tests.planner.partial import partial_choices

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes


@njit
def fits(r, choice):
    return groups_fit(r, choice)


@njit
def load_of(r, t, choice, allowed, threshold):
    return least_load(r, t, choice, allowed, threshold)


@njit
def covered(r, t, choice, meet, moves, allowed, threshold):
    return covers(r, t, choice, meet, moves, allowed, threshold)


@pytest.mark.parametrize("slower", [1, 100])
@pytest.mark.parametrize("cluster", [Cluster(2, 2), Cluster(1, 4)], ids=str)
def test_a_choice_has_the_room_that_its_partial_choices_need(small_problem, cluster, slower):
    tables = Tables(small_problem(cluster, memory=0.5e9, links_slower=slower))
    r = relaxation(tables)
    t, n = tree(tables, r, call_cycles(tables.problem.graph)), r.arrays.n_calls
    seconds, denied = r.arrays.options.seconds, {"memory": 0, "load": 0, "cover": 0}
    for p in partial_choices(tables, r, 150):
        threshold = p.time_s * (1 + 1e-9)
        for allowed in (np.full(n, np.inf), seconds[p.chosen] * (1 + 1e-9)):
            assert load_of(r, t, p.rows, allowed, threshold) <= threshold * r.n_devices
            assert covered(r, t, p.rows, p.meet, p.moves, allowed, threshold)
        assert p.excess_bytes > 0 or fits(r, p.rows)
        free, short = np.full(n, np.inf), 0.6 * p.time_s
        denied["memory"] += OPEN not in p.rows and not fits(r, p.rows)
        denied["load"] += load_of(r, t, p.rows, free, short) > short * r.n_devices
        denied["cover"] += not covered(r, t, p.rows, p.meet, p.moves, free, short)
    assert min(denied.values()) > 20, denied
