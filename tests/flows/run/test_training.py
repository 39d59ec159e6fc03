"""A run through Prefect and Dask on two ranks: the graph is the plan, faults are named, cancelling frees."""

import asyncio
import gc
import json
import time
import weakref
from uuid import uuid4

import pytest
from distributed import Security
from distributed.core import Server
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterParentFlowRunId

from prefect_rlhf.flows.cluster.cluster import DaskCluster, Member
from prefect_rlhf.flows.run import training
from prefect_rlhf.flows.run.orders import Order, Orders
from prefect_rlhf.flows.run.training import ControllerLost, RunFailed, Training, run_training
from prefect_rlhf.rlhf_tasks.protocol.messages import Committed, RunSpec
from tests.rlhf_tasks.plans import small_plan, swapped_plan
from tests.rlhf_tasks.settings import with_limits

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("whole_view"),
]

FAKES = {
    "executor": "tests.rlhf_tasks.fake_rank:make_executor",
    "snapshots": "tests.rlhf_tasks.fake_rank:make_snapshots",
}


def fake_run(folder, *, plan=None, config=None, iterations=3, run="fake", **options):
    """A run whose ranks compute nothing."""
    return RunSpec(
        run=run,
        plan=plan or small_plan(),
        config=config or {},
        run_folder=str(folder),
        iterations=iterations,
        **with_limits(FAKES | options),
    )


def at_commits(act):
    """An `on_event` that acts on each committed iteration."""
    return lambda event: act(event) if isinstance(event, Committed) else None


def train(cluster, folder, *, on_commit=lambda committed: None, orders=None, **options):
    """Run a parent flow; (result or exception, its flow run id).

    Each has a run name of its own: late tasks of a run that was cancelled are none of the next one's.
    """
    ids, run = [], f"fake-{uuid4().hex[:8]}"

    @flow(name="rlhf-fake", persist_result=False)
    async def parent():
        from prefect.runtime import flow_run

        ids.append(flow_run.id)
        spec = fake_run(folder, run=run, **options)
        return await run_training(spec, cluster, on_event=at_commits(on_commit), orders=orders)

    try:
        return asyncio.run(parent()), ids[0]
    except RunFailed as error:
        return error, ids[0]


async def read_runs(parent_id):
    """Subflow runs of a parent, by name, each with its task runs by name."""
    async with get_client() as client:
        children = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent_id]))
        )
        return {
            child.name: (
                child,
                {
                    task.name: task
                    for task in await client.read_task_runs(
                        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[child.id]))
                    )
                },
            )
            for child in children
        }


