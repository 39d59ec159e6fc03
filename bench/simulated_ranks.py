"""The controller at scale: ledger and inboxes are driven through planned PPO iterations with simulated ranks.

Ranks are objects in this process, nodes end at once and no messages are sent, so the figures are the CPU time of only
the state machines. `controller` is the work of one process for all ranks (sequencer and ledger); `rank` is the work
of each rank for itself. Run it with `python -m bench.overhead --simulated-ranks N`.
"""

import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from planner.plan.build import build_plan
from planner.plan.graph import DataflowGraph
from planner.plan.mesh import Cluster
from rlhf_tasks.algorithms.ppo import DATASET_KEYS, graph
from rlhf_tasks.config.settings import MOST_SECONDS
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.protocol import instructions as do
from rlhf_tasks.protocol.inbox import Inbox
from rlhf_tasks.protocol.ledger import Ledger
from rlhf_tasks.protocol.messages import Committed, Done, Finished, Told
from rlhf_tasks.protocol.scheduled_plans import ScheduledPlan
from rlhf_tasks.spec import CallAssignment, ExecutionPlan, NodeResult, SaveNode
from tests.rlhf_tasks.settings import limits

DEVICES_PER_HOST = 8
SEQUENCES_PER_RANK = (4, 256)
MEMORY_ITERATIONS = 4  # enough for the window of iterations that the ledger holds


