"""Runs whose commits have samples in flight, drawn ahead of their training or not to their end: whatever dies, these
come from the commit, bit by bit.

The product's executor and snapshots on two ranks; generation is dealt over both.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from distributed.comm import CommClosedError

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.run_identity import accept_changes
from prefect_rlhf.rlhf_tasks.checkpoint.changes import has_samples_in_flight
from prefect_rlhf.rlhf_tasks.checkpoint.commits import step_folder
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import read_manifest
from prefect_rlhf.rlhf_tasks.config.generation import GenerationConfig
from prefect_rlhf.rlhf_tasks.protocol.messages import Faulted, Held
from tests.committed import assert_same_run, metrics_of, state_at
from tests.rlhf_tasks.attempts import attend, committed, found, of_type, resume, run_undisturbed, spec_of_job
from tests.rlhf_tasks.controller.test_kills import armed
from tests.rlhf_tasks.rank.engines_of_others import Restless
from tests.tiny_runs import TWO_RANKS, ppo_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

AT = 2
SEGMENTS = {"max_completion_length": 12, "segment_tokens": 5, "stop": list(range(32, 64))}
WHOLE = {"max_completion_length": 12}
EPISODES = {"max_completion_length": 50, "segment_tokens": 4}
ECHO = f"{Path(__file__).parents[2]}/tiny_environment.py:Echo"
PLAYED = {"factory": ECHO, "max_turn_tokens": 4, "kwargs": {"most": 6}}


class Case(NamedTuple):
    """What is in flight: so many iterations ahead, whether in segments, and whether an environment answers."""

    staleness: int
    segments: bool
    plays: bool = False

    @property
    def iterations(self):
        """The commit after iteration AT has sequences that have not ended, and as many ready samples as any."""
        return AT + 2 + self.staleness

    def plan(self, later=False):
        generation = "0-1 d2" if self.segments else "0-1 d2 tokens"
        first = {**TWO_RANKS, "actor_generate": generation, "actor_inference": "1"}
        changed = {
            "actor_generate": "1",
            "actor_train": "0-1 t2",
        }
        return {**first, **changed} if later else first

    def prepared(self, base, later=False):
        return prepare(
            ppo_config(
                base,
                plan=self.plan(later),
                cluster={"devices_per_host": 2},
                total_iterations=self.iterations,
                staleness=self.staleness,
                sampling=EPISODES if self.plays else SEGMENTS if self.segments else WHOLE,
                environment=PLAYED if self.plays else None,
                dtype="float64",
                keep_last=4,
                optimizer={"learning_rate": 1e-2},
            )
        )


class Played(NamedTuple):
    """A case, its prepared job, and the folder of its run that nothing disturbed."""

    case: Case
    job: Any
    undisturbed: Path

    def spec(self, cluster, folder, **options):
        return spec_of_job(cluster, self.job, folder, self.job.iterations, **options)

    def with_changes(self, **changes):
        """The same with another configuration."""
        return self._replace(job=prepare(self.job.config.model_copy(update=changes)))

    def assert_same(self, folder):
        assert_same_run(folder, self.undisturbed)
        assert state_at(folder, AT + 1) == state_at(self.undisturbed, AT + 1)


def each(*cases):
    """A test of each of these cases; the first one of all is in the default suite."""
    return pytest.mark.parametrize(
        "played",
        [
            pytest.param(
                case,
                id=f"staleness-{case.staleness}{'-segments' * case.segments}{'-episodes' * case.plays}",
                marks=() if case == Case(1, True) else pytest.mark.slow,
            )
            for case in cases
        ],
        indirect=True,
    )


IN_SEGMENTS = (Case(1, True), Case(0, True), Case(2, True))
AHEAD = Case(2, False)
PLAYS = Case(1, True, plays=True)


@pytest.fixture(scope="module")
def played(request, cluster, tmp_path_factory):
    case, base = request.param, tmp_path_factory.mktemp("job")
    job = case.prepared(base)
    with found(cluster, base) as now:  # other cases have killed processes
        spec = spec_of_job(now, job, base / "undisturbed", case.iterations)
        return Played(case, job, run_undisturbed(now, spec))


def drawn_at(folder, step):
    """The ids of the samples that a commit has for later iterations."""
    tensors, _ = state_at(folder, step)
    ids = [
        held
        for (role, _, name), (_, held) in tensors.items()
        if role == "actor_generate" and name == "old_logprobs/ids"
    ]
    return sorted(int.from_bytes(held[i : i + 8], "little") for held in ids for i in range(0, len(held), 8))


@each(AHEAD)
def test_a_commit_has_the_samples_of_the_iterations_to_come(played):
    case, folder = played.case, played.undisturbed
    assert [line["staleness/max"] for line in metrics_of(folder)] == [0, 1, 2, 2, 2, 2]
    for step in (AT + 1, AT + 2, case.iterations):
        assert read_manifest(step_folder(folder, step)).cursor == 16 * step
        wanted = range(16 * step, 16 * min(step + case.staleness, case.iterations))
        assert drawn_at(folder, step) == list(wanted)


@each(*IN_SEGMENTS)
def test_a_commit_has_the_sequences_that_have_not_ended_and_the_last_iteration_leaves_none(played):
    case, folder = played.case, played.undisturbed
    at = step_folder(folder, AT + 1)
    assert has_samples_in_flight(at, read_manifest(at))
    assert bool(drawn_at(folder, AT + 1)) == bool(case.staleness)
    end = step_folder(folder, case.iterations)
    assert not has_samples_in_flight(end, read_manifest(end))
    told = [line["segments/unfinished"] for line in metrics_of(folder) if "segments/unfinished" in line]
    assert told[-1] == 0 < max(told)


@pytest.mark.parametrize("point", ["generation", pytest.param("answer", marks=pytest.mark.slow)])
@each(*IN_SEGMENTS, AHEAD, PLAYS)
def test_a_rank_that_is_killed_costs_nothing(cluster, played, tmp_path, point):
    folder = tmp_path / "run"
    folder.mkdir()
    with found(cluster, folder) as now, armed(now, f"{point}:kill@rank1@iter{AT}@gen0"):
        events = asyncio.run(attend(now, played.spec(now, folder)))
    assert of_type(events, Faulted)
    assert committed(events) == list(range(played.case.iterations))
    played.assert_same(folder)


def killed(cluster, played, folder):
    """Begin a run, whose controller is killed before it has committed iteration AT. Returns that one's address."""
    folder.mkdir()
    with (
        found(cluster, folder) as now,
        armed(now, f"manifest_synced:kill@iter{AT}@attempt1"),
        pytest.raises(CommClosedError),
    ):
        asyncio.run(attend(now, played.spec(now, folder)))
    return {now.controller.address}


