"""How much more than its share the fullest dp rank is expected to get."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.plan.workload import Lengths
from planner.search import balance
from planner.search.balance import imbalance
from rlhf_tasks.parallel.layout.transfers import partition

ONE = Lengths.fixed(1)
WIDE = Lengths(points=((10, 0.5), (1000, 0.5)))


def test_equal_lengths_are_even_either_way_and_groups_that_dp_does_not_divide_are_not():
    assert imbalance(Lengths.fixed(7), ONE, 16, 2, 4) == (1.0, 1.0)
    assert imbalance(Lengths.fixed(7), ONE, 5, 1, 2) == pytest.approx((3 * 2 / 5, 3 * 2 / 5))


def test_two_ranks_with_one_sequence_each_have_what_chance_gives_them():
    """Lengths 9 or 99, each with probability a half: fullest / mean is 1 where both are alike, else 2 * 99 / 108."""
    points = Lengths(points=((8, 0.5), (98, 0.5)))
    wanted = (1 + 2 * 99 / 108) / 2
    by_count, by_tokens = imbalance(points, ONE, 2, 1, 2)
    assert by_count == by_tokens == pytest.approx(wanted, abs=0.16)  # 32 draws: two standard errors


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 8),
)
def test_no_rank_has_less_than_the_mean_or_more_than_all_and_tokens_are_never_much_worse(
    points, dp, group_size, times
):
    total = sum(weight for _, weight in points)
    lengths = Lengths(points=tuple((tokens, weight / total) for tokens, weight in points))
    by_count, by_tokens = imbalance(lengths, ONE, dp * times, group_size, dp)
    assert by_tokens * (1 + 1e-12) >= 1
    assert by_tokens <= by_count * 4 / 3, "longest first is at most 4/3 - 1/(3 dp) of the best (Graham 1969)"
    assert by_count <= dp


def test_more_sequences_even_out_and_whole_groups_even_out_less():
    few, many = (imbalance(WIDE, ONE, n, 1, 4).by_count for n in (8, 512))
    assert few > 1.3
    assert 1 < many < 1.1
    apart, grouped = imbalance(WIDE, ONE, 64, 1, 4), imbalance(WIDE, ONE, 8, 8, 4)
    assert grouped.by_count > apart.by_count
    assert apart.by_tokens < 1.06 < grouped.by_tokens


def test_of_a_million_sequences_a_part_is_drawn(monkeypatch):
    """A draw of all of them takes seconds. What is drawn says about the same of a batch that may be drawn whole."""
    drawn = list[int]()

    def counted(ids, *how, **more):
        drawn.append(len(ids))
        return partition(ids, *how, **more)

    monkeypatch.setattr(balance, "partition", counted)
    million = imbalance(WIDE, ONE, 1_000_000, 1, 8)
    assert max(drawn) <= balance.MOST_DRAWN
    assert 1 <= million.by_tokens <= million.by_count < 1.01
    whole = imbalance(WIDE, ONE, 16_000, 2, 8).by_count
    monkeypatch.setattr(balance, "MOST_DRAWN", 1 << 12)
    assert imbalance(WIDE, ONE, 16_000, 2, 8).by_count - 1 == pytest.approx(whole - 1, rel=0.5)


def test_lengths_of_data_keep_their_mean_and_their_spread():
    data = [1, 2, 3, 4] * 10 + [1000] * 10
    made = Lengths.of(data)
    assert made.mean == pytest.approx(sum(data) / len(data), rel=0.01)
    assert made.longest == 1000
    assert Lengths.of([5]) == Lengths.fixed(5)
    assert len(Lengths.of(range(1, 10_000)).points) <= 32
    assert Lengths.of([0, 0]) == Lengths.fixed(1)
