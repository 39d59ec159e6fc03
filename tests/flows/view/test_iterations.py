"""Subflows beside a real Prefect server: in order, merged when it is slow, bounded when it is away."""

import asyncio
import socket
import time
from uuid import uuid4

import pytest
from httpx import Request, Response
from prefect import flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_rlhf.flows.view import iterations
from prefect_rlhf.flows.view.iterations import IterationView
from prefect_rlhf.flows.view.prefect_api import PrefectApi
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    Aborted,
    Cause,
    IterationRan,
    NodeBegun,
    NodeEnded,
    NotEntered,
    RunSpec,
)
from prefect_rlhf.rlhf_tasks.spec import SaveNode
from tests.flows.run.test_training import assert_at, read_runs, wait_runs
from tests.rlhf_tasks.plans import small_plan
from tests.rlhf_tasks.settings import limits

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PLAN = small_plan()
BEGAN_S = 1_800_000_000.0  # the ranks' clock at iteration 0, which takes a tenth of a second as do all


class Gate(PrefectApi):
    """A server that takes its time: nothing gets through until it is opened."""

    def __init__(self, run):
        super().__init__(run)
        self.opened = asyncio.Event()

    async def ask(self, work, limit_s=None):
        await self.opened.wait()
        return await super().ask(work, limit_s)


def spec(run_folder):
    return RunSpec(
        run="viewed",
        attempt=1,
        ranks=("a", "b"),
        plan=PLAN,
        config={},
        run_folder=str(run_folder),
        iterations=9,
        limits=limits(),
    )


def times(iteration, node, slower=1):
    """Start and end of a node by the ranks' clocks: an iteration takes a tenth of a second, or is so much slower."""
    position = [n.name for n in PLAN.nodes].index(node)
    start = BEGAN_S + slower * (0.1 * iteration + 0.02 * position)
    return start, start + slower * 0.02


def run_nodes(view, iteration, generation=0, last=None, slower=1):
    """The nodes of an iteration begin and end, up to one that does not end."""
    for node in PLAN.nodes:
        start, end = times(iteration, node.name, slower)
        place = {"iteration": iteration, "generation": generation, "node": node.name, "started_s": start}
        view.node(NodeBegun(**place))
        if node.name == last:
            return
        view.node(NodeEnded(**place, ended_s=end))


def ran(view, iteration, generation=0, slower=1):
    """An iteration is complete; a commit is far."""
    view.entered(iteration, generation)
    run_nodes(view, iteration, generation, slower=slower)
    view.ended(IterationRan(iteration=iteration, generation=generation, metrics={}))


def commit(view, iteration):
    ran(view, iteration)
    view.committed(iteration)


def viewed(tmp_path, scene, api=PrefectApi):
    """Play a scene on a view inside a flow; gives the id of its run and the view."""
    made = []

    @flow(name="rlhf-viewed", persist_result=False)
    async def parent():
        view = IterationView(spec(tmp_path), api("viewed"))
        made.extend([flow_run.id, view])
        await scene(view)
        await view.close()

    asyncio.run(parent())
    return made


def states_of(tasks):
    return {name.partition("-it")[0]: task.state_name for name, task in tasks.items()}