def wait_runs(parent_id, recorded, seconds=240.0):
    """`read_runs` once they are `recorded`: a server stores what becomes of tasks some time after it has happened."""
    deadline = time.monotonic() + seconds
    while not recorded(runs := asyncio.run(read_runs(parent_id))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return runs


def test_each_iteration_is_a_subflow_whose_graph_is_the_plan(cluster, tmp_path, caplog):
    commits = {}

    def on_commit(committed):
        commits[committed.iteration] = committed.results
        raise BrokenPipeError("nobody reads the terminal")

    result, parent = train(cluster, tmp_path, config={"sleep_s": 0.1}, on_commit=on_commit)
    assert result.committed_step == 3
    assert list(commits) == [0, 1, 2]
    assert caplog.text.count("committed cannot be shown; training continues") == 3
    plan = small_plan()

    def recorded(runs):
        states = [task.state_name for _, tasks in runs.values() for task in tasks.values()]
        return states.count("Completed") >= 3 * len(plan.nodes)

    runs = wait_runs(parent, recorded)
    assert {run.state_name for run, _ in runs.values()} == {"Completed"}
    assert sorted(runs) == ["it-00001", "it-00002", "it-00003"]
    for iteration in range(3):
        run, tasks = runs[f"it-{iteration + 1:05d}"]
        assert run.state_name == "Completed"
        assert sorted(tasks) == sorted(f"{node.name}-it{iteration + 1}" for node in plan.nodes)
        names = {task.id: name for name, task in tasks.items()}
        for node in plan.nodes:
            task = tasks[f"{node.name}-it{iteration + 1}"]
            assert task.state_name == "Completed"
            upstream = {names[source.id] for source in task.task_inputs.get("wait_for", [])}
            assert upstream == {f"{name}-it{iteration + 1}" for name in node.after}
            ranks = commits[iteration][node.name]
            assert_at(task.start_time, min(result.started_s for result in ranks))
            assert_at(task.end_time, max(result.ended_s for result in ranks))
    starts = [run.start_time for run, _ in (runs[f"it-{t + 1:05d}"] for t in range(3))]
    assert starts == sorted(starts)


def assert_at(shown, clock_s):
    """Prefect shows a moment as the ranks' clocks have it."""
    assert shown.timestamp() == pytest.approx(clock_s, abs=0.001)


def test_a_killed_rank_fails_its_subflow_by_name_and_the_run_goes_on(cluster, tmp_path):
    fault = {"kind": "kill", "node": "critic_train", "iteration": 1, "rank": 1}
    result, parent = train(cluster, tmp_path, config={"sleep_s": 0.05, "fault": fault})
    assert result.committed_step == 3
    assert "rank 1, call critic_train, iteration 2: lost" in result.faults[0]
    runs = asyncio.run(read_runs(parent))
    failed, _ = runs["it-00002"]
    assert failed.state_name == "Failed"
    assert "rank 1, call critic_train, iteration 2: lost" in failed.state.message
    assert runs["it-00002-r1"][0].state_name == "Completed"

    def recorded(runs):
        return "Failed" in (task.state_name for task in runs["it-00002"][1].values())

    states = {name: task.state_name for name, task in wait_runs(parent, recorded)["it-00002"][1].items()}
    assert states["generate-it2"] == "Completed"
    assert states["critic_train-it2"] == "Failed"
    assert states["save_critic-it2"] == "Cancelled"
    assert json.loads((tmp_path / "step-3.json").read_text())["roles"] == {"actor": 18, "critic": 18}


@pytest.mark.whole
def test_a_fault_fails_the_complete_iterations_that_it_undoes_where_a_commit_covers_several(
    cluster, tmp_path
):
    fault = {"kind": "kill", "node": "critic_train", "iteration": 1, "rank": 1}
    options = {"config": {"sleep_s": 0.05, "fault": fault}, "snapshot_every": 3}
    result, parent = train(cluster, tmp_path, **options)
    assert result.committed_step == 3
    runs = {name: run for name, (run, _) in asyncio.run(read_runs(parent)).items()}
    assert runs["it-00001"].state_name == "Failed"
    assert runs["it-00001"].state.message.startswith(
        "complete, but lost before a commit: rank 1, call critic_train"
    )
    assert [runs[f"it-0000{number}-r1"].state_name for number in (1, 2, 3)] == ["Completed"] * 3


def test_a_run_that_cannot_go_on_says_why_and_where_from(cluster, tmp_path):
    fault = {"kind": "raise", "node": "generate", "iteration": 1, "rank": 0, "always": True}
    error, _ = train(cluster, tmp_path, config={"fault": fault}, max_restarts=1)
    assert isinstance(error, RunFailed)
    assert "rank 0, call generate, iteration 2: ValueError: told to fail" in str(error)
    assert "1 iterations are committed" in str(error)


@pytest.mark.slow
def test_an_attempt_ends_at_a_commit_and_the_next_one_goes_on_there_by_another_plan(cluster, tmp_path):
    heard = []

    def on_commit(committed):
        heard.append(committed.iteration)
        if committed.iteration == 1:
            orders.renew()

    orders = Orders()
    options = {"iterations": 8, "config": {"sleep_s": 0.05}}
    (tmp_path / "changed").mkdir(), (tmp_path / "plain").mkdir()
    first, before = train(cluster, tmp_path / "changed", on_commit=on_commit, orders=orders, **options)
    assert (first.order, first.faults) == (Order.RENEW, ())
    assert 2 <= first.committed_step < 8
    result, after = train(cluster, tmp_path / "changed", on_commit=on_commit, plan=swapped_plan(), **options)
    assert (result.order, result.committed_step, result.faults) == (Order.CONTINUE, 8, ())
    assert heard == list(range(8))
    train(cluster, tmp_path / "plain", **options)
    last = [json.loads((tmp_path / run / "step-8.json").read_text()) for run in ("changed", "plain")]
    assert last[0] == last[1]
    shown = {
        name: run.state_name
        for parent in (before, after)
        for name, (run, _) in asyncio.run(read_runs(parent)).items()
    }
    assert {name for name, state in shown.items() if state == "Completed"} == {
        f"it-{t + 1:05d}" for t in range(8)
    }


@pytest.mark.whole
def test_nothing_is_kept_of_iterations_that_have_ended(cluster, tmp_path, monkeypatch):
    trainings, seen = [], []

    class Held(Training):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            trainings.append(self)

    def on_commit(committed):
        seen.append(weakref.ref(committed))

    monkeypatch.setattr("prefect_rlhf.flows.run.training.Training", Held)
    train(cluster, tmp_path, on_commit=on_commit)
    gc.collect()
    assert len(trainings) == 1
    assert len(seen) == 3
    assert seen[0]() is None


def test_cancelling_the_flow_frees_the_cluster(cluster, tmp_path):
    async def cancelled():
        begun = asyncio.Event()

        @flow(name="rlhf-fake", persist_result=False)
        async def parent():
            spec = fake_run(tmp_path / "a", config={"sleep_s": 0.2}, iterations=1000)
            await run_training(spec, cluster, on_event=at_commits(lambda committed: begun.set()))

        running = asyncio.create_task(parent())
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    result, _ = train(cluster, tmp_path / "b", iterations=1)
    assert result.committed_step == 1


def test_a_controller_that_hangs_ends_the_attempt_and_says_so(tmp_path, monkeypatch):
    """Its connections stay open, as those of a stopped process do."""

    async def hang(**_):
        await asyncio.sleep(600)

    async def run():
        controller = Server({"rlhf_lease": hang, "identity": hang})
        await controller.listen("tcp://127.0.0.1:0")
        member = Member("controller", controller.address, "127.0.0.1")
        rank = Member("rank-0", "", "127.0.0.1")
        try:
            nowhere = DaskCluster("", (rank, rank), member, Security())
            await run_training(fake_run(tmp_path, iterations=1), nowhere)
        finally:
            await controller.close()

    monkeypatch.setattr(training, "ASK_EVERY_S", 0.1)
    monkeypatch.setattr(training, "ANSWER_S", 1.0)
    with pytest.raises(ControllerLost, match="the controller of run fake has not answered for 1 s"):
        asyncio.run(run())
