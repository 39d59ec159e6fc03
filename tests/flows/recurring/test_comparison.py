"""A model is better where the whole interval of the paired differences lies above the margin."""

from math import sqrt

import pytest

from prefect_rlhf.flows.recurring.comparison import compared


def test_the_interval_is_that_of_the_rows_differences():
    champion = [0.0, 1.0] * 50
    candidate = [1.0, 1.0] * 50
    result = compared(candidate, champion, 0.95, 0.1)
    half = 1.959963984540054 * sqrt(25 / 99) / 10  # 100 differences, half of them 1: s^2 = 100 / 4 / 99
    assert (result.low, result.high) == pytest.approx((0.5 - half, 0.5 + half))
    assert result.is_better
    assert "above the margin 0.1." in result.reason


def test_rows_that_are_hard_for_both_do_not_widen_it():
    champion = [float(row) for row in range(40)]
    result = compared([score + 0.5 for score in champion], champion, 0.99, 0.4)
    assert (result.low, result.high) == pytest.approx((0.5, 0.5))


def test_what_is_no_better_than_the_margin_is_not_better():
    result = compared([1.0] * 40, [1.0] * 40, 0.95, 0.0)
    assert not result.is_better
    assert "not above the margin 0." in result.reason


def test_a_difference_that_the_rows_cannot_decide_names_the_rows_that_could():
    champion, candidate = [0.0, 1.0] * 20, [1.0, 0.0] * 19 + [1.0, 1.0]
    result = compared(candidate, champion, 0.95, 0.0)
    assert result.difference > 0
    assert not result.is_better
    assert f"about {result.rows_to_decide} rows would decide" in result.reason
    times = -(-result.rows_to_decide // 40)
    assert compared(candidate * times, champion * times, 0.95, 0.0).is_better
    fewer = times // 2
    assert not compared(candidate * fewer, champion * fewer, 0.95, 0.0).is_better