def test_a_slow_server_gets_all_iterations_in_order_and_merged(prefect, tmp_path, whole_view, monkeypatch):
    async def scene(view):
        commit(view, 0)
        await asyncio.sleep(0.2)  # the first is being written
        monkeypatch.setattr("prefect_rlhf.flows.view.iterations.VIEW_LAG_S", 0.0)
        for iteration in range(1, 9):
            commit(view, iteration)
        assert len(view._shown) == 2
        view._api.opened.set()
        await view.complete()
        assert view.unshown == []

    parent, _ = viewed(tmp_path, scene, Gate)
    runs = wait_runs(parent, lambda runs: all(len(tasks) == len(PLAN.nodes) for _, tasks in runs.values()))
    assert [run.name for run, _ in sorted(runs.values(), key=lambda r: r[0].start_time)] == [
        "it-00001",
        "it-00002..00009",
    ]
    assert {run.state_name for run, _ in runs.values()} == {"Completed"}
    assert "by the ranks' clocks" in runs["it-00001"][0].state.message
    merged, tasks = runs["it-00002..00009"]
    assert "iterations 2 to 9 are shown as one: Prefect could not keep up" in merged.state.message
    assert states_of(tasks) == {node.name: "Completed" for node in PLAN.nodes}
    for node in PLAN.nodes:
        task = tasks[f"{node.name}-it2..9"]
        assert_at(task.start_time, times(1, node.name)[0])
        assert_at(task.end_time, times(8, node.name)[1])
        assert task.state.message == "8 iterations, 0.160 s by the ranks' clocks"


def test_bars_are_as_long_as_the_iterations_were_however_late_they_are_told_and_merged(
    prefect, tmp_path, whole_view, monkeypatch
):
    async def scene(view):
        ran(view, 0, slower=20)
        await asyncio.sleep(0.2)  # the first is being written
        monkeypatch.setattr("prefect_rlhf.flows.view.iterations.VIEW_LAG_S", 0.0)
        for iteration in (1, 2):
            ran(view, iteration, slower=20)
        monkeypatch.setattr("prefect_rlhf.flows.view.iterations.VIEW_LAG_S", 300.0)
        ran(view, 3, slower=20)
        view.committed(3)
        view._api.opened.set()
        await view.complete()

    parent, _ = viewed(tmp_path, scene, Gate)
    runs = {name: run for name, (run, _) in asyncio.run(read_runs(parent)).items()}
    first, last = PLAN.nodes[0].name, PLAN.nodes[-1].name
    for name, (low, high) in {"it-00001": (0, 0), "it-00002..00003": (1, 2), "it-00004": (3, 3)}.items():
        true_s = times(high, last, 20)[1] - times(low, first, 20)[0]
        run = runs[name]
        assert run.total_run_time == run.end_time - run.start_time
        assert run.total_run_time.total_seconds() == pytest.approx(true_s, abs=1.0), "2 s, 4 s and 2 s"


def test_a_node_is_running_while_it_runs_and_ends_at_its_own_time(prefect, tmp_path, whole_view, monkeypatch):
    monkeypatch.setattr("prefect_rlhf.flows.view.iterations.PACE_S", 0.1)

    async def scene(view):
        view.entered(0, 0)
        run_nodes(view, 0, last="actor_train")
        shown = await asyncio.to_thread(
            wait_runs, flow_run.id, lambda runs: any(len(tasks) == 5 for _, tasks in runs.values())
        )
        run, tasks = shown["it-00001"]
        assert run.state_name == "Running"
        waiting = ("save_actor", "critic_train", "save_critic")
        assert states_of(tasks) == {
            "generate": "Completed",
            "actor_train": "Running",
            **dict.fromkeys(waiting, "Pending"),
        }
        run_nodes(view, 0)
        view.ended(IterationRan(iteration=0, generation=0, metrics={}))
        view.committed(0)
        await view.complete()

    parent, _ = viewed(tmp_path, scene)
    runs = wait_runs(parent, lambda runs: set(states_of(runs["it-00001"][1]).values()) == {"Completed"})
    task = runs["it-00001"][1]["actor_train-it1"]
    assert_at(task.start_time, times(0, "actor_train")[0])
    assert_at(task.end_time, times(0, "actor_train")[1])


def ends(parent):
    """Name of each subflow -> its state and message."""
    runs = wait_runs(parent, lambda runs: all(len(tasks) == len(PLAN.nodes) for _, tasks in runs.values()))
    return {name: (run.state_name, run.state.message) for name, (run, _) in runs.items()}


async def shown(states):
    """Wait until Prefect shows subflows of these names in these states."""

    def there(runs):
        return states == {name: run.state_name for name, (run, _) in runs.items()}

    assert there(await asyncio.to_thread(wait_runs, flow_run.id, there, 60.0))


