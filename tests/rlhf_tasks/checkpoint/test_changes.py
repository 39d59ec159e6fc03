"""The log of a run's plans: what was written down comes back, what was not whole never counted."""

import pytest

from prefect_rlhf.rlhf_tasks.checkpoint.changes import CHANGES, log_change, logged_changes, plan_digest
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.rlhf_tasks.plans import small_plan, swapped_plan


def test_a_run_without_changes_has_none(tmp_path):
    assert logged_changes(tmp_path) == ()


def test_changes_come_back_in_order(tmp_path):
    log_change(tmp_path, 4, swapped_plan())
    change = log_change(tmp_path, 9, small_plan())
    assert (change.file, change.sha256) == ("plan-3.json", plan_digest(small_plan()))
    assert [(c.iteration, c.plan) for c in logged_changes(tmp_path)] == [
        (4, swapped_plan()),
        (9, small_plan()),
    ]


def test_a_line_that_a_crash_cut_short_does_not_count_and_is_overwritten(tmp_path):
    log_change(tmp_path, 4, swapped_plan())
    whole = (tmp_path / CHANGES).read_bytes()
    log_change(tmp_path, 9, small_plan())
    (tmp_path / CHANGES).write_bytes((tmp_path / CHANGES).read_bytes()[: len(whole) + 20])
    assert [c.iteration for c in logged_changes(tmp_path)] == [4]
    log_change(tmp_path, 10, small_plan())
    assert [c.iteration for c in logged_changes(tmp_path)] == [4, 10]


def test_other_files_than_were_written_are_refused_by_name(tmp_path):
    log_change(tmp_path, 4, swapped_plan())
    path = tmp_path / "plan-2.json"
    path.write_text(small_plan().model_dump_json())
    with pytest.raises(
        ConfigError, match=r"plan-2.json is not the plan that plans.jsonl names for iteration 4"
    ):
        logged_changes(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"plan-2.json: no such file.* from iteration 4 on"):
        logged_changes(tmp_path)
    (tmp_path / CHANGES).write_text("{}\n")
    with pytest.raises(ConfigError, match="is not as the run wrote it"):
        logged_changes(tmp_path)


def test_digests_tell_plans_apart():
    assert plan_digest(small_plan()) == plan_digest(small_plan()) != plan_digest(swapped_plan())


def test_a_plan_without_a_lead_has_the_digest_of_the_time_before_leads():
    """Else the runs of that time could not be resumed: their logs name it."""
    assert plan_digest(small_plan()) == "74a20a570db5f11e2fc04b4efed4f7ba5f9731914ab79f0bdf72abba21dd64fe"
    ahead = small_plan().model_copy(
        update={"nodes": tuple(n.model_copy(update={"lead": 1}) for n in small_plan().nodes)}
    )
    assert plan_digest(ahead) != plan_digest(small_plan())
