"""`prefect-rlhf rehearse`: what it tells and writes, and one sentence with status 2 for every mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from prefect_rlhf import deployments
from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.flows.commands.rehearsals import ITERATION_CPU_S, NODE_CPU_S, Rehearsable, priced, rehearsed
from prefect_rlhf.flows.commands.rehearsals import rehearsable as prepared_by_command
from prefect_rlhf.flows.run.planning import figures_of, hardware_of, problem_of
from prefect_rlhf.flows.run.prepare import make_plan
from prefect_rlhf.planner.pricing.figures import RanCall, keep_figures
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.rehearsal.assumptions import HostFault, Machines
from prefect_rlhf.rlhf_tasks.spec import CallNode
from tests.flows.plan_documents import DISJOINT, ppo

EXAMPLE = Path(deployments.__file__).with_name("examples") / "plan-ppo-7b-7b.yaml"


@pytest.fixture
def rehearse(capsys):
    """Runs the command; gives its status, output and errors."""

    def run(*arguments, config=EXAMPLE):
        try:
            status = run_command(["rehearse", "--config", str(config), *map(str, arguments)])
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        return status, printed.out, " ".join(printed.err.split())

    return run


@pytest.mark.whole
def test_a_day_is_told_and_its_figures_are_written(rehearse, tmp_path):
    figures, faults = tmp_path / "figures.json", tmp_path / "faults.yaml"
    faults.write_text("faults: [{kind: kill, at_s: 1800, rank: 3}]")
    status, out, err = rehearse(
        *(
            "--hours",
            2,
            "--faults",
            faults,
            "--json",
            figures,
            "--disk-bytes-per-s",
            1e10,
            "snapshot_every=10",
        )
    )
    assert status == 0, err
    for words in (
        "1x8 a100-80g-sxm",
        "2 hours are over",
        "effective training time",
        "behind their iterations",
        "rebuilding: kill",
        "actor: parameters, gradients, optimizer",
        "copies waiting to be written",
        "Faults: 1 kill; generations that ended: 1",
        "rank 3",
        "Deadlines that came within a factor of 2 of firing",
    ):
        assert words in out, words
    found = json.loads(figures.read_text())
    assert found["finished"]
    assert found["elapsed_s"] == pytest.approx(7200, rel=1e-12)
    assert sum(row["seconds"] for row in found["spent"]) == pytest.approx(7200)
    assert sum(row["share"] for row in found["spent"]) == pytest.approx(1)
    planned_s = found["iterations_committed"] * found["planned_iteration_s"]
    assert found["effective_training_time"] == pytest.approx(planned_s / 7200)
    assert found["spent"][0]["seconds"] == pytest.approx(planned_s)
    assert found["iterations_committed"] == 10 * found["commits"]["commits"] > 100
    assert found["commits"]["commit_bytes"] == pytest.approx(160e9, rel=0.01)
    assert [fault["cause"] for fault in found["generations_ended"]] == ["kill"]
    assert sum(holder["number"] for holder in found["device_memory"]) == 8
    assert found["host_memory"][0]["parts"]["copies waiting to be written"] == pytest.approx(160e9, rel=0.01)
    assert set(found["waits"]) >= {
        "commit",
        "restore",
        "progress of a part of a snapshot",
        "reset of a rank",
        "call actor_train",
    }


def test_a_faster_disk_gives_more_iterations_and_the_run_ends_with_its_last(rehearse, tmp_path):
    found = {}
    for name, disk in (("slow", 2e9), ("fast", 1e11)):
        path = tmp_path / f"{name}.json"
        status, _, err = rehearse(
            "--disk-bytes-per-s", disk, "--json", path, "total_iterations=30", "snapshot_every=1"
        )
        assert status == 0, err
        found[name] = json.loads(path.read_text())
        assert found[name]["ended"] == "finished: iteration 30 is committed"
    assert found["fast"]["elapsed_s"] < found["slow"]["elapsed_s"]
    assert found["fast"]["effective_training_time"] > found["slow"]["effective_training_time"]


def test_a_run_that_gives_up_has_status_1(rehearse, tmp_path):
    faults = tmp_path / "faults.yaml"
    faults.write_text("faults: [{kind: host, at_s: 900, host: 0, for_s: 90000}]")
    status, out, _ = rehearse("--faults", faults, "snapshot_every=10")
    assert status == 1
    assert "Failed after" in out
    assert "the run gave up: ranks 0, 1, 2, 3 and 4 more: did not come back within 310 s" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hours", "0"), "--hours 0: the hours are above 0"),
        (("--hours", "nan"), "--hours nan"),
        (("--hours", "1e9"), "--hours 1e+09"),
        (("--noise", "-0.1"), "--noise -0.1: the noise is from 0 to 1"),
        (("--noise", "2"), "--noise 2"),
        (("--disk-bytes-per-s", "0"), "--disk-bytes-per-s 0: a disk moves 1e6 to 1e13 bytes per second"),
        (("--seed", "1.5"), "--seed 1.5: a seed is a whole number"),
        (("--faults", "nowhere.yaml"), "nowhere.yaml"),
        (("--json", "nowhere/figures.json"), "nowhere/figures.json cannot be written"),
        (("batch_size=0",), "batch_size"),
    ],
)
def test_a_mistake_gets_one_sentence(rehearse, arguments, words):
    status, out, err = rehearse(*arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


def test_a_fault_on_a_rank_that_is_not_there_names_file_entry_and_ranks(rehearse, tmp_path):
    faults = tmp_path / "faults.yaml"
    faults.write_text("faults: [{kind: kill, at_s: 0, rank: 0}, {kind: kill, at_s: 5, rank: 8}]")
    status, _, err = rehearse("--faults", faults)
    assert status == 2
    assert f"{faults}: faults.1: rank 8: the plan has the ranks 0 to 7" in err


def test_a_plan_that_does_not_fit_is_refused_in_the_planner_s_words(rehearse):
    status, _, err = rehearse("planning.device={like: a100-80g-sxm}", "cluster.devices_per_host=1")
    assert status == 2
    assert "Traceback" not in err


CORES = 2


def rehearsable(**changes: Any) -> Rehearsable:
    config = make_config(ppo(**{"total_iterations": 40, **changes}))
    assert isinstance(config, TrainingConfig)
    hardware = hardware_of(config)
    problem = problem_of(config, hardware)
    plan = make_plan(config, problem)
    return priced(config, hardware, problem, plan, price_plan(plan, problem.model), CORES)


def iteration_s(run: Rehearsable) -> float:
    found = rehearsed(run, hours=24.0, machines=Machines(), noise=0.0, seed=0, leaps=False)
    first, last = found.story.commits[0], found.story.commits[-1]
    return (last.at_s - first.at_s) / (last.step - first.step)


def test_on_cpus_the_runs_own_processes_take_their_seconds_from_the_ranks_cores():
    run = rehearsable()
    own_s = (ITERATION_CPU_S + NODE_CPU_S * len(run.plan.nodes)) / CORES
    assert iteration_s(run) == pytest.approx(run.price.iteration_time_s + own_s, rel=1e-3)


def test_on_gpus_they_have_cores_of_their_own():
    run = rehearsable(planning={"device": "h100-sxm", "prompt_tokens": 16})
    assert iteration_s(run) == pytest.approx(run.price.iteration_time_s, rel=1e-3)


def test_a_run_that_may_shrink_goes_on_without_a_host_by_the_plan_for_the_devices_that_are_left():
    changes = {"cluster": {"n_hosts": 2, "devices_per_host": 1}, "plan": "heuristic", "total_iterations": 200}
    run = rehearsable(**changes, on_device_loss="shrink")
    smaller = run.smaller([True, False])
    assert (smaller.slots, smaller.spec.plan.n_devices) == ((0,), 1)
    assert run.smaller([False, True]).slots == (1,)
    hours = 200 * run.costs.iteration_s / 3600 + 1
    gone = HostFault(kind="host", at_s=20 * run.costs.iteration_s, host=1, for_s=86_400)
    found = rehearsed(run, hours=hours, machines=Machines.of_cpus(1e9), noise=0.0, seed=0, faults=[gone])
    assert (found.finished, found.story.committed) == (True, 200)
    with pytest.raises(ConfigError, match="on_device_loss=shrink needs a plan that can be made anew"):
        prepared_by_command(make_config(ppo(plan=DISJOINT, on_device_loss="shrink")))


def test_calls_that_figures_of_runs_correct_have_that_time_in_their_price(tmp_path: Path):
    """What a run measured, it measured beside its own processes."""
    before = rehearsable(output_dir=str(tmp_path))
    calls = [node for node in before.plan.nodes if isinstance(node, CallNode)]
    ran = [RanCall(call=node.name, assignment=node.assignment, seconds=0.3) for node in calls]
    keep_figures(figures_of(before.config, before.problem), ran)
    after = rehearsable(output_dir=str(tmp_path))
    assert after.price.iteration_time_s > 0.3
    assert iteration_s(after) == pytest.approx(after.price.iteration_time_s, rel=0.01)
