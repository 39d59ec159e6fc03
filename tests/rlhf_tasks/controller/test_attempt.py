"""The runtime without Prefect, on a real cluster of two ranks with real collectives: order, overlap,
faults, leases."""

import asyncio
import json
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

from prefect_rlhf.rlhf_tasks.controller.attempt import Attempt, Surroundings, group_timeout_s
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    Aborted,
    Committed,
    Done,
    Faulted,
    Finished,
    GaveUp,
    IterationRan,
    NodeBegun,
    NodeEnded,
    RunSpec,
    Told,
    WriteCommit,
)
from prefect_rlhf.rlhf_tasks.protocol.progress import Timeouts
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Deadlines
from prefect_rlhf.rlhf_tasks.spec import NodeResult
from tests.rlhf_tasks.fake_flow import follow, open_lease, run_spec
from tests.rlhf_tasks.fake_rank import FakeSnapshots, make_snapshots
from tests.rlhf_tasks.plans import small_plan
from tests.rlhf_tasks.settings import limits

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def states_after(iterations):
    state = 0
    for iteration in range(iterations):
        state = 3 * state + iteration + 1
    return {"actor": state, "critic": state}


def saved(folder, step):
    return json.loads((folder / f"step-{step}.json").read_text())


def of_type(events, kind):
    return [event for _, event in events if isinstance(event, kind)]


def test_nodes_run_in_plan_order_and_iterations_overlap(cluster, tmp_path):
    plan = small_plan()
    # The critic of t trains on rank 1 while rank 0, done with its share, is free for iteration t + 1.
    overlapping = {"until_next": {"critic_train": "generate"}}
    plan = plan.model_copy(
        update={
            "nodes": (
                plan.nodes[0].model_copy(update={"assignment": plan.nodes[1].assignment}),
                *plan.nodes[1:],
            )
        }
    )
    events = asyncio.run(follow(cluster, run_spec(cluster, plan, tmp_path, config=overlapping)))
    committed = of_type(events, Committed)
    assert [event.iteration for event in committed] == list(range(5))
    assert isinstance(events[-1][1], Finished)
    assert events[-1][1].step == 5
    assert saved(tmp_path, 5)["roles"] == states_after(5)
    for device in (0, 1):
        ran = [
            (result.started_s, result.ended_s, event.iteration, node.name)
            for event in committed
            for node in plan.on(device)
            for result in event.results[node.name]
            if result.rank == device
        ]
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(ran)), ran
    for now, after in pairwise(committed):
        assert after.results["generate"][0].started_s < now.results["critic_train"][0].ended_s


def test_an_iteration_that_ran_is_told_before_the_commit_that_covers_it(cluster, tmp_path):
    spec = run_spec(cluster, small_plan(), tmp_path, config={}, snapshot_every=2, iterations=4)
    events = [event for _, event in asyncio.run(follow(cluster, spec))]
    ran = [event for event in events if isinstance(event, IterationRan)]
    assert [event.iteration for event in ran] == [0, 1, 2, 3]
    first_commit = next(i for i, event in enumerate(events) if isinstance(event, Committed))
    assert [e.iteration for e in events[:first_commit] if isinstance(e, IterationRan)][:2] == [0, 1]
    clocks = [
        max(result.ended_s for ranks in event.results.values() for result in ranks)
        for event in events
        if isinstance(event, Committed)
    ]
    told = [event.metrics["time/iteration"] for event in ran]
    assert told[1:] == pytest.approx([after - before for before, after in pairwise(clocks)])


