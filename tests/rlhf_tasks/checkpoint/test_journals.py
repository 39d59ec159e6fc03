"""The journals are JSON for every reader, whatever a step computed; what they say of the devices' use, by hand."""

import json
import math

import pytest

from prefect_rlhf.rlhf_tasks.checkpoint.journals import MetricsLines, lineage_lines
from prefect_rlhf.rlhf_tasks.config.responses import TURNS
from prefect_rlhf.rlhf_tasks.spec import NodeKey, NodeResult


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_values_that_are_not_finite_stand_as_null():
    key = NodeKey(run="r", attempt=1, generation=0, iteration=3, node="actor_train")
    metrics = {"loss/policy": math.nan, "grad_norm/actor": math.inf, "kl": -math.inf, "reward": 0.5}
    result = NodeResult(key=key, rank=0, started_s=1.0, ended_s=2.5, metrics=metrics)
    line = json.loads(MetricsLines().line(3, {"actor_train": {0: result}}), parse_constant=_refuse)
    nothing = dict.fromkeys(("loss/policy", "grad_norm/actor", "kl"))
    times = {"time/actor_train": 1.5, "time/iteration": 1.5}
    assert line == {"iteration": 3, "reward": 0.5, **times, **nothing}


def test_lineage_has_what_was_measured_of_turns_and_of_no_other_call():
    """The next plan is made by it (planner/pricing/figures.py)."""
    measured = {name: float(place) for place, name in enumerate(("completions/mean_length", *TURNS))}
    metrics = {"generate": {**measured, "reward": 1.0}, "train": {"completions/mean_length": 3.0}}
    results = {
        node: {
            0: NodeResult(
                key=NodeKey("r", 1, 0, 0, node), rank=0, started_s=1.0, ended_s=2.0, metrics=of_node
            )
        }
        for node, of_node in metrics.items()
    }
    lines = {line["node"]: line.get("turns") for line in map(json.loads, lineage_lines(0, results))}
    assert lines == {"generate": measured, "train": None}


def ran(iteration, *spans, generation=0, attempt=1):
    """Results of nodes, each (start, end, work of rank 0's replica, of rank 1's)."""
    return {
        f"node{i}": {
            rank: NodeResult(
                key=NodeKey("r", attempt, generation, iteration, f"node{i}"),
                rank=rank,
                started_s=started_s,
                ended_s=ended_s,
                flops=flops,
            )
            for rank, flops in enumerate(work)
        }
        for i, (started_s, ended_s, *work) in enumerate(spans)
    }


def utilisation(lines, iteration, results):
    return json.loads(lines.line(iteration, results))["mfu"]


def test_mfu_is_the_models_work_over_what_the_devices_could_have_done():
    """1500 operations in 5 s on devices that can do 1000 a second together."""
    first = ran(0, (10.0, 12.0, 400.0, 600.0), (12.0, 15.0, 500.0, 0.0))
    assert utilisation(MetricsLines(1000.0), 0, first) == pytest.approx(1500 / (5 * 1000))


def test_overlapping_iterations_share_the_time_between_them():
    lines = MetricsLines(1000.0)
    lines.line(0, ran(0, (10.0, 15.0, 1500.0)))
    overlapping = ran(1, (13.0, 18.0, 1500.0))
    assert utilisation(lines, 1, overlapping) == pytest.approx(1500 / (3 * 1000)), "since the last one ended"


@pytest.mark.parametrize("life", [{"generation": 1}, {"attempt": 2}], ids=str)
def test_mfu_counts_no_time_between_two_lives(life):
    lines = MetricsLines(1000.0)
    lines.line(0, ran(0, (10.0, 15.0, 1500.0)))
    again = ran(1, (100.0, 105.0, 1500.0), **life)
    assert utilisation(lines, 1, again) == pytest.approx(1500 / (5 * 1000))


def test_mfu_is_not_invented_where_nobody_knows_the_peak():
    assert "mfu" not in json.loads(MetricsLines().line(0, ran(0, (10.0, 15.0, 1500.0))))