def test_a_complete_iteration_is_shown_so_before_its_commit_and_as_failed_when_a_fault_undoes_it(
    prefect, tmp_path, whole_view
):
    cause = Cause("lost", (1,), traceback="here")

    async def scene(view):
        for iteration in range(3):
            ran(view, iteration)
        await shown(dict.fromkeys(("it-00001", "it-00002", "it-00003"), "Completed"))
        view.committed(0)
        view.entered(3, 0)
        for iteration in (1, 2, 3):
            view.ended(Aborted(iteration=iteration, generation=0, cause=cause))
        ran(view, 1, generation=1)
        view.committed(1)
        ran(view, 2, generation=1)
        told = {"it-00001": "Completed", **dict.fromkeys(("it-00002", "it-00003", "it-00004"), "Failed")}
        await shown(told | {"it-00002-r1": "Completed", "it-00003-r1": "Completed"})

    told = ends(viewed(tmp_path, scene)[0])
    assert told["it-00001"][0] == told["it-00002-r1"][0] == "Completed"
    for name in ("it-00002", "it-00003"):
        assert told[name][0] == "Failed"
        assert told[name][1].startswith("complete, but lost before a commit: rank 1: lost\nhere; 0.100 s by")
    assert told["it-00003-r1"][0] == "Cancelled"
    assert told["it-00003-r1"][1].startswith("the run ended before this iteration was committed; 0.100 s by")


def test_iterations_that_are_shown_as_one_say_from_which_on_a_fault_has_undone_them(
    prefect, tmp_path, whole_view, monkeypatch
):
    monkeypatch.setattr("prefect_rlhf.flows.view.iterations.VIEW_LAG_S", 0.0)

    async def scene(view):
        for iteration in range(4):
            ran(view, iteration)
        assert len(view._shown) == 1
        view.committed(1)
        for iteration in (2, 3):
            view.ended(Aborted(iteration=iteration, generation=0, cause=Cause("lost", (1,))))
        view._api.opened.set()

    ((name, (state, message)),) = ends(viewed(tmp_path, scene, Gate)[0]).items()
    assert (name, state) == ("it-00001..00004", "Failed")
    assert message.startswith("from iteration 3 on: complete, but lost before a commit: rank 1: lost; ")


def test_what_was_aborted_failed_what_was_refused_never_was_and_the_rest_is_cancelled(
    prefect, tmp_path, whole_view
):
    async def scene(view):
        for iteration in (0, 1, 2):
            view.entered(iteration, 0)
        run_nodes(view, 0, last="critic_train")
        view.ended(Aborted(iteration=0, generation=0, cause=Cause("lost", (1,), traceback="here")))
        view.ended(NotEntered(iteration=2, generation=0, reason="a fault came first"))
        view.entered(0, 1)
        run_nodes(view, 0, 1, last="generate")

    parent, _ = viewed(tmp_path, scene)
    runs = wait_runs(parent, lambda runs: all(len(tasks) == len(PLAN.nodes) for _, tasks in runs.values()))
    assert {name: run.state_name for name, (run, _) in runs.items()} == {
        "it-00001": "Failed",
        "it-00002": "Cancelled",
        "it-00001-r1": "Cancelled",
    }
    failed, tasks = runs["it-00001"]
    assert failed.state.message.startswith("rank 1: lost\nhere; ")
    done = {node.name: "Completed" for node in PLAN.nodes if node.name not in ("critic_train", "save_critic")}
    assert states_of(tasks) == {**done, "critic_train": "Failed", "save_critic": "Cancelled"}
    assert isinstance(PLAN.nodes[-1], SaveNode)


