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

from flows.view.iterations import IterationView
from flows.view.prefect_api import PrefectApi
from rlhf_tasks.protocol.messages import Aborted, Cause, Committed, NodeBegun, NodeEnded, NotEntered, RunSpec
from rlhf_tasks.spec import SaveNode
from tests.flows.run.test_training import assert_at, wait_runs
from tests.rlhf_tasks.plans import small_plan
from tests.rlhf_tasks.settings import SETTINGS

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
        **SETTINGS,
    )


def times(iteration, node):
    """Start and end of a node by the ranks' clocks: an iteration takes a tenth of a second."""
    position = [n.name for n in PLAN.nodes].index(node)
    start = BEGAN_S + 0.1 * iteration + 0.02 * position
    return start, start + 0.02


def run_nodes(view, iteration, generation=0, last=None):
    """The nodes of an iteration begin and end, up to one that does not end."""
    for node in PLAN.nodes:
        start, end = times(iteration, node.name)
        place = {"iteration": iteration, "generation": generation, "node": node.name, "started_s": start}
        view.node(NodeBegun(**place))
        if node.name == last:
            return
        view.node(NodeEnded(**place, ended_s=end))


def commit(view, iteration):
    view.entered(iteration, 0)
    run_nodes(view, iteration)
    view.ended(Committed(iteration=iteration, results={}))


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
        monkeypatch.setattr("flows.view.iterations.VIEW_LAG_S", 0.0)
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


def test_a_node_is_running_while_it_runs_and_ends_at_its_own_time(prefect, tmp_path, whole_view, monkeypatch):
    monkeypatch.setattr("flows.view.iterations.PACE_S", 0.1)

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
        view.ended(Committed(iteration=0, results={}))
        await view.complete()

    parent, _ = viewed(tmp_path, scene)
    runs = wait_runs(parent, lambda runs: set(states_of(runs["it-00001"][1]).values()) == {"Completed"})
    task = runs["it-00001"][1]["actor_train-it1"]
    assert_at(task.start_time, times(0, "actor_train")[0])
    assert_at(task.end_time, times(0, "actor_train")[1])


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


def test_a_server_that_is_away_is_waited_for_once_and_what_it_misses_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("flows.view.iterations.VIEW_LAG_S", 0.0)
    monkeypatch.setattr("flows.view.iterations.GIVE_UP_S", 0.5)
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
    monkeypatch.setattr("flows.view.iterations.get_client", lambda: server)
    monkeypatch.setattr("flows.view.iterations.PACE_S", 0.01)

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