def ppo_plan(n_ranks: int, n_seqs: int) -> ExecutionPlan:
    """A realistic plan of PPO: generation on all hosts, actor and critic each trained on one half of them."""
    cluster = Cluster(n_ranks // DEVICES_PER_HOST, DEVICES_PER_HOST)
    sizes = SimpleNamespace(
        batch_size=n_seqs,
        group_size=1,
        num_mini_batches=1,
        scoring_role="reward",
        on_reward_error="stop",
        scores_tokens=False,
        roles=lambda: ("actor", "critic", "ref", "reward"),
        records_kept=False,
        truncated_responses="keep",
    )
    dataflow = DataflowGraph(graph(sizes), DATASET_KEYS)

    def place(start: int, stop: int, tp: int) -> CallAssignment:
        strategy = ParallelStrategy(dp=(stop - start) // tp, tp=tp)
        return CallAssignment(placement=Placement(tuple(range(start, stop)), strategy))

    half = n_ranks // 2
    assignments = {
        "actor_generate": place(0, n_ranks, 2),
        "reward_inference": place(half, n_ranks, 4),
        "ref_inference": place(0, half, 4),
        "critic_inference": place(half, n_ranks, 8),
        "actor_train": place(0, half, 8),
        "critic_train": place(half, n_ranks, 8),
    }
    return build_plan(dataflow, assignments, cluster)


@dataclass
class Cost:
    """CPU seconds and messages of a run of `iterations` iterations."""

    iterations: int
    controller_s: float = 0.0
    ranks_s: float = 0.0
    messages: int = 0


@dataclass
class Drive:
    """A ledger and its ranks' inboxes, connected by a queue. The CPU time of each state machine is summed."""

    plan: ExecutionPlan
    iterations: int
    cost: Cost = field(init=False)
    queue: deque[tuple[bool, Callable[[], list[Any]]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.cost = Cost(self.iterations)
        self.saves = {node.name for node in self.plan.nodes if isinstance(node, SaveNode)}
        self.inboxes = [Inbox(rank) for rank in range(self.plan.n_devices)]
        self.ledger = Ledger(
            [ScheduledPlan(iteration=0, plan=self.plan)],
            run="bench",
            attempt=0,
            n_ranks=self.plan.n_devices,
            total_iterations=self.iterations,
            limits=limits(io_floor_s=MOST_SECONDS, snapshot_max_s=MOST_SECONDS, max_restarts=0),
            committed_step=0,
        )

    def run(self) -> Cost:
        """Drive the run to its end."""
        self.ask(lambda: self.ledger.start(0.0))
        outcome: list[Finished] = []
        while not outcome:
            at_controller, stimulus = self.queue.popleft()
            began = time.process_time()
            instructions = stimulus()
            took = time.process_time() - began
            self.cost.messages += 1
            if at_controller:
                self.cost.controller_s += took
            else:
                self.cost.ranks_s += took
            for instruction in instructions:
                self.carry_out(instruction)
                if isinstance(instruction, Finished):
                    outcome.append(instruction)
                if isinstance(instruction, do.Ready | Committed):
                    self.ask(self.enter)
        return self.cost

    def ask(self, stimulus: Callable[[], list[Any]]) -> None:
        self.queue.append((True, stimulus))

    def tell(self, stimulus: Callable[[], list[Any]]) -> None:
        self.queue.append((False, stimulus))

    def enter(self) -> list[Any]:
        """Enter every iteration that may be entered, as the flow does."""
        instructions: list[Any] = []
        while (iteration := self.ledger.enterable) is not None:
            instructions += self.ledger.enter(iteration, 0, 0.0)
        return instructions

    def carry_out(self, i: Any) -> None:
        """Carry out an instruction of the ledger at once."""
        ledger, inboxes = self.ledger, self.inboxes
        match i:
            case do.ResetRank():
                self.tell(lambda: self.setup(i.rank))
            case do.RestoreRank():
                self.tell(lambda: self.restore(i.rank))
            case do.Send():
                self.tell(lambda: self.as_rank(i.rank, inboxes[i.rank].deliver(i.requests, 0.0)))
            case do.WriteCommit():
                self.ask(lambda: ledger.commit_done(i.step, 0.0))

    def setup(self, rank: int) -> list[Any]:
        (clear,) = self.inboxes[rank].reset("bench", 0, 0, "client", 0.0)
        self.inboxes[rank].cleared(clear.key, 0.0)
        self.ask(lambda: self.ledger.rank_reset(rank, 0, 0.0))
        return []

    def restore(self, rank: int) -> list[Any]:
        (load,) = self.inboxes[rank].restore("bench", 0, 0, 0, 0.0)
        self.inboxes[rank].loaded(load.key, 0.0)
        self.ask(lambda: self.ledger.rank_restored(rank, 0, 0.0))
        return []

    def as_rank(self, rank: int, instructions: list[Any]) -> list[Any]:
        """Carry out a rank's instructions: nodes end at once, saved parts are durable at once."""
        ledger, inbox = self.ledger, self.inboxes[rank]
        for i in instructions:
            match i:
                case Told(kind="entered", key=key):
                    self.ask(lambda key=key: ledger.rank_entered(rank, key, 0.0))
                case do.Run(request):
                    result = NodeResult(key=request.key, rank=rank, started_s=0.0, ended_s=1.0)
                    self.tell(lambda result=result: self.as_rank(rank, inbox.finished(result, 0.0)))
                case Done(result=result):
                    self.ask(lambda result=result: ledger.rank_done(result, 0.0))
                    if result.key.node in self.saves:
                        self.ask(lambda key=result.key: ledger.part_durable(rank, key, {}, 0.0))
        return []


def scale_rows(n_ranks: Iterable[int], iterations: int) -> list[dict[str, float]]:
    """Figures for each number of ranks, with few and many sequences, on which the controller's must not depend."""
    rows = []
    for ranks in n_ranks:
        for per_rank in SEQUENCES_PER_RANK:
            plan = ppo_plan(ranks, ranks * per_rank)
            Drive(plan, 1).run()  # warm
            cost = Drive(plan, iterations).run()
            tracemalloc.start()
            drive = Drive(plan, MEMORY_ITERATIONS)
            drive.run()
            held_bytes = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            rank_nodes = sum(len(node.devices) for node in plan.nodes)
            rows.append(
                {
                    "ranks": ranks,
                    "sequences": plan.n_seqs,
                    "messages": cost.messages / iterations,
                    "controller_s": cost.controller_s / iterations,
                    "controller_s_per_rank_node": cost.controller_s / iterations / rank_nodes,
                    "rank_s": cost.ranks_s / iterations / ranks,
                    "ledger_bytes": held_bytes,
                }
            )
    return rows


def print_rows(rows: Iterable[dict[str, float]]) -> None:
    """Print one line per row, with figures per iteration."""
    print(
        "ranks  sequences  messages  controller ms  us per rank and node  a rank ms  ledger and inboxes MiB"
    )
    for row in rows:
        print(
            f"{row['ranks']:5}  {row['sequences']:9}  {row['messages']:8.0f}  {1e3 * row['controller_s']:13.2f}"
            f"  {1e6 * row['controller_s_per_rank_node']:20.1f}  {1e3 * row['rank_s']:9.3f}"
            f"  {row['ledger_bytes'] / 2**20:22.1f}"
        )
