"""A flow process that is killed at any failpoint of its own costs nothing: its run continues to the same bits."""

import json
import signal

import pytest

from prefect_rlhf.rlhf_tasks.system.failpoints import FLOW, VARIABLE, Point
from tests.committed import assert_same_run, generations_of
from tests.flows.marked_command import MarkedCommand
from tests.flows.test_killed_run import begin, finish

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1800)]
ITERATIONS = 3
AT = {Point.ENTER: "@iter1", Point.ENTERED: "@iter1"}
WEIGHTS = "model/model.safetensors"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run to which nothing happened."""
    base = tmp_path_factory.mktemp("undisturbed")
    command, folder = begin(base, "undisturbed", ITERATIONS)
    finish(base / "log", command)
    return folder


@pytest.mark.parametrize(
    "point",
    [  # a change of plan has its own test (test_changing_plans.py)
        pytest.param(point, id=point.label)
        for point in Point
        if point.process == FLOW and point is not Point.PLAN_LOGGED
    ],
)
def test_a_flow_killed_there_goes_on_by_its_command_to_the_same_bits(tmp_path, undisturbed, point):
    command, folder = begin(tmp_path, "killed", ITERATIONS)
    armed = {VARIABLE: f"{point.label}:kill{AT.get(point, '')}"}
    with MarkedCommand(tmp_path / "killed.log", *command, environment=armed) as run:
        assert run.process.wait(900) == -signal.SIGKILL, run.output
        run.assert_gone()
    assert not (folder / "summary.json").exists()

    finish(tmp_path / "again.log", ["run", "ppo", "--resume", str(folder)])
    assert_same_run(folder, undisturbed)
    assert (folder / WEIGHTS).read_bytes() == (undisturbed / WEIGHTS).read_bytes()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["iterations"], summary["model"]) == (ITERATIONS, str(folder / "model"))
    resumed = {attempt for attempt, _ in generations_of(folder).values()}
    if point in (Point.EXPORT, Point.EXPORTED):
        assert resumed == {1}, "nothing is trained again"
    else:
        assert 2 in resumed