@pytest.mark.whole
def test_a_server_that_is_away_is_waited_for_once_and_what_it_misses_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("prefect_rlhf.flows.view.iterations.VIEW_LAG_S", 0.0)
    monkeypatch.setattr("prefect_rlhf.flows.view.iterations.GIVE_UP_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/api"

    async def scene():
        view = IterationView(spec(tmp_path), PrefectApi("viewed"))
        for iteration in range(300):
            commit(view, iteration)
            await asyncio.sleep(0)
        assert len(view._shown) <= 3
        began = time.monotonic()
        await view.complete()
        await view.close()
        assert time.monotonic() - began < 20
        return view._api.missing()["subflows_not_shown"]

    with temporary_settings({PREFECT_API_URL: address}):
        unshown = asyncio.run(scene())
    numbers = [int(part) for name in unshown for part in name.removeprefix("it-").split("..")]
    assert (numbers[0], numbers[-1]) == (1, 300)


class Deleting:
    """A server's client; flow runs of some names are gone when they are to be ended.

    told  names of subflows that were opened, and of those that were ended
    """

    def __init__(self, *lost):
        self.lost, self.told, self.names = lost, [], {}

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def create_flow_from_name(self, _):
        return uuid4()

    async def request(self, method, path, json=None, path_params=None):
        request, status, made = Request(method, "http://there"), 200, str(uuid4())
        if path == "/flow_runs/":
            self.names[made] = json["name"]
            self.told.append(json["name"])
        elif path.endswith("set_state"):
            name = self.names[str(path_params["id"])]
            self.told.append(f"{name} ended")
            status = 404 if name in self.lost else 200
        response = Response(status, request=request, json={"id": made})
        response.raise_for_status()
        return response


def test_a_subflow_that_a_user_has_deleted_is_named_and_holds_up_no_other(tmp_path, monkeypatch):
    server = Deleting("it-00001", "it-00002")
    monkeypatch.setattr("prefect_rlhf.flows.view.iterations.prompt_client", lambda: server)
    monkeypatch.setattr("prefect_rlhf.flows.view.iterations.PACE_S", 0.01)

    async def scene():
        view = IterationView(spec(tmp_path), PrefectApi("viewed"))
        for iteration in range(4):
            commit(view, iteration)
            while len(server.told) < 2 * iteration + 2:
                await asyncio.sleep(0.01)
        await view.complete()
        await view.close()
        return view._api.missing()

    missing = asyncio.run(asyncio.wait_for(scene(), 30))
    assert missing == {"away_s": 0.0, "left_out": 0, "subflows_not_shown": ["it-00001", "it-00002"]}
    assert server.told[-1] == "it-00004 ended"


def test_the_memory_of_a_view_does_not_grow_with_the_iterations_that_no_commit_covers(tmp_path, monkeypatch):
    server = Deleting()
    monkeypatch.setattr("prefect_rlhf.flows.view.iterations.prompt_client", lambda: server)
    monkeypatch.setattr("prefect_rlhf.flows.view.iterations.PACE_S", 0.01)
    monkeypatch.setattr("prefect_rlhf.flows.view.iterations.KEPT", 5)

    async def scene():
        view = IterationView(spec(tmp_path), PrefectApi("viewed"))
        for iteration in range(20):
            ran(view, iteration)
            while len(server.told) < 2 * iteration + 2:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert (len(view._shown), len(view._running)) == (0, 0)
        assert [subflow.name for subflow in view._uncommitted] == [f"it-{n:05d}" for n in range(16, 21)]
        assert not any(subflow.nodes for subflow in view._uncommitted)
        view.committed(18)
        await view.close()

    asyncio.run(asyncio.wait_for(scene(), 30))
    assert server.told[40:] == ["it-00020 ended"], "only the one that no commit covers is corrected"


def test_a_writer_that_gets_news_and_its_end_at_once_ends():
    async def scene():
        async def write():
            while True:
                await iterations._wait(news, 60)

        news = asyncio.Event()
        writer = asyncio.create_task(write())
        await asyncio.sleep(0.01)
        news.set()
        writer.cancel()
        done, _ = await asyncio.wait([writer], timeout=1)
        return bool(done)

    assert asyncio.run(scene())
