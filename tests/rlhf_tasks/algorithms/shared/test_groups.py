"""Scores within their groups: equal to plain statistics, and the same bits whichever rank computes them."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.rlhf_tasks.algorithms.shared.groups import (
    all_equal,
    best_of_group,
    group_stds,
    less_mean,
    less_others,
    on_tokens,
    per_group,
    response_lengths,
    response_sums,
)


@given(st.integers(2, 5), st.integers(1, 6), st.data())
def test_statistics_are_those_of_each_group(size, n, data):
    values = st.one_of(st.sampled_from([0.0, 1.0, 0.1]), st.floats(-10, 10))
    groups = data.draw(st.lists(st.lists(values, min_size=size, max_size=size), min_size=n, max_size=n))
    scores = torch.tensor(groups, dtype=torch.float64).flatten()
    means, stds, others, best = [], [], [], []
    for group in groups:
        means += [score - statistics.fmean(group) for score in group]
        stds += [statistics.stdev(group)] * size
        others += [score - (sum(group) - score) / (size - 1) for score in group]
        best += [place == group.index(max(group)) for place in range(size)]
    assert less_mean(scores, size).tolist() == pytest.approx(means, abs=1e-12)
    assert less_others(scores, size).tolist() == pytest.approx(others, abs=1e-12)
    assert group_stds(scores, size).tolist() == pytest.approx(stds, abs=1e-12)
    assert best_of_group(scores, size).tolist() == best
    assert all_equal(scores, size).tolist() == [len(set(group)) == 1 for group in groups for _ in group]


def test_a_group_of_equal_scores_has_nothing_to_learn():
    """The mean of eight times 0.1 is not 0.1 in floating point."""
    scores = torch.full((7,), 0.1)
    assert less_mean(scores, 7).tolist() == less_others(scores, 7).tolist() == [0.0] * 7


def test_the_bits_do_not_depend_on_the_other_groups():
    scores = torch.randn(60, generator=torch.Generator().manual_seed(0))
    for function in (less_mean, less_others, group_stds):
        whole = function(scores, 6)
        parts = [function(scores[at : at + 12], 6) for at in range(0, 60, 12)]
        assert torch.equal(whole, torch.cat(parts))


def test_a_score_that_is_not_a_number_spoils_its_group_alone():
    scores = torch.tensor([float("nan"), 1.0, 0.0, 1.0])
    assert less_mean(scores, 2).isnan().tolist() == [True, True, False, False]


FUNCTIONS = (all_equal, best_of_group, group_stds, less_mean, less_others)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_group_that_has_lost_samples_counts_as_a_smaller_group_to_the_last_bit(function):
    scores = torch.randn(24, generator=torch.Generator().manual_seed(1))
    left = [0, 1, 2, 3, 5, 6, 7, 12, 13, 14, 16, 23]  # of six groups: 4, 3, none, 3, 1, 1
    found = per_group(function, scores[left], left, 4)
    expected = [
        function(scores[group], len(group)) for group in ([0, 1, 2, 3], [5, 6, 7], [12, 13, 14], [16], [23])
    ]
    assert torch.equal(found, torch.cat(expected))
    assert found.dtype == function(scores, 4).dtype
    assert torch.equal(per_group(function, scores, range(24), 4), function(scores, 4))
    assert len(per_group(function, scores[:0], [], 4)) == 0


def test_a_sample_that_is_left_alone_has_nothing_to_be_compared_with():
    alone = torch.tensor([3.0])
    assert (
        less_mean(alone, 1).tolist()
        == less_others(alone, 1).tolist()
        == group_stds(alone, 1).tolist()
        == [0.0]
    )
    assert all_equal(alone, 1).tolist() == best_of_group(alone, 1).tolist() == [True]


def test_sums_and_values_of_responses():
    mask, lengths = torch.tensor([0, 1, 1, 0, 0, 0, 1]).bool(), [4, 1, 2]
    values = torch.arange(7.0)
    assert response_sums(values, mask, lengths).tolist() == [3.0, 0.0, 6.0]
    assert response_lengths(mask, lengths).tolist() == [2, 0, 1]
    assert on_tokens(torch.tensor([5.0, 6.0, 7.0]), lengths).tolist() == [5, 5, 5, 5, 6, 7, 7]
    nothing = torch.zeros(0)
    assert response_sums(nothing, nothing.bool(), []).shape == on_tokens(nothing, []).shape == (0,)
