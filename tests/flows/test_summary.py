"""The figures of a run, from rows of its lineage."""

import pytest

from flows.summary import run_figures
from tests.rlhf_tasks.plans import small_plan


def iteration(number: int, start: float, attempt: int) -> list[dict]:
    """Three seconds: generation, half a second in which both ranks idle, then both train."""
    clocks = {
        "generate": {"0": (start, start + 1), "1": (start, start + 1)},
        "actor_train": {"0": (start + 1.5, start + 3)},
        "critic_train": {"1": (start + 1.5, start + 3)},
    }
    return [
        {
            "node": node,
            "iteration": number,
            "attempt": attempt,
            "generation": 0,
            "clocks": ranks,
            "started_s": min(begin for begin, _ in ranks.values()),
            "ended_s": max(end for _, end in ranks.values()),
            "bytes_sent": 0,
        }
        for node, ranks in clocks.items()
    ]


def test_a_run_that_paused_has_the_figures_of_one_that_did_not():
    figures = [
        run_figures(small_plan(), iteration(0, 0.0, attempt=1) + iteration(1, start, attempt))
        for start, attempt in ((3.0, 1), (36_000.0, 2))
    ]
    assert figures[0] == figures[1]
    assert figures[0]["seconds"] == 6.0
    assert figures[0]["orchestration_overhead_s"] == pytest.approx(0.5)


def test_overlaps_are_the_common_seconds_of_the_ranks_clocks():
    """The next iteration generates while both train. That real runs overlap: tests/rlhf_tasks/test_attempt.py."""
    figures = run_figures(small_plan(), iteration(0, 0.0, attempt=1) + iteration(1, 2.0, attempt=1))
    assert figures["overlaps_s"] == {
        "actor_train and critic_train": 3.0,
        "actor_train and generate of the next iteration": 1.0,
        "critic_train and generate of the next iteration": 1.0,
    }