def test_a_run_that_chooses_its_commits_ends_as_one_that_commits_every_iteration(cluster, tmp_path):
    """Iterations take milliseconds, and a part is durable after 20: not every commit is worth it."""
    ends = []
    for every in ("auto", 1):
        folder = tmp_path / str(every)
        folder.mkdir()
        spec = run_spec(cluster, small_plan(), folder, config={}, snapshot_every=every, iterations=12)
        events = [event for _, event in asyncio.run(follow(cluster, spec))]
        assert [event.iteration for event in events if isinstance(event, Committed)] == list(range(12))
        steps = {int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.json")}
        ends.append((folder / "step-12.json").read_text())
        assert {0, 1, 12} <= steps
        assert len(steps) == 13 if every == 1 else len(steps) < 13
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("kind", "node", "deadline_s", "words"),
    [
        ("raise", "actor_train", 200, "rank 0, call actor_train, iteration 3: ValueError: told to fail"),
        ("kill", "generate", 200, "rank 0, call generate, iteration 3: lost"),
        ("no result", "generate", 200, "rank 0, call host: AttributeError"),
        pytest.param(
            "stop",
            "generate",
            12,
            "call generate, iteration 3: not finished 12 s after",
            marks=pytest.mark.whole,
        ),
    ],
)
def test_fault_names_rank_and_call_and_the_run_goes_on_to_the_same_result(
    cluster, tmp_path, kind, node, deadline_s, words
):
    fault = {"kind": kind, "node": node, "iteration": 2, "rank": 0}
    config = {"sleep_s": 0.05, "fault": fault}
    spec = run_spec(cluster, small_plan(), tmp_path, config=config, deadline_floor_s=deadline_s)
    events = asyncio.run(follow(cluster, spec))
    (faulted,) = of_type(events, Faulted)
    assert words in str(faulted.cause)
    if kind != "stop":
        when = next(seconds for seconds, event in events if event is faulted)
        before = max(seconds for seconds, event in events if isinstance(event, Committed) and seconds < when)
        assert when - before < deadline_s / 2, "only a deadline showed it"
    assert 2 in {event.iteration for event in of_type(events, Aborted)} <= {1, 2, 3}
    assert all(faulted.cause == event.cause for event in of_type(events, Aborted))
    assert [event.iteration for event in of_type(events, Committed)] == list(range(5))
    assert saved(tmp_path, 5)["roles"] == states_after(5)


def test_a_fault_without_end_stops_the_run(cluster, tmp_path):
    config = {"fault": {"kind": "raise", "node": "generate", "iteration": 1, "rank": 1, "always": True}}
    events = asyncio.run(
        follow(cluster, run_spec(cluster, small_plan(), tmp_path, config=config, max_restarts=1))
    )
    last = events[-1][1]
    assert isinstance(last, GaveUp)
    assert "rank 1, call generate, iteration 2: ValueError: told to fail" in last.reason
    assert last.committed_step == 1


def test_a_fault_of_the_users_code_on_one_rank_ends_the_run_at_the_last_commit_and_repeats_nothing(
    cluster, tmp_path
):
    fault = {"kind": "user code", "node": "generate", "iteration": 2, "rank": 0, "always": True}
    spec = run_spec(cluster, small_plan(), tmp_path, config={"fault": fault})
    events = asyncio.run(follow(cluster, spec))
    assert of_type(events, Faulted) == []
    last = events[-1][1]
    assert isinstance(last, GaveUp)
    assert last.reason == "rank 0, call generate, iteration 3: reward 'mine' raised KeyError"
    assert last.traceback == "mine.py, line 3"
    assert last.committed_step == len(of_type(events, Committed)) <= 2
    assert {event.generation for event in of_type(events, Aborted)} == {0}


def test_a_second_run_is_refused_with_the_holders_name_until_the_first_has_left(cluster, tmp_path):
    async def two_runs():
        first = await open_lease(cluster, run_spec(cluster, small_plan(), tmp_path, run="first"))
        await asyncio.wait_for(first.read(), 300)  # it is served
        second_spec = run_spec(cluster, small_plan(), tmp_path, run="second", iterations=2)
        refused = await follow(cluster, second_spec)
        first.abort()  # as when its process is killed
        return refused, await follow(cluster, second_spec)

    refused, served = asyncio.run(two_runs())
    assert isinstance(refused[-1][1], GaveUp)
    assert "held by run 'first', attempt 1" in refused[-1][1].reason
    assert isinstance(served[-1][1], Finished)


def test_a_later_attempt_goes_on_from_the_last_commit(cluster, tmp_path):
    asyncio.run(follow(cluster, run_spec(cluster, small_plan(), tmp_path, iterations=2)))
    events = asyncio.run(follow(cluster, run_spec(cluster, small_plan(), tmp_path, iterations=5, attempt=2)))
    assert [event.iteration for event in of_type(events, Committed)] == [2, 3, 4]
    assert saved(tmp_path, 5)["roles"] == states_after(5)
    assert saved(tmp_path, 5)["cursor"] == 5 * small_plan().n_seqs


def test_no_wait_for_peers_that_keep_their_deadlines_reaches_the_groups_timeout():
    plan, deadlines = small_plan(), Deadlines(10.0, 5.0, {"critic_train": 30.0})
    for device in range(plan.n_devices):
        # A rank of t + 1 inside a collective, while its peer has yet to do all of t and of t + 1, each just in time.
        wait_s = 2 * sum(deadlines.of(node.name) for node in plan.on(device))
        assert wait_s < group_timeout_s(plan, deadlines)


