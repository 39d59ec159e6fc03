"""bench/planner.py on a problem that takes no time."""

import pytest

from bench.planner import measure
from prefect_rlhf.planner.plan.mesh import Cluster

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes


@pytest.mark.whole
def test_a_setting_is_measured_and_told(small_problem, capsys):
    """Both modes, the bound, the replay, and the rules that fit: two devices are too few for four roles on
    devices of their own. A search tells a bound as soon as all options are priced, which a busy machine may do late:
    the limit leaves room for it."""
    report = measure("tiny", small_problem(Cluster(1, 2)), ["search", "mcmc"], 1, [0.1, 5.0])
    runs = [*report["runs"]["search"], *report["runs"]["mcmc"]]
    assert len(runs) == 2
    assert report["best_s"] == min(run["iteration_time_s"] for run in runs)
    for run in runs:
        assert 0 < run["lower_bound_s"] <= run["iteration_time_s"]
        assert run["replay_error"] < 1e-9
        assert set(run["cost_after_s"]) == {"0.1", "5"}
    assert set(report["rules_s"]) == {"heuristic", "symmetric", "hybrid", "colocated"}
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in told] == ["search", "mcmc", "rules"]
    assert f"best {runs[0]['iteration_time_s']:.3f} s" in told[0]
    assert f"symmetric {report['rules_s']['symmetric']:.3f} s" in told[2]
