"""The bounds against enumeration: never above the best plan, and the root bound exactly what it says."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.bounds.root_bound import PRECISION, Cycles, call_cycles, front, root_bound


def named(cycles, graph) -> set[tuple[frozenset[str], int]]:
    names = [call.name for call in graph.calls]
    return {
        (frozenset(name for name, inside in zip(names, row, strict=True) if inside), int(delay))
        for row, delay in zip(cycles.members, cycles.delays, strict=True)
    }


def test_cycles_of_ppo(make_graph):
    """Generation, one inference, training; the critic's; and the paths to the critic's training, twice T."""
    graph = make_graph()
    inferences = ("reward_inference", "ref_inference", "critic_inference")
    assert named(call_cycles(graph), graph) == {
        *((frozenset({"actor_generate", i, "actor_train"}), 1) for i in inferences),
        (frozenset({"critic_inference", "critic_train"}), 1),
        *((frozenset({"actor_generate", i, "critic_train"}), 2) for i in inferences),
    }


def test_front_keeps_what_is_shorter_or_lighter():
    found = front([4.0, 2.0, 3.0, 2.0, 8.0], [1, 4, 4, 8, 1])
    assert found.seconds.tolist() == [2.0, 4.0]
    assert found.load.tolist() == [8.0, 4.0]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=4),
        min_size=6,
        max_size=6,
    ),
    st.integers(8, 24),
)
@settings(max_examples=60)
def test_root_bound_is_the_smallest_period(options, n_devices):
    """Against all choices, on PPO's cycles."""
    members = np.array(
        [[1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 1, 0], [1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 0, 1], [1, 1, 0, 0, 0, 1]],
        dtype=float,
    )
    delays = np.array([1.0, 1.0, 1.0, 1.0, 2.0])
    best = np.inf
    for choice in product(*options):
        seconds = np.array([s for s, _ in choice], dtype=float)
        load = sum(s * devices for s, devices in choice) / n_devices
        best = min(best, max(load, float(np.max(members @ seconds / delays))))
    fronts = [front([float(s) for s, _ in call], [d for _, d in call]) for call in options]
    bound = root_bound(fronts, Cycles(members, delays), n_devices)
    assert bound <= best * (1 + 1e-12)
    assert bound == pytest.approx(best, rel=2 * PRECISION)
