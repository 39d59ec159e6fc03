"""One killed rank in ten iterations of ten seconds costs a run less than a tenth of its time.

The demo's PPO on four ranks; what iterations lack of ten seconds they sleep in generation. `-s` prints the figures.
"""

import json
from pathlib import Path
from statistics import median

import pytest

from prefect_rlhf.rlhf_tasks.checkpoint.journals import LINEAGE
from tests.committed import generations_of
from tests.flows.marked_command import MarkedCommand
from tests.flows.test_killed_run import command_of
from tests.flows.test_two_hosts import the_demos

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1800)]
ITERATIONS, LEAST_S = 20, 10.0
ASLEEP_S = 0.5  # in each of the ten steps of generation
KILLS = (
    "generation:kill@rank1@iter5@gen0",
    "backward:kill@rank0@iter15@gen1",
)  # early and late in an iteration


def test_a_kill_in_ten_iterations_of_ten_seconds_leaves_nine_tenths_of_the_time(tmp_path: Path):
    command = command_of(tmp_path, the_demos(tmp_path, name="killed", total_iterations=ITERATIONS))
    variables = {"PREFECT_RLHF_FAILPOINT": ",".join((f"generation:delay={ASLEEP_S}", *KILLS))}
    with MarkedCommand(tmp_path / "log", *command, environment=variables) as run:
        assert run.process.wait(1500) == 0, run.output
        run.assert_gone()
    folder = tmp_path / "runs" / "killed"
    generations = [generation for _, generation in generations_of(folder).values()]
    assert generations == [0] * 5 + [1] * 10 + [2] * 5
    rows = [json.loads(line) for line in (folder / LINEAGE).read_text().splitlines()]
    ends = [max(row["ended_s"] for row in rows if row["iteration"] == t) for t in range(ITERATIONS)]
    began = min(row["started_s"] for row in rows)
    steps = [end - before for before, end in zip([began, *ends], ends, strict=False)]
    usual_s = median(steps)
    lost_s = ends[-1] - began - ITERATIONS * usual_s
    share = 1 / (1 + lost_s / (ITERATIONS * LEAST_S))  # as if every iteration took ten seconds
    print(f"iterations of {usual_s:.2f} s; after the kills {steps[5]:.2f} and {steps[15]:.2f} s: {share:.1%}")
    assert share >= 0.9
