"""Measures the cost of orchestration: planned iterations whose nodes only sleep, run through Prefect and Dask.

    python -m bench.overhead [--iteration-s 10] [--iterations 6] [--rounds 2] [--json FILE]
    python -m bench.overhead --simulated-ranks 128 1024 [--iterations 10] [--json FILE]

The demo's plan runs on four ranks that do no work: a node sleeps its share of the iteration, then takes part in one
real collective of its mesh. Overhead is `idle_while_ready_s` of flows/view/clocks.py: per rank, the time in which no
node runs although all predecessors of its next node have ended. The CPU seconds per iteration of the workers, of this
process (flow, scheduler, nannies) and of the Prefect server are reported too. The first two iterations of each run
are left out.

With --simulated-ranks no processes are started: the real controller is rehearsed through iterations of a plan for
that many simulated ranks, with few and many sequences. The CPU seconds are those of its decisions and messages,
without what sending them takes.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
from distributed import Client
from prefect import flow

from bench.harness import Spread, options, write
from prefect_rlhf.flows.cluster.cluster import DaskCluster, Member, local_cluster
from prefect_rlhf.flows.cluster.server import own_server
from prefect_rlhf.flows.run.training import run_training
from prefect_rlhf.flows.view.clocks import Span, idle_while_ready_s, predecessors_of
from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config, manual_assignments
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.controller.attempt import Attempt
from prefect_rlhf.rlhf_tasks.protocol.messages import Committed, RunSpec
from prefect_rlhf.rlhf_tasks.rehearsal.rehearsal import Rehearsal, carried_out
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests.rlhf_tasks.protocol.plans import ppo_plan
from tests.rlhf_tasks.rehearsal.rehearsals import quick
from tests.rlhf_tasks.settings import STARTUP_S, limits

RANKS = 4
WARM_UP = 2
SEQUENCES_PER_RANK = (4, 256)
SHARES = {
    "actor_generate": 0.3,
    "ref_inference": 0.1,
    "reward_inference": 0.1,
    "critic_inference": 0.1,
    "actor_train": 0.5,
    "critic_train": 0.55,
}
"""Seconds of a call as a fraction of the iteration; along the longest path they sum to about 1."""


def demo_plan() -> ExecutionPlan:
    """The plan of deployments/demo_plan.yaml."""
    config = make_config(
        {
            "type": "ppo",
            "models": {"actor": "none", "reward": "none"},
            "data": {"train": "none"},
            "sampling": {"max_completion_length": 1},
            "batch_size": 256,
            "total_iterations": 1,
            "cluster": {"devices_per_host": RANKS},
            "plan": str(files("prefect_rlhf.deployments") / "demo_plan.yaml"),
        }
    )
    assignments = manual_assignments(config)
    assert assignments is not None
    registered = algorithm("ppo")
    graph = DataflowGraph(registered.graph(config), registered.dataset_keys, name="ppo")
    return build_plan(graph, assignments, Cluster(1, RANKS))


def run_once(
    cluster: DaskCluster, plan: ExecutionPlan, iterations: int, iteration_s: float
) -> tuple[Committed, ...]:
    """One run. Returns its iterations with every node's results."""
    config = {"sleep_s": {name: share * iteration_s for name, share in SHARES.items()}}
    iterations_done: list[Committed] = []

    def on_event(event: Any) -> None:
        if isinstance(event, Committed):
            iterations_done.append(event)

    @flow(name="bench-overhead", persist_result=False)
    async def parent() -> tuple[Committed, ...]:
        with tempfile.TemporaryDirectory() as folder:
            spec = RunSpec(
                run="bench",
                plan=plan,
                config=config,
                run_folder=folder,
                iterations=iterations,
                limits=limits(),
                executor="tests.rlhf_tasks.fake_rank:make_executor",
                snapshots="tests.rlhf_tasks.fake_rank:make_snapshots",
            )
            await run_training(spec, cluster, on_event=on_event)
        return tuple(iterations_done)

    return asyncio.run(parent())


