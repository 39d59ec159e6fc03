"""Compares Prefect's view of a run with the ranks: order and lag of subflows, errors of task times, memory growth.

    python -m bench.view [--iterations 300] [--iteration-s 0.5] [--plan demo|small] [--json FILE]

A plan whose nodes only sleep runs on ranks that do no work, with its own Prefect server and Dask cluster. Then the
server's subflows and task runs are compared with the ranks' clocks. `lag` is the time from an iteration's end by the
ranks' clocks to the end of its subflow in Prefect. The growth of resident memory (KiB per iteration) is the slope of
a line fitted to all commits of each third of the run.
"""

import argparse
import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any
from uuid import UUID

import numpy as np
import psutil
from prefect import flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.sorting import TaskRunSort
from prefect.runtime import flow_run

from bench.overhead import RANKS, SHARES, cpu_s, demo_plan, pid_of, write
from flows.cluster.cluster import DaskCluster, local_cluster
from flows.cluster.server import own_server
from flows.run.training import RunControl, run_training
from planner.report.text import short_names
from rlhf_tasks.protocol.messages import Committed, RunSpec
from rlhf_tasks.spec import ExecutionPlan
from tests.rlhf_tasks.plans import small_plan
from tests.rlhf_tasks.settings import STARTUP_S, limits

NAME = re.compile(r"it-(\d+)(?:\.\.(\d+))?")
PAGE = 200  # most rows that the server returns per request
RECORDED_S = 60.0  # most lag of the server's recorder