class Link:
    """Rank 0 connects and is gone before rank 1 has connected."""

    def __init__(self, rank, name, client, executor, on_news, on_lost, on_started):
        self.rank, self.on_lost, self.restarts, self.process = rank, on_lost, [], None

    async def answers(self, within_s):
        return True

    async def open(self, deadline_s):
        if self.rank == 0:
            asyncio.get_running_loop().call_soon(self.on_lost, 0, "killed")
        else:
            await asyncio.sleep(0.05)

    def restart(self, lost, deadline_s):
        self.restarts.append(lost)

    def send(self, message):
        pass

    async def close(self):
        pass


def linkless(tmp_path, link=Link, snapshots=make_snapshots):
    """An attempt with links of this kind; inside an event loop."""
    spec = RunSpec(
        run="fake",
        attempt=1,
        ranks=("a", "b"),
        plan=small_plan(),
        config={},
        run_folder=str(tmp_path),
        iterations=1,
        limits=limits(),
    )
    nowhere = SimpleNamespace(host="127.0.0.1", port=0, close=lambda: None)
    return Attempt(Surroundings(link, nowhere, snapshots), spec, lambda event: None)


def test_a_rank_lost_while_the_others_connect_is_started_anew(tmp_path):
    async def run():
        started = linkless(tmp_path)
        await started.start()
        await started.close()
        return [link.restarts for link in started._links]

    assert asyncio.run(run()) == [[True], []]


class StayingLink(Link):
    """Both ranks are there."""

    async def open(self, deadline_s):
        pass


async def running(tmp_path, monkeypatch, link):
    """An attempt with such links whose ranks hold the commit of step 0."""
    begun = linkless(tmp_path, link)
    monkeypatch.setattr(FakeSnapshots, "latest", lambda _: (0, 0))
    await begun.start()
    for stimulus in (begun.ledger.rank_reset, begun.ledger.rank_restored):
        for rank in (0, 1):
            begun._feed(stimulus, rank, 0)
    return begun


def test_the_flow_hears_once_when_a_node_begins_and_when_it_has_ended(tmp_path, monkeypatch):
    told = []

    async def run():
        watched = await running(tmp_path, monkeypatch, StayingLink)
        watched._tell = lambda event: told.append(event) if isinstance(event, NodeBegun | NodeEnded) else None
        watched.enter(0, 0)
        key = watched.ledger.account.sequencer.key(0, "generate")
        for rank in (0, 1):
            watched._receive(Told(kind="entered", rank=rank, key=key))
        for rank in (1, 0, 0):
            watched._receive(
                Done(result=NodeResult(key=key, rank=rank, started_s=5.0 - rank, ended_s=6.0 + rank))
            )
        watched._receive(Told(kind="entered", rank=1, key=key))  # late
        await watched.close()

    before = time.time()
    asyncio.run(run())
    begun, ended = told
    place = {"iteration": 0, "generation": 0, "node": "generate"}
    assert ended == NodeEnded(**place, started_s=4.0, ended_s=7.0)
    assert begun == NodeBegun(**place, started_s=begun.started_s)
    assert before <= begun.started_s <= time.time()


class DeafLink(StayingLink):
    """Rank 0 is there, but its process does not answer: it is stopped."""

    async def answers(self, within_s):
        return self.rank != 0


def test_a_rank_that_does_not_answer_is_replaced_at_once_and_the_others_are_not(tmp_path, monkeypatch):
    """Only then do those wake whom it blocks in a collective; after their grace they would be started anew too."""

    patient = Timeouts(reset_s=600.0)  # after which whoever has not reset is replaced
    monkeypatch.setattr(Timeouts, "of", lambda patience: patient)

    async def run():
        rebuilding = await running(tmp_path, monkeypatch, DeafLink)
        rebuilding._feed(rebuilding.ledger.rank_started, 1)  # another process: both ranks are to reset
        while not rebuilding._links[0].restarts:
            await asyncio.sleep(0.01)
        await rebuilding.close()
        return [link.restarts for link in rebuilding._links]

    assert asyncio.run(run()) == [[False], []]


class SlowDisk:
    """Snapshots whose commit takes its time."""

    def __init__(self):
        self.begun, self.ended = threading.Event(), False

    def latest(self):
        return None

    def commit(self, order, results):
        self.begun.set()
        time.sleep(0.3)
        self.ended = True


def test_an_attempt_that_ends_leaves_no_commit_half_written(tmp_path):
    async def run():
        closing = linkless(tmp_path, snapshots=lambda spec: SlowDisk())
        await closing.start()
        disk = closing._snapshots
        closing._apply(
            [WriteCommit(step=0, cursor=0, iterations=(), parts={}, versions={}, plan=small_plan())]
        )
        await asyncio.to_thread(disk.begun.wait)
        await closing.close()
        return disk.ended

    assert asyncio.run(run())
