"""Failpoints: what is armed happens there and nowhere else; the table and the code name the same places."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_rlhf.rlhf_tasks.system import failpoints
from prefect_rlhf.rlhf_tasks.system.failpoints import (
    VARIABLE,
    Failpoint,
    Point,
    Whereabouts,
    arm,
    at,
    parse,
    reach,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def disarmed():
    yield
    arm("")


def test_a_text_says_place_action_and_when():
    assert parse("backward:kill@rank1@iter3, shard_synced:delay=0.5@gen0@attempt2") == (
        Failpoint(Point.BACKWARD, "kill", 0.0, Whereabouts(rank=1, iter=3)),
        Failpoint(Point.SHARD_SYNCED, "delay", 0.5, Whereabouts(gen=0, attempt=2)),
    )
    assert parse("save:stop@iter-1")[0].place == Whereabouts(iter=-1), "step 0 is of no iteration"
    assert parse("") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("backwards:kill", "no place 'backwards'"),
        ("backward", "not of the form"),
        ("backward:explode", "not of the form"),
        ("backward:kill@node1", "not of the form"),
        ("backward:delay", "not of the form"),
        ("backward:kill=3", "not of the form"),
    ],
)
def test_what_is_no_failpoint_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)


def test_only_the_place_that_is_armed_acts_and_only_where_it_was_told_to():
    arm("backward:raise@rank1@iter3@gen0")
    elsewhere = [(0, 3, 0, 1), (1, 2, 0, 1), (1, 3, 1, 1), (None, 3, 0, 1)]
    for place in elsewhere:
        with at(*place):
            reach(Point.BACKWARD)
    with at(1, 3, 0, 7):
        reach(Point.REWARD)
        with pytest.raises(RuntimeError, match="failpoint backward"):
            reach(Point.BACKWARD)
    reach(Point.BACKWARD)


def test_a_full_disk_can_be_had():
    arm("shard_begun:full")
    with pytest.raises(OSError, match="No space left on device"):
        reach(Point.SHARD_BEGUN)


def test_the_environment_arms_a_process():
    program = (
        "from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach; "
        "reach(Point.SAVE); print('here'); reach(Point.COMMIT)"
    )
    environment = {**os.environ, VARIABLE: "commit:kill", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"here\n")


def test_every_place_of_the_table_is_in_the_code():
    own = Path(failpoints.__file__)
    sources = [path for package in ("rlhf_tasks", "flows") for path in (ROOT / package).rglob("*.py")]
    code = "\n".join(path.read_text() for path in sources if path != own)
    assert sorted(re.findall(r"reach\(Point\.(\w+)", code)) == sorted(point.name for point in Point), (
        "each once"
    )
    assert len({point.label for point in Point}) == len(Point)