def overhead(plan: ExecutionPlan, committed: tuple[Committed, ...]) -> dict[str, float]:
    """Seconds per iteration after the warm-up: wall clock, and orchestration overhead (mean and worst rank)."""
    kept = [c for c in committed if c.iteration >= WARM_UP]
    spans = [
        Span(r.rank, c.iteration, node, "", r.started_s, r.ended_s)
        for c in kept
        for node, results in c.results.items()
        for r in results
    ]
    idle = idle_while_ready_s(spans, predecessors_of(plan, [c.iteration for c in kept]))
    wall_s = max(s.ended_s for s in spans) - min(s.started_s for s in spans)
    return {
        "iteration_s": wall_s / len(kept),
        "overhead_s": sum(idle.values()) / len(idle) / len(kept),
        "overhead_worst_rank_s": max(idle.values()) / len(kept),
    }


def cpu_s(controller_pid: int) -> dict[str, float]:
    """CPU seconds so far: this process, the Prefect server, the controller's worker, the ranks."""
    seconds = {"flow": sum(psutil.Process().cpu_times()[:2]), "server": 0.0, "controller": 0.0, "ranks": 0.0}
    for child in psutil.Process().children(recursive=True):
        if child.pid == controller_pid:
            kind = "controller"
        else:
            kind = "server" if "server_process" in " ".join(child.cmdline()) else "ranks"
        seconds[kind] += sum(child.cpu_times()[:2])
    return seconds


def pid_of(cluster: DaskCluster, member: Member) -> int:
    """The process id of a worker."""
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        return client.run(os.getpid, workers=[member.address])[member.address]  # pyright: ignore[reportIndexIssue]


class Timed(Attempt):
    """An attempt that counts its stimuli and the CPU seconds that it takes for them."""

    stimuli, cpu_s = 0, 0.0

    def _feed(self, stimulus: Callable[..., list[Any]], *facts: Any) -> None:
        began_s = time.process_time()
        super()._feed(stimulus, *facts)
        self.cpu_s += time.process_time() - began_s
        self.stimuli += 1


def controller_alone(n_ranks: Iterable[int], iterations: int) -> list[dict[str, float]]:
    """Print and return the controller's CPU seconds an iteration for each number of ranks, which must not depend on
    the number of sequences."""
    rows = []
    for ranks in n_ranks:
        for per_rank in SEQUENCES_PER_RANK:
            plan = ppo_plan(ranks, ranks * per_rank)
            carried_out(Rehearsal(quick(plan, 1)))  # warm
            rehearsal = Rehearsal(quick(plan, iterations), Timed)
            carried_out(rehearsal)
            assert isinstance(rehearsal.attempt, Timed)
            rank_nodes = sum(len(node.devices) for node in plan.nodes)
            row = {
                "ranks": ranks,
                "sequences": plan.n_seqs,
                "stimuli": rehearsal.attempt.stimuli / iterations,
                "controller_s": rehearsal.attempt.cpu_s / iterations,
                "controller_s_per_rank_node": rehearsal.attempt.cpu_s / iterations / rank_nodes,
            }
            print("  ".join(f"{name} {value:g}" for name, value in row.items()))
            rows.append(row)
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--iteration-s", type=float, default=10.0)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--simulated-ranks", type=int, nargs="+", metavar="N")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.simulated_ranks:
        simulated = controller_alone(arguments.simulated_ranks, arguments.iterations)
        write(simulated, arguments.json)
        return
    plan = demo_plan()
    with (
        tempfile.TemporaryDirectory() as folder,
        own_server(Path(folder)),
        local_cluster(RANKS, folder=Path(folder), deadline_s=STARTUP_S) as cluster,
    ):
        controller_pid = pid_of(cluster, cluster.controller)

        def run() -> dict[str, float]:
            before = cpu_s(controller_pid)
            committed = run_once(cluster, plan, arguments.iterations, arguments.iteration_s)
            after = cpu_s(controller_pid)
            used = {f"cpu_{k}_s": (after[k] - before[k]) / arguments.iterations for k in before}
            return {**overhead(plan, committed), **used}

        rows = [run() for _ in range(arguments.rounds)]
    report(rows, arguments.json)


def report(rows: list[dict[str, float]], path: Path | None) -> None:
    """Print medians over the rounds with their range."""
    figures: dict[str, Any] = {}
    for name in rows[0]:
        spread = Spread.of([row[name] for row in rows])
        figures[name] = spread._asdict()
        print(f"  {name:24} {spread}")
    figures["overhead_share"] = figures["overhead_s"]["median"] / figures["iteration_s"]["median"]
    print(f"  overhead                 {figures['overhead_share']:8.2%} of an iteration")
    write(figures, path)


if __name__ == "__main__":
    main()
