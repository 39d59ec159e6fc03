"""Rehearsals: the real state machines on simulated ranks, against what the planner and arithmetic say."""

import logging
import random
import subprocess
import sys

import pytest

from prefect_rlhf.planner.plan.steady_state import steady_state
from prefect_rlhf.rlhf_tasks.rehearsal.assumptions import (
    ControllerFault,
    HostFault,
    Machines,
    RankFault,
    SlowFault,
)
from prefect_rlhf.rlhf_tasks.rehearsal.rehearsal import Smaller
from prefect_rlhf.rlhf_tasks.rehearsal.story import OWN, RETURNING, RUNNING, STARTING, WAITING
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.rlhf_tasks.protocol.ledgers import pair_plan
from tests.rlhf_tasks.protocol.plans import ahead_plan, random_plan, small_plan
from tests.rlhf_tasks.rehearsal.rehearsals import ITERATION_S, SECONDS, costs_of, quick, rehearsed

KILLED = RankFault(kind="kill", at_s=100, rank=1)


def test_a_rehearsal_loads_neither_torch_nor_dask_nor_prefect():
    script = (
        "import sys, prefect_rlhf.rlhf_tasks.rehearsal.rehearsal\n"
        "print([name for name in ('torch', 'distributed', 'dask', 'prefect') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


@pytest.mark.parametrize("seed", range(4))
def test_a_quiet_run_takes_the_steady_state_s_time_of_the_planner(seed):
    """The planner's maximum cycle ratio and the run of the real state machines agree on random plans."""
    draw = random.Random(seed)
    plan = random_plan(draw, n_devices=5, n_nodes=14)
    seconds = {node.name: float(draw.randint(0, 9)) for node in plan.nodes}
    period_s = steady_state(plan, seconds).iteration_time_s
    few, many = (
        rehearsed(plan, seconds=seconds, iterations=n, snapshot_every=1000).elapsed_s for n in (20, 50)
    )
    assert (many - few) / 30 == pytest.approx(period_s, rel=0.02)


@pytest.mark.parametrize("fault", [None, KILLED])
def test_a_run_that_samples_ahead_commits_every_iteration(fault):
    plan, seconds = ahead_plan(1), {**SECONDS, "save_samples": 0.0}
    found = rehearsed(plan, seconds=seconds, part_bytes=1e6, faults=[fault] if fault else [])
    assert found.finished
    assert found.story.committed == 20
    assert [commit.step for commit in found.story.commits][-1] == 20


def test_every_second_has_a_cause_and_every_iteration_is_committed():
    found = rehearsed(iterations=20, noise=0.1)
    assert found.finished
    assert found.ended == "finished: iteration 20 is committed"
    assert found.story.committed == found.rehearsed == 20
    assert sum(found.story.seconds.values()) == pytest.approx(found.elapsed_s)
    assert set(found.story.seconds) <= {STARTING, RUNNING, WAITING}
    assert [commit.step for commit in found.story.commits] == list(range(1, 21))
    assert found.false_faults == []


def test_the_same_seed_gives_the_same_figures_and_another_one_others():
    one, same, other = (rehearsed(noise=0.2, seed=seed).elapsed_s for seed in (3, 3, 4))
    assert one == same != other


@pytest.mark.parametrize(
    ("fault", "noticed_s"),
    [
        (KILLED, Machines().noticed_s),
        (RankFault(kind="error", at_s=100, rank=1), 1.0),
        (RankFault(kind="hang", at_s=100, rank=1), 80.0),
        (RankFault(kind="stop", at_s=100, rank=1), 80.0),
        (HostFault(kind="host", at_s=100, host=0, for_s=100), Machines().noticed_s),
        (ControllerFault(kind="controller", at_s=100), 0.0),
    ],
)
def test_a_run_goes_on_after_a_fault_and_what_it_cost_is_told_by_its_kind(fault, noticed_s):
    """A call that hangs is found out at its deadline: ten times its seconds here."""
    quiet, found = rehearsed(), rehearsed(faults=[fault])
    kind, seconds = fault.kind, found.story.seconds
    assert found.finished
    assert found.story.committed == 20
    assert found.story.struck == {kind: 1}
    assert [seen.cause for seen in found.story.faults] == [kind]
    assert found.false_faults == []
    if kind in ("hang", "stop"):
        assert 50.0 < seconds[f"noticing: {kind}"] < noticed_s + 1
    else:
        assert seconds[f"noticing: {kind}"] == pytest.approx(noticed_s, abs=0.5)
    assert seconds[f"rebuilding: {kind}"] > 5.0
    assert 0.0 < seconds[f"repeating: {kind}"] < 2 * ITERATION_S
    assert sum(seconds.values()) == pytest.approx(found.elapsed_s)
    lost_s = sum(spent_s for cause, spent_s in seconds.items() if cause.endswith(kind))
    # The window of two iterations fills anew after the rebuild.
    assert found.elapsed_s - quiet.elapsed_s == pytest.approx(lost_s, abs=ITERATION_S)


def test_an_error_that_finds_an_idle_rank_is_raised_in_its_next_call():
    """All wait for commits of 75 s when it strikes, which shows in nothing until the call."""
    slow = {"part_bytes": 25e9, "machines": Machines(disk_bytes_per_s=1e9), "iterations": 10}
    quiet = rehearsed(**slow)
    found = rehearsed(**slow, faults=[RankFault(kind="error", at_s=300, rank=1)])
    assert found.finished
    assert [seen.cause for seen in found.story.faults] == ["error"]
    assert found.story.faults[0].at_s > 305.0
    assert "an error of the rehearsal" in found.story.faults[0].sentence
    assert found.story.seconds["noticing: error"] == pytest.approx(1.0, abs=0.5)
    assert found.elapsed_s > quiet.elapsed_s


@pytest.mark.parametrize("kind", ["hang", "stop"])
def test_a_rank_that_hangs_while_it_waits_for_others_to_load_is_noticed_in_its_first_call(kind):
    """Rank 0 loads until 36 s; rank 1 has nothing to read."""
    found = rehearsed(
        read_bytes={0: 30e9, 1: 0.0, 2: 0.0},
        machines=Machines(disk_bytes_per_s=1e9),
        faults=[RankFault(kind=kind, at_s=20, rank=1)],
    )
    assert found.finished
    assert [seen.cause for seen in found.story.faults] == [kind]
    assert found.story.seconds[f"noticing: {kind}"] > 50.0, "the deadline of the call"


def test_a_controller_that_is_lost_while_its_attempt_starts_leaves_nothing_behind():
    """The commit of 120 GB is hashed from 480 s to 600 s at 1 GB/s; the second fault strikes meanwhile."""
    slow = Machines(disk_bytes_per_s=1e9)
    faults = [ControllerFault(kind="controller", at_s=at_s) for at_s in (420, 520)]
    one, two = (
        rehearsed(faults=faults[:n], machines=slow, part_bytes=40e9, snapshot_every=10, iterations=40)
        for n in (1, 2)
    )
    assert two.finished
    assert [seen.cause for seen in two.story.faults] == ["controller"] * 2
    # The third attempt takes as long as the second one would have: nothing else uses disk or ranks.
    assert two.elapsed_s - one.elapsed_s == pytest.approx(100.0, abs=2.0)


def test_a_killed_process_is_replaced_and_the_rebuild_lasts_as_long_as_its_start_and_the_restore():
    machines = Machines(start_s=40.0, join_s=7.0, noticed_s=2.0, reset_s=1.0, disk_bytes_per_s=1e9)
    found = rehearsed(faults=[KILLED], machines=machines, part_bytes=1e9, read_bytes=5e9)
    # Three ranks of one host read 5 GB each, and 1 GB for each part of theirs, at 1 GB/s.
    expected_s = 40.0 - 2.0 + 1.0 + 7.0 + 18.0
    assert found.story.seconds["rebuilding: kill"] == pytest.approx(expected_s, abs=3.0)


def test_a_kill_in_ten_iterations_of_ten_seconds_leaves_nine_tenths_of_the_time_on_cpus():
    """With the demo's parts of a commit; tests/flows/test_effective_time.py does it on ranks."""
    draw, n = random.Random(0), 100
    seconds = {name: taken_s * 10 / ITERATION_S for name, taken_s in SECONDS.items()}
    kills = [
        RankFault(kind="kill", at_s=106.0 * tenth + draw.uniform(5, 95), rank=draw.randrange(3))
        for tenth in range(n // 10)
    ]
    found = rehearsed(
        seconds=seconds, iterations=n, part_bytes=3.2e6, faults=kills, machines=Machines.of_cpus(1e8)
    )
    assert found.finished
    assert len(found.story.faults) == n // 10
    share = n * 10 / found.elapsed_s
    assert share >= 0.9
    assert n * 10 / (found.elapsed_s + 25.0 * len(kills)) < 0.9, "with GPUs' start of 25 s it is less"


def test_a_host_that_stays_away_makes_the_run_give_up():
    gone = HostFault(kind="host", at_s=100, host=0, for_s=86_400)
    found = rehearsed(faults=[gone])
    assert not found.finished
    assert "did not come back within 310 s" in found.ended
    assert "3 rebuilds" in found.ended


HOSTS = small_plan().model_copy(update={"devices_per_host": 1})
"""The small plan on three hosts of one device."""
HOSTS_OF_TWO = pair_plan().model_copy(update={"devices_per_host": 1})


def on_two(there):
    """What is done without one of three devices: all train together, in 20 s."""
    assert there.count(False) == 1, "the plan is for two"
    made = quick(pair_plan(), 20)
    costs = costs_of(made.spec.plan, {"train": 19.0, "save": 1.0}, iteration_s=20.0)
    limits = made.spec.limits.model_copy(update={"awaits_lost": False})
    spec = made.spec.model_copy(update={"plan": HOSTS_OF_TWO, "limits": limits})
    return Smaller(tuple(slot for slot in range(3) if there[slot]), spec, costs)


@pytest.mark.parametrize(("host", "n", "leaps"), [(2, 100, False), (1, 400, True)])
def test_a_run_that_may_shrink_goes_on_without_a_host_and_takes_it_back_at_a_commit(host, n, leaps):
    gone = HostFault(kind="host", at_s=100, host=host, for_s=1100)
    meant_for_it = RankFault(kind="kill", at_s=700, rank=host)
    options = {"plan": HOSTS, "faults": [gone, meant_for_it], "iterations": n, "leaps": leaps}
    found = rehearsed(**options, smaller=on_two, awaits_lost=False)
    assert found.finished
    assert found.story.committed == n
    assert (found.rehearsed < n) == leaps
    assert [seen.cause for seen in found.story.faults] == ["host"]
    assert found.story.seconds["rebuilding: host"] == pytest.approx(310 + 10 + 10, abs=10)
    # From 430 to 1225 s an iteration takes 20 s, before and after that 16.
    assert found.elapsed_s == pytest.approx(n * ITERATION_S + 330 + 800 * (1 - 16 / 20) + 20, abs=40)
    assert 0 < found.story.seconds[RETURNING] < 30
    waited = rehearsed(**options, awaits_lost=True, max_restarts=10)
    assert waited.finished
    assert waited.elapsed_s > found.elapsed_s + 300


def test_a_run_that_may_shrink_and_has_no_plan_for_what_is_left_ends_with_that_sentence():
    def none(there):
        raise ConfigError("device 0 lacks 5 bytes")

    gone = HostFault(kind="host", at_s=100, host=1, for_s=86_400)
    found = rehearsed(HOSTS, faults=[gone], smaller=none, awaits_lost=False)
    assert (found.finished, found.story.committed > 0) == (False, True)
    assert "there is no plan for the devices that are left: device 0 lacks 5 bytes" in found.ended


def test_a_host_that_is_lost_after_another_one_leaves_what_the_plan_for_fewer_says():
    asked = []

    def for_what_is_left(there):
        asked.append(there)
        if there.count(False) == 1:
            return on_two(there)
        raise ConfigError("nothing fits")

    faults = [
        HostFault(kind="host", at_s=at_s, host=host, for_s=86_400) for at_s, host in ((100, 0), (900, 2))
    ]
    found = rehearsed(HOSTS, faults=faults, smaller=for_what_is_left, awaits_lost=False, iterations=200)
    assert asked == [[False, True, True], [False, True, False]]
    assert not found.finished
    assert found.story.struck == {"host": 2}


def test_a_rank_that_dies_without_end_makes_the_run_give_up():
    again = [RankFault(kind="kill", at_s=100 + 40 * n, rank=1) for n in range(20)]
    found = rehearsed(faults=again)
    assert not found.finished
    assert "3 rebuilds without a commit in between" in found.ended


def test_a_slow_host_stretches_the_run_and_ends_nothing():
    slow = SlowFault(kind="slow", at_s=100, host=0, for_s=100, factor=2.0)
    quiet, found = rehearsed(), rehearsed(faults=[slow])
    assert found.story.faults == []
    assert 40.0 < found.elapsed_s - quiet.elapsed_s < 70.0


@pytest.mark.parametrize(("for_s", "ended"), [(30.0, 1), (2000.0, 16)])
def test_a_host_so_slow_that_deadlines_fire_causes_every_generation_s_end(for_s, ended):
    """A call that begins while the host is slow takes minutes, though the host is fast again before its deadline."""
    slow = SlowFault(kind="slow", at_s=108, host=0, for_s=for_s, factor=60.0)
    found = rehearsed(faults=[slow], max_restarts=40)
    assert found.finished
    assert [seen.cause for seen in found.story.faults] == ["slow"] * ended


def test_what_a_slow_time_has_not_caused_is_not_booked_to_it():
    """The second run has an iteration that takes too long at 160 s, as often as it is repeated."""
    slow = SlowFault(kind="slow_disk", at_s=20, host=0, for_s=60, factor=1.1)
    killed = rehearsed(faults=[slow, RankFault(kind="kill", at_s=50, rank=1)])
    tight = rehearsed(faults=[slow], noise=0.3, deadline_floor_s=14.0, deadline_factor=1.0)
    assert [seen.cause for seen in killed.story.faults] == ["kill"]
    assert killed.story.seconds["rebuilding: kill"] > 5.0
    assert [seen.cause for seen in tight.story.faults] == [OWN] * 4


def test_a_call_that_takes_longer_than_its_deadline_is_a_fault_of_the_run_itself():
    """Noise can do this, where a deadline is too tight."""
    found = rehearsed(deadline_floor_s=5.0, deadline_factor=1.0)
    assert not found.finished
    assert {fault.cause for fault in found.story.faults} == {OWN}
    assert "call generate, iteration 1: not finished 5 s after the last rank entered" in found.false_faults[0]


def test_a_wait_that_comes_near_its_deadline_is_told():
    near = rehearsed(deadline_floor_s=12.0, deadline_factor=1.0).watch.near
    assert set(near) == {"call generate", "call actor_train"}
    generate = near["call generate"]
    assert (generate.used_s, generate.limit_s, generate.near) == (pytest.approx(8.0), 12.0, 20)
    assert rehearsed(deadline_floor_s=17.0).watch.near == {}


def test_commits_that_take_longer_than_iterations_hold_the_run_up():
    """Three parts of 25 GB, on a disk of 1 GB/s: nothing is faster than a commit in 75 s."""
    found = rehearsed(part_bytes=25e9, machines=Machines(disk_bytes_per_s=1e9), hours=3.0)
    assert found.story.seconds[WAITING] > found.story.seconds[RUNNING]
    apart = [b.at_s - a.at_s for a, b in zip(found.story.commits, found.story.commits[1:], strict=False)]
    assert min(apart[2:]) == pytest.approx(75.0)
    assert found.most_kept_bytes[0] == pytest.approx(2 * 75e9, rel=0.01), "two iterations are in flight"


def test_a_disk_that_moves_less_than_counts_as_progress_is_a_fault_of_the_run_itself():
    """Parts of 1 GB at 1 MB/s take 20 minutes: no fault at half a megabyte in a second, but one at ten."""
    slow = Machines(disk_bytes_per_s=3e6)
    settled = rehearsed(part_bytes=1e9, machines=slow, iterations=2, io_floor_s=60, io_least_bytes_per_s=5e5)
    refused = rehearsed(part_bytes=1e9, machines=slow, iterations=2, io_floor_s=60, io_least_bytes_per_s=1e7)
    assert settled.finished
    assert settled.false_faults == []
    near = settled.watch.near["progress of a part of a snapshot"]
    assert near.limit_s == 60
    assert 28 < near.used_s < 32, "the half megabytes of a minute, at the pace of the disk"
    assert not refused.finished
    assert "the rank has written fewer than 600000000 bytes in 60 s" in refused.false_faults[0]


def test_fewer_snapshots_repeat_more_work_after_a_fault():
    late = [RankFault(kind="kill", at_s=250, rank=1)]
    each, tenth = (rehearsed(snapshot_every=every, faults=late) for every in (1, 10))
    assert tenth.story.seconds["repeating: kill"] > 3 * each.story.seconds["repeating: kill"]
    assert len(tenth.story.commits) == 2


@pytest.mark.slow
def test_quiet_times_are_counted_as_they_would_have_been_rehearsed():
    faults = [
        RankFault(kind="kill", at_s=4_000, rank=2),
        ControllerFault(kind="controller", at_s=7_000),
        RankFault(kind="kill", at_s=9_000, rank=2),
    ]
    every, leaping = (
        rehearsed(iterations=2000, hours=4.0, noise=0.1, faults=faults, leaps=leaps)
        for leaps in (False, True)
    )
    assert leaping.rehearsed < every.rehearsed / 2
    assert leaping.story.committed == pytest.approx(every.story.committed, rel=0.02)
    assert len(leaping.story.commits) == pytest.approx(len(every.story.commits), rel=0.02)
    assert leaping.elapsed_s == every.elapsed_s == 4 * 3600
    assert sum(leaping.story.seconds.values()) == pytest.approx(leaping.elapsed_s)
    for state in (RUNNING, "repeating: kill", "rebuilding: kill", "rebuilding: controller"):
        spent = leaping.story.seconds[state], every.story.seconds[state]
        assert spent[0] == pytest.approx(spent[1], rel=0.02, abs=2 * ITERATION_S), state
    at = [[fault.at_s for fault in found.story.faults] for found in (leaping, every)]
    assert at[0] == pytest.approx(at[1], abs=5)


def test_a_run_whose_quiet_times_are_counted_ends_with_its_last_iteration():
    found = rehearsed(iterations=400, leaps=True)
    assert found.finished
    assert found.story.committed == 400
    assert found.rehearsed < 200


def test_another_attempt_after_a_quiet_time_ends_with_the_run_s_last_iteration():
    found = rehearsed(iterations=600, leaps=True, faults=[ControllerFault(kind="controller", at_s=6_000)])
    assert found.ended == "finished: iteration 600 is committed"
    assert found.rehearsed + found.story.leapt_iterations == 600
    assert found.rehearsed < 300


def test_rehearsed_faults_are_not_logged_as_if_they_had_happened(caplog):
    with caplog.at_level(logging.ERROR):
        rehearsed(faults=[KILLED])
    assert caplog.records == []


def test_the_small_plan_s_seconds_are_those_that_the_tests_take_for_granted():
    assert steady_state(small_plan(), SECONDS).iteration_time_s == ITERATION_S
