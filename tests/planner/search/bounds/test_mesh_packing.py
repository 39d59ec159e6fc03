"""Whether meshes can lie as a partial choice says, with enumeration of all places as the judge."""

from itertools import product

import numpy as np
import pytest

from planner.plan.mesh import Cluster
from planner.search.bounds.mesh_packing import can_be_arranged
from planner.search.bounds.relaxation import MEET, UNKNOWN, relaxation
from planner.search.compiled.tables import Tables
from tests.planner.partial import raised, related


def meshes_of(r, row: int) -> set[tuple[int, int]]:
    """(first device, size) of every mesh of the options that a row stands for."""
    o = r.arrays.options
    if o[row].first >= 0:
        return {(int(o[row].first), int(o[row]["size"]))}
    begin, end = r.begin[row - r.arrays.start[-1] :][:2]
    return {mesh for below in r.below[begin:end] for mesh in meshes_of(r, int(below))}


def fits(meshes, meet) -> bool:
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
        judge = any(fits(meshes, meet) for meshes in product(*(meshes_of(r, int(row)) for row in rows)))
        assert can_be_arranged(r, random.permutation(n), rows, meet) == judge
        found[judge] += 1
    assert min(found.values()) > 20
