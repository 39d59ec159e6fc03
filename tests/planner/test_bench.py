"""bench/planner.py on a problem that takes no time."""

import pytest

from bench.planner import measure
from planner.mesh import Cluster

pytestmark = pytest.mark.timeout(600)  # the first run compiles


def test_a_setting_is_measured_and_told(small_problem, capsys):
    """Both modes after each limit, the bound, the proof, and the rules that fit: two devices are too few for
    four roles on devices of their own."""
    report = measure("tiny", small_problem(Cluster(1, 2)), 1, [0.2, 0.4])
    (search,), (mcmc,) = report["runs"]["search"], report["runs"]["mcmc"]
    assert report["best_s"] == search["iteration_time_s"] <= mcmc["iteration_time_s"]
    assert search["proven_optimal"]
    assert search["lower_bound_s"] == pytest.approx(search["iteration_time_s"])
    assert search["replay_error"] < 1e-9
    assert set(report["rules_s"]) == {"heuristic", "symmetric"}
    told = capsys.readouterr().out
    assert "0.4 s: +0.00% (worst +0.00%)" in told
    assert "proved 1 of 1" in told
    assert f"symmetric {report['rules_s']['symmetric']:.3f} s" in told
