"""Rows that stand for many options."""

import numpy as np
import pytest

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.search.bounds.relaxation import OPEN, move_s, moves_s, relaxation
from prefect_rlhf.planner.search.compiled.tables import Tables
from tests.planner.partial import GROUP, MESH, PLACEMENT, raised

KIND = 4  # beside OPTION .. GROUP: it is above a placement, and below nothing

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes


@pytest.mark.parametrize("cluster", [Cluster(2, 2), Cluster(1, 4)], ids=str)
def test_a_row_is_as_good_as_each_option_that_it_stands_for(small_problem, cluster):
    """In seconds, save and bytes; and a move with those beside it takes no less than the least of it."""
    tables, random = Tables(small_problem(cluster)), np.random.default_rng(1)
    seconds = tables.arrays.options["seconds"]
    seconds *= random.uniform(
        0.5, 2.0, len(seconds)
    )  # so that meshes of one size differ, as on devices of two classes
    r = relaxation(tables)
    o, options = r.arrays.options, np.arange(r.arrays.start[-1])
    options = options[r.above[options] != OPEN]
    common = {
        PLACEMENT: ("size", "first", "strategy", "place"),
        MESH: ("size", "first"),
        GROUP: ("size",),
        KIND: ("size", "strategy"),
    }
    for level, columns in common.items():
        above = np.array([_raised(r, row, level) for row in options])
        for name in ("size", "first", "strategy", "place"):
            known = o[name][options] if name in columns else OPEN
            assert (o[name][above] == known).all()
        assert (r.call[above] == r.call[options]).all()
        for figures in (o.seconds, o.save_s, o.evaluate_s, r.away_s):
            assert (figures[above] <= figures[options]).all()
        assert (r.least[above] <= r.least[options]).all()
    least, joined = np.zeros(4), 0
    for _ in range(600):
        k = random.integers(len(r.trainer))
        ends = [random.choice(_of_call(r, call)) for call in (r.trainer[k], r.reader[k])]
        moved_s = move_s(r, k, *ends)
        known = [_raised(r, row, int(random.integers(5))) for row in ends]
        moves_s(r, k, *known, least)
        slower = [o.seconds[row] - o.seconds[other] for row, other in zip(ends, known, strict=True)]
        taken = moved_s + np.array([0.0, slower[0], slower[1], sum(slower)])
        assert all(least <= taken + 1e-12)
        joined += least[3] > least[0]
    assert joined > 20


def _raised(r, row: int, level: int) -> int:
    """The row of an option that is on a level."""
    return int(r.kinds[raised(r, row, PLACEMENT), 0]) if level == KIND else raised(r, row, level)


def _of_call(r, call: int) -> np.ndarray:
    """A call's resident rows."""
    return np.arange(r.arrays.start[call], r.arrays.offloaded[call])


@pytest.mark.parametrize("cluster", [Cluster(2, 4), Cluster(4, 2), Cluster(3, 4)], ids=str)
def test_a_move_takes_no_less_than_the_least_between_its_kinds(make_graph, ppo_cost, llama, cluster):
    """With shapes that no tp or pp divides, which fill the stages and ranks of a placement unequally."""
    shape = llama(
        hidden_size=512, num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=3, vocab_size=1001
    )
    r = relaxation(Tables(Problem(make_graph(n_seqs=8), ppo_cost(cluster, shape))))
    random, least, bounded = np.random.default_rng(0), np.zeros(4), 0
    for _ in range(300):
        k = random.integers(len(r.trainer))
        ends = [random.choice(_of_call(r, call)) for call in (r.trainer[k], r.reader[k])]
        taken_s = move_s(r, k, *ends)
        moves_s(r, k, *(_raised(r, row, KIND) for row in ends), least)
        assert least[0] <= taken_s * (1 + 1e-9)
        bounded += least[0] > 0.5 * taken_s
    assert bounded > 100