@each(*IN_SEGMENTS, AHEAD, PLAYS)
def test_nor_does_a_whole_run_that_is_killed_and_resumed(cluster, played, tmp_path):
    folder = tmp_path / "run"
    gone = killed(cluster, played, folder)
    events = resume(cluster, folder, gone, lambda now: played.spec(now, folder, attempt=2))
    assert committed(events) == list(range(AT, played.case.iterations))
    played.assert_same(folder)


@each(*IN_SEGMENTS, AHEAD)
@pytest.mark.whole
def test_an_accepted_change_drops_what_is_in_flight_and_the_run_goes_on(cluster, played, tmp_path):
    folder, end = tmp_path / "run", played.case.iterations
    gone = killed(cluster, played, folder)
    changed = played.with_changes(kl_horizon=9)
    assert accept_changes(folder, changed.job)[-1].endswith(
        "a few prompts are learned from twice or not at all"
    )
    events = resume(cluster, folder, gone, lambda now: changed.spec(now, folder, attempt=2))
    assert committed(events) == list(range(AT, end))


@each(*IN_SEGMENTS, AHEAD)
@pytest.mark.whole
def test_what_one_plan_has_in_flight_goes_on_under_another(cluster, played, tmp_path):
    folder, later = tmp_path / "run", played.case.prepared(tmp_path, later=True).plan
    changed = played._replace(job=replace(played.job, plan=later))
    folder.mkdir()
    with found(cluster, folder) as now:
        events = asyncio.run(attend(now, played.spec(now, folder), pause_at=AT))
        (held,) = of_type(events, Held)
        assert AT <= held.step <= AT + 1
        events = asyncio.run(attend(now, changed.spec(now, folder, attempt=2)))
    assert committed(events) == list(range(held.step, played.case.iterations))
    for mine, wanted in zip(metrics_of(folder), metrics_of(played.undisturbed), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-9, abs=1e-11)


def tokens_at(folder, step):
    """Sample -> its tokens, of those that a commit has for later iterations."""
    tensors, _ = state_at(folder, step)
    tokens = {}
    for role, rank, name in tensors:
        if role == "actor_generate" and name == "input_ids/ids":
            ids, lengths, values = (
                np.frombuffer(tensors[role, rank, f"input_ids/{part}"][1], dtype=np.int64)
                for part in ("ids", "lengths", "values")
            )
            parts = np.split(values, np.cumsum(lengths)[:-1])
            tokens |= {int(sample): part.tolist() for sample, part in zip(ids, parts, strict=True)}
    return tokens


@pytest.mark.whole
def test_what_an_engine_that_never_draws_alike_has_drawn_is_trained_on_as_it_is_recorded(cluster, tmp_path):
    """The run is killed before it commits iteration AT, and begins again at the commit before: what that has drawn
    ahead is not drawn anew."""
    case = AHEAD
    engine = {"engine": f"{Restless.__module__}:{Restless.__name__}"}
    job = case.prepared(tmp_path)
    played = Played(
        case, prepare(job.config.model_copy(update={"generation": GenerationConfig(**engine)})), tmp_path
    )
    folder = tmp_path / "run"
    gone = killed(cluster, played, folder)
    before = tokens_at(folder, AT)
    assert sorted(before) == list(range(16 * AT, 16 * (AT + 2)))
    events = resume(cluster, folder, gone, lambda now: played.spec(now, folder, attempt=2))
    assert committed(events) == list(range(AT, case.iterations))
    after = tokens_at(folder, AT + 1)
    both = before.keys() & after.keys()
    assert sorted(both) == list(range(16 * (AT + 1), 16 * (AT + 2)))
    assert all(before[sample] == after[sample] for sample in both)
