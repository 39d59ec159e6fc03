"""`prefect-rlhf pause`, `resume` and `stop` on a run that continues: it ends with the bits of an undisturbed one."""

import json

import pytest

from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.rlhf_tasks.checkpoint.commits import newest_step
from tests.committed import assert_same_run
from tests.flows.marked_command import MarkedCommand
from tests.flows.test_killed_run import ITERATIONS, begin, finish

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1800)]


def forks(run) -> int:
    """Forks of the fork server: ranks and controller."""
    return sum("forkserver" in line for line in run.alive()) - 1


def test_a_run_that_is_paused_resumed_stopped_and_gone_on_with_ends_with_the_same_bits(tmp_path):
    command, undisturbed = begin(tmp_path, "undisturbed")
    finish(tmp_path / "undisturbed.log", command)
    command, folder = begin(tmp_path, "ordered")

    def commits(step):
        return lambda: (newest_step(folder) or 0) >= step

    def order(*words):
        assert run_command([*words, str(folder)]) == 0

    with MarkedCommand(tmp_path / "ordered.log", *command) as run:
        run.wait_until(commits(2))
        order("pause", "--release")
        run.wait_until(lambda: "paused at commit" in run.output)
        run.wait_until(lambda: forks(run) == 0)
        released = newest_step(folder)
        order("resume")
        run.wait_until(commits(released + 2))
        order("pause")
        run.wait_until(lambda: run.output.count("paused at commit") == 2)
        held = newest_step(folder)
        assert forks(run), "the ranks are kept"
        order("stop")
        assert run.process.wait(300) == 0, run.output
        run.assert_gone()
    assert released < held < ITERATIONS, "it was not stopped midway"
    assert newest_step(folder) == held, "a rank trained after the pause"
    assert json.loads((folder / "summary.json").read_text())["iterations"] == held
    stopped = (folder / "model" / "model.safetensors").read_bytes()

    finish(tmp_path / "again.log", ["run", "ppo", "--resume", str(folder)])
    assert_same_run(folder, undisturbed)
    weights = (folder / "model" / "model.safetensors").read_bytes()
    assert weights != stopped
    assert weights == (undisturbed / "model" / "model.safetensors").read_bytes()
