"""Sentences about a priced plan."""

from types import SimpleNamespace

import pytest

from planner.report.report import mode_rows, proof_sentence


def searched(time_s: float, lower_bound_s: float) -> SimpleNamespace:
    """What a search found, as far as its sentence needs it."""
    return SimpleNamespace(
        iteration_time_s=time_s,
        lower_bound_s=lower_bound_s,
        compile_s=0.0,
        mode="search",
        evaluations=7,
        late=False,
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("lower_bound_s", "told"),
    [
        (20.0, "at most 0.0% above the optimum"),
        (19.9999, "at most 0.1% above the optimum"),
        (19.75, "at most 1.3% above the optimum"),  # 1.27%: at most 1.2% would be too little
        (16.0, "at most 25.0% above the optimum"),
        (0.0, "no bound on its distance from the optimum"),
    ],
)
def test_a_gap_is_never_told_as_less_than_it_is(lower_bound_s, told):
    assert f": {told} (search" in proof_sentence(searched(20.0, lower_bound_s))


def test_a_mode_that_is_hardly_slower_is_not_told_to_be_nothing_above_the_best():
    found = {
        "search": searched(20.0, 20.0),
        "mcmc": searched(20.001, 20.0),
        "heuristic": searched(25.0, 20.0),
    }
    assert [row.remark for row in mode_rows(found, 100)] == ["", "less than +0.1%", "+25.0%"]
