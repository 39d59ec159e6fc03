"""What a run expected and what its ranks' clocks say, by hand."""

import pytest

from flows.artifacts import _planned_row
from flows.planned import Planned, planned, planned_and_measured
from planner.price import MemoryPeak, PlanPrice
from planner.simulate import SteadyState
from tests.rlhf_tasks.plans import small_plan
from tests.tiny_runs import ppo_config


def row(node, iteration, clocks, attempt=1, **peaks):
    starts, ends = zip(*clocks.values(), strict=True)
    return {
        "node": node,
        "iteration": iteration,
        "attempt": attempt,
        "generation": 0,
        "clocks": clocks,
        "started_s": min(starts),
        "ended_s": max(ends),
        "peak_bytes": {rank.removeprefix("rank"): size for rank, size in peaks.items()},
    }


@pytest.fixture
def expected():
    plan = small_plan()
    seconds = dict.fromkeys((node.name for node in plan.nodes), 1.0)
    peaks = {device: MemoryPeak("generate", {"parameters": 10.0}) for device in (0, 1)}
    return Planned(PlanPrice(seconds, {}, SteadyState(3.0, (), {}), peaks), 5, "preset of cpu-slot")


def test_planned_and_measured_by_hand(expected):
    lineage = []
    for t, length in enumerate((9.0, 2.0, 4.0, 2.0)):
        start = (0.0, 20.0, 24.0, 28.0)[t]
        lineage += [
            # rank 1 comes half a second late: the call begins when both are there
            row(
                "generate",
                t,
                {"0": (start, start + 1), "1": (start + 0.5, start + 1)},
                rank0=100 + t,
                rank1=50,
            ),
            row("actor_train", t, {"0": (start + 1, start + 1 + length)}, rank0=70),
            row("critic_train", t, {"1": (start + 1, start + 2)}, rank1=90),
        ]
    found = planned_and_measured(small_plan(), expected, lineage)
    assert found["source"] == "preset of cpu-slot"
    assert found["iteration"] == {
        "planned": 3.0,
        "measured": 6.0,
    }  # ends at 10, 23, 29, 31: 13, 6 and 2 apart
    assert found["calls"]["generate"] == {"planned": 1.0, "measured": 0.5}
    assert found["calls"]["actor_train"]["measured"] == 2.0  # without the first iteration
    assert found["peak_memory_bytes"] == {
        "0": {"planned": 15.0, "measured": 103},
        "1": {"planned": 15.0, "measured": 90},
    }


def test_one_iteration_is_better_than_none(expected):
    lineage = [row(name, 0, {"0": (1.0, 3.0)}) for name in ("generate", "actor_train", "critic_train")]
    found = planned_and_measured(small_plan(), expected, lineage)
    assert found["iteration"]["measured"] == 2.0
    assert found["calls"]["generate"]["measured"] == 2.0


def test_a_pause_between_two_attempts_is_no_part_of_an_iteration(expected):
    lineage = []
    for t, (attempt, start) in enumerate(((1, 0.0), (1, 3.0), (2, 36_000.0))):
        lineage.append(row("generate", t, {"0": (start, start + 1)}, attempt))
        lineage += [
            row(name, t, {"0": (start + 1, start + 2)}, attempt) for name in ("actor_train", "critic_train")
        ]
    assert planned_and_measured(small_plan(), expected, lineage)["iteration"]["measured"] == 3.0


def test_the_table_says_how_far_off():
    line = _planned_row("iteration, s", {"planned": 3.0, "measured": 2.0})
    assert line == {"what": "iteration, s", "planned": "3", "measured": "2", "difference": "+50%"}


def test_a_run_is_priced_before_it_starts(tmp_path):
    from flows.prepare import prepare

    config = ppo_config(tmp_path, cluster={"devices_per_host": 2})
    plan = prepare(config).plan
    expectation = planned(config, plan)
    assert expectation.source == "preset of cpu-slot"
    assert expectation.price.duration_s.keys() == {node.name for node in plan.nodes}
    assert expectation.process_bytes > 0
