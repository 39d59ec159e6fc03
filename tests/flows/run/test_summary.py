"""The figures of a run, from rows of its lineage."""

import pytest

from flows.run.summary import in_short, metrics_of_step, run_figures
from rlhf_tasks.checkpoint.plan_log import RunPlan
from tests.rlhf_tasks.plans import small_plan, swapped_plan

BY_ONE_PLAN = [RunPlan(iteration=0, plan=small_plan())]


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


def test_the_metrics_of_a_step_are_found_by_its_iteration_though_a_damaged_journal_lost_some():
    rows = [{"iteration": t, "eval/reward": t / 10} for t in (0, 3, 4)]
    assert metrics_of_step(rows, 4) == rows[1]
    assert metrics_of_step(rows, 3) == metrics_of_step(rows, 0) == {}


def test_a_run_that_paused_has_the_figures_of_one_that_did_not():
    figures = [
        run_figures(BY_ONE_PLAN, iteration(0, 0.0, attempt=1) + iteration(1, start, attempt))
        for start, attempt in ((3.0, 1), (36_000.0, 2))
    ]
    assert figures[0] == figures[1]
    assert figures[0]["seconds"] == 6.0
    assert figures[0]["orchestration_overhead_s"] == pytest.approx(0.5)


def test_a_run_that_changed_its_plan_is_the_sum_of_its_parts():
    """Iterations 0 and 1 by one plan, 2 by another, after a pause in which ranks loaded the commit."""
    rows = [*iteration(0, 0.0, 1), *iteration(1, 3.0, 1)]
    later = [{**row, "generation": 1} for row in iteration(2, 60.0, 1)]
    changed = run_figures([*BY_ONE_PLAN, RunPlan(iteration=2, plan=swapped_plan())], [*rows, *later])
    assert changed["plan_changes"] == [2]
    assert (changed["iterations"], changed["seconds"]) == (3, 9.0)
    assert changed["orchestration_overhead_s"] == pytest.approx(0.5)
    assert changed["calls"]["actor_train"]["devices"] == [1], "of the last plan"
    assert run_figures(BY_ONE_PLAN, rows)["overlaps_s"]["actor_train and critic_train"] == 3.0
    assert changed["overlaps_s"]["actor_train and critic_train"] == 4.5


def test_overlaps_are_the_common_seconds_of_the_ranks_clocks():
    """The next iteration generates while both train. That real runs overlap:
    tests/rlhf_tasks/controller/test_attempt.py."""
    figures = run_figures(BY_ONE_PLAN, iteration(0, 0.0, attempt=1) + iteration(1, 2.0, attempt=1))
    assert figures["overlaps_s"] == {
        "actor_train and critic_train": 3.0,
        "actor_train and generate of the next iteration": 1.0,
        "critic_train and generate of the next iteration": 1.0,
    }


def test_a_run_is_told_in_a_line_with_the_memory_of_its_fullest_rank_and_its_pace():
    peaks = {"0": {"planned": 3.0e9, "measured": 3.9e9}, "1": {"planned": 3.0e9, "measured": 4.26e9}}
    summary = {
        "iterations": 2,
        "seconds": 61.4,
        "planned_and_measured": {"peak_memory_bytes": peaks},
        "metrics": {"reward": 0.4, "throughput/tokens_per_s": 182.6},
    }
    told = "2 iterations, which took the ranks 61 s, at most 4.3 GB on a rank, 183 tokens/s generated"
    assert in_short(summary) == told
    without = {**summary, "planned_and_measured": {"peak_memory_bytes": {}}, "metrics": {"loss/sft": 1.0}}
    assert in_short(without) == "2 iterations, which took the ranks 61 s"
