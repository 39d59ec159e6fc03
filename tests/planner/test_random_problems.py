"""What is compared on a slow machine: only searches whose options were all priced."""

import pytest

from prefect_rlhf.planner.search.search import find_plan
from tests.planner import random_problems
from tests.planner.random_problems import OTHERS, excess, random_problem

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes


def test_no_search_is_compared_that_its_limit_ended_before_all_options_were_priced(monkeypatch):
    found = list[tuple[str, float, bool]]()

    def noted(problem, mode, limit_s):
        try:
            result = find_plan(problem, mode, limit_s)
        except ValueError:
            found.append((mode, limit_s, True))
            raise
        found.append((mode, limit_s, result.late))
        return result

    monkeypatch.setattr(random_problems, "find_plan", noted)
    excess(random_problem(6), 1e-3)
    searches = [(limit_s, late) for mode, limit_s, late in found if mode == "search"]
    assert [limit_s for limit_s, _ in searches] == [1e-3 * 2**i for i in range(len(searches))]
    assert [late for _, late in searches] == [True] * (len(searches) - 1) + [False]
    last_s = searches[-1][0]
    assert [(mode, limit_s) for mode, limit_s, _ in found[len(searches) :]] == [
        (o, last_s / 2) for o in OTHERS
    ]


def test_a_machine_on_which_no_limit_suffices_is_said(monkeypatch):
    monkeypatch.setattr(random_problems, "MOST_S", 3e-6)
    with pytest.raises(TimeoutError, match="on 1x3 are not priced in 2e-06 s"):
        excess(random_problem(6), 1e-6)
