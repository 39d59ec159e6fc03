"""Several sources in one stream: shares, positions, and what a sample's number alone decides."""

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from rlhf_tasks.data.token_file import place_of

WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)


@given(WEIGHTS, st.integers(0, 300))
def test_every_sample_is_the_next_of_its_source(weights: list[float], n: int):
    seen = Counter[int]()
    for sample in range(n):
        source, position = place_of(sample, weights)
        assert position == seen[source]
        seen[source] += 1


@given(WEIGHTS, st.integers(0, 10**12))
def test_the_shares_are_the_weights_in_every_stretch(weights: list[float], first: int):
    taken = Counter(place_of(sample, weights)[0] for sample in range(first, first + 100))
    for source, weight in enumerate(weights):
        share = Fraction(weight) / sum(map(Fraction, weights))
        assert abs(taken[source] - 100 * share) <= 2 + source


def test_equal_weights_take_turns():
    assert [place_of(sample, (1, 1))[0] for sample in range(6)] == [1, 0, 1, 0, 1, 0]
    assert [place_of(sample, (3.0,)) for sample in range(3)] == [(0, 0), (0, 1), (0, 2)]