class Watched:
    """Observations of a run, in arrays made before the run: measuring must not itself use more memory.

    processes  name -> process id
    clocks     [iterations, nodes, 2], start and end by the ranks' clocks
    memory     name -> [iterations], resident KiB at each commit
    open_files name -> [iterations], file descriptors at each commit
    """

    def __init__(self, processes: Mapping[str, int], plan: ExecutionPlan, iterations: int) -> None:
        self.nodes = {node.name: number for number, node in enumerate(plan.nodes)}
        self.clocks = np.full((iterations, len(plan.nodes), 2), np.nan)
        self.flow_run = ""
        self.memory = {name: np.full(iterations, np.nan) for name in processes}
        self.open_files = {name: np.zeros(iterations, int) for name in processes}
        self._processes = {name: psutil.Process(pid) for name, pid in processes.items()}

    async def on_commit(self, committed: Committed, _: RunControl) -> None:
        for node, results in committed.results.items():
            span = min(r.started_s for r in results), max(r.ended_s for r in results)
            self.clocks[committed.iteration, self.nodes[node]] = span
        for name, process in self._processes.items():
            self.memory[name][committed.iteration] = process.memory_info().rss / 1024
            self.open_files[name][committed.iteration] = process.num_fds()

    def grown_kib(self) -> dict[str, list[float]]:
        """Process name -> KiB of resident memory by which it grows per iteration, in each third of them."""
        return {
            name: [float(np.polyfit(np.arange(len(part)), part, 1)[0]) for part in np.array_split(rss, 3)]
            for name, rss in self.memory.items()
        }

    def grown_files(self) -> dict[str, int]:
        """Process name -> file descriptors that it has at the last commit beyond those at a third of the run."""
        return {name: int(counts[-1] - counts[len(counts) // 3]) for name, counts in self.open_files.items()}


def run(
    cluster: DaskCluster, plan: ExecutionPlan, iterations: int, iteration_s: float, watched: Watched
) -> float:
    """One run. Returns the seconds from the last commit to its end."""
    shares = SHARES if plan.n_devices == RANKS else {"generate": 0.4, "actor_train": 0.5, "critic_train": 0.5}

    @flow(name="bench-view", persist_result=False)
    async def parent() -> None:
        watched.flow_run = flow_run.id or ""
        with tempfile.TemporaryDirectory() as folder:
            spec = RunSpec(
                run="bench",
                plan=plan,
                config={"sleep_s": {name: share * iteration_s for name, share in shares.items()}},
                run_folder=folder,
                iterations=iterations,
                limits=limits(),
                executor="tests.rlhf_tasks.fake_rank:make_executor",
                snapshots="tests.rlhf_tasks.fake_rank:make_snapshots",
            )
            await run_training(spec, cluster, on_commit=watched.on_commit)

    asyncio.run(parent())
    return time.time() - float(watched.clocks[..., 1].max())


async def shown(parent: str, nodes: int) -> tuple[list[Any], list[Any]]:
    """The subflows of a flow run, sorted by start, and their task runs, after the server has recorded all of them."""
    deadline = time.monotonic() + RECORDED_S
    async with get_client() as client:
        while True:
            subflows = await _subflows(client, parent)
            tasks: list[Any] = []
            for subflow in subflows:
                only = FlowRunFilter.model_validate({"id": {"any_": [str(subflow.id)]}})
                tasks += await client.read_task_runs(
                    flow_run_filter=only, limit=PAGE, sort=TaskRunSort.ID_DESC
                )
            ended = sum(task.end_time is not None for task in tasks)
            if ended >= len(subflows) * nodes or time.monotonic() > deadline:
                return sorted(subflows, key=lambda s: s.start_time or s.created), tasks
            await asyncio.sleep(2.0)


async def _subflows(client: PrefectClient, parent: str) -> list[Any]:
    found: list[Any] = []
    only = FlowRunFilter.model_validate({"parent_flow_run_id": {"any_": [str(UUID(parent))]}})
    while page := await client.read_flow_runs(flow_run_filter=only, limit=PAGE, offset=len(found)):
        found += page
    return found


def figures(plan: ExecutionPlan, watched: Watched, subflows: list[Any], tasks: list[Any]) -> dict[str, Any]:
    """Figures that compare Prefect's subflows and task runs with the ranks' clocks."""
    ended = watched.clocks[..., 1].max(axis=1)
    covered: list[int] = []
    lags: list[float] = []
    for subflow in subflows:
        found = NAME.match(subflow.name)
        assert found is not None, subflow.name
        first, last = int(found[1]) - 1, int(found[2] or found[1]) - 1  # shown from 1
        covered += range(first, last + 1)
        if subflow.end_time is not None:
            lags.append(subflow.end_time.timestamp() - float(ended[last]))
    names = {short: name for name, short in short_names(plan).items()}
    starts: list[float] = []
    ends: list[float] = []
    for task in tasks:
        node, _, place = task.name.rpartition("-it")
        if place.isdigit() and task.start_time and task.end_time:
            start, end = watched.clocks[int(place) - 1, watched.nodes[names[node]]]
            starts.append(abs(task.start_time.timestamp() - start))
            ends.append(abs(task.end_time.timestamp() - end))
    states: dict[str, int] = {}
    for subflow in subflows:
        states[subflow.state_name] = states.get(subflow.state_name, 0) + 1
    return {
        "subflows": len(subflows),
        "subflow_states": states,
        "merged": sum(".." in subflow.name for subflow in subflows),
        "iterations_shown": len(set(covered)),
        "in_order": covered == sorted(covered) and len(covered) == len(set(covered)),
        "lag_s": _spread(lags),
        "task_runs": len(tasks),
        "task_runs_completed": sum(task.state_name == "Completed" for task in tasks),
        "start_off_s": _spread(starts),
        "end_off_s": _spread(ends),
        "grown_kib": watched.grown_kib(),
        "grown_files": watched.grown_files(),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "most": max(values)} if values else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--iteration-s", type=float, default=0.5)
    parser.add_argument("--plan", choices=("demo", "small"), default="demo")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    plan = demo_plan() if arguments.plan == "demo" else small_plan()
    with (
        tempfile.TemporaryDirectory() as folder,
        own_server(Path(folder)),
        local_cluster(plan.n_devices, folder=Path(folder), deadline_s=STARTUP_S) as cluster,
    ):
        controller = pid_of(cluster, cluster.controller)
        (served,) = (
            child.pid
            for child in psutil.Process().children()
            if "server_process" in " ".join(child.cmdline())
        )
        processes = {"flow": os.getpid(), "controller": controller, "server": served}
        watched = Watched(processes, plan, arguments.iterations)
        before, began_s = cpu_s(controller), time.time()
        waited_s = run(cluster, plan, arguments.iterations, arguments.iteration_s, watched)
        wall_s, after = time.time() - began_s, cpu_s(controller)
        found = figures(plan, watched, *asyncio.run(shown(watched.flow_run, len(plan.nodes))))
    found["iteration_s"] = wall_s / arguments.iterations
    found["waited_at_end_s"] = waited_s
    found["cpu_s"] = {name: (after[name] - before[name]) / arguments.iterations for name in before}
    print(json.dumps(found, indent=2))
    write(found, arguments.json)


if __name__ == "__main__":
    main()
