"""Whether calls find room: never denied to a choice that has it; and whether meshes can lie as a partial choice says,
with enumeration of all places as the judge."""

from itertools import product

import numpy as np
import pytest
from numba import njit

from planner.plan.mesh import Cluster
from planner.search.bounds.feasibility import can_be_arranged, covers
from planner.search.bounds.relaxation import MEET, UNKNOWN, relaxation
from planner.search.bounds.root_bound import call_cycles
from planner.search.bounds.tree_order import search_tree
from planner.search.compiled.tables import Tables
from tests.planner.partial import partial_choices, raised, related

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes


@njit
def covered(r, t, choice, meet, moves, threshold):
    return covers(r, t, choice, meet, moves, threshold)


@pytest.mark.parametrize("cluster", [Cluster(2, 2), Cluster(1, 4)], ids=str)
@pytest.mark.parametrize("slower", [1, 100])
def test_a_choice_has_the_room_that_its_partial_choices_need(small_problem, cluster, slower):
    tables = Tables(small_problem(cluster, memory=0.5e9, links_slower=slower))
    r = relaxation(tables)
    t, denied = search_tree(tables, r, call_cycles(tables.problem.graph)), 0
    for p in partial_choices(tables, r, 150):
        assert covered(r, t, p.rows, p.meet, p.moves, p.time_s * (1 + 1e-9))
        denied += not covered(r, t, p.rows, p.meet, p.moves, 0.6 * p.time_s)
    assert denied > 20


def meshes_of(r, row: int) -> set[tuple[int, int]]:
    """(first device, size) of every mesh of the options that a row stands for."""
    o = r.arrays.options
    if o[row].first >= 0:
        return {(int(o[row].first), int(o[row]["size"]))}
    begin, end = r.begin[row - r.arrays.start[-1] :][:2]
    return {mesh for below in r.below[begin:end] for mesh in meshes_of(r, int(below))}


def lie_as_said(meshes, meet) -> bool:
    pairs = [(a, b) for a in range(len(meshes)) for b in range(a)]
    return all(
        meet[a, b] == UNKNOWN
        or (meet[a, b] == MEET) == (meshes[a][0] < sum(meshes[b]) and meshes[b][0] < sum(meshes[a]))
        for a, b in pairs
    )


@pytest.mark.parametrize("cluster", [Cluster(2, 2), Cluster(4, 1)], ids=str)
def test_meshes_can_be_arranged_exactly_where_enumeration_finds_places(small_problem, cluster):
    r, random = relaxation(Tables(small_problem(cluster))), np.random.default_rng(0)
    n = r.arrays.n_calls
    found = {True: 0, False: 0}
    for _ in range(150):
        options = [
            random.integers(a, b) for a, b in zip(r.arrays.start[:-1], r.arrays.offloaded, strict=True)
        ]
        rows = np.array([raised(r, row, 3 if random.random() < 0.7 else 1) for row in options])
        meet = np.array([[related(r, a, b) for b in rows] for a in rows])
        for a, b in product(range(n), repeat=2):
            if a < b and meet[a, b] == UNKNOWN:
                meet[a, b] = meet[b, a] = random.integers(3)
        judge = any(
            lie_as_said(meshes, meet) for meshes in product(*(meshes_of(r, int(row)) for row in rows))
        )
        assert can_be_arranged(r, random.permutation(n), rows, meet) == judge
        found[judge] += 1
    assert min(found.values()) > 20
