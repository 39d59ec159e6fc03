"""What the runtime protocol costs: ledger and inboxes driven through PPO iterations on simulated no-op ranks.

    python -m bench.protocol --simulated-ranks 128 1024 --iterations 10

Ranks are objects in this process, nodes end at once and nothing is sent anywhere: the figures are the CPU
time of the state machines alone. `controller` is all that one process must do for all ranks (sequencer and
ledger); `rank` is what each rank does for itself.
"""

import argparse
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from planner.graph import DataflowGraph
from planner.mesh import Cluster
from planner.plan import build_plan
from rlhf_tasks.algorithms.ppo_graph import DATASET_KEYS, graph
from rlhf_tasks.parallel.topology import ParallelStrategy, Placement
from rlhf_tasks.protocol import instructions as do
from rlhf_tasks.protocol.inbox import Inbox
from rlhf_tasks.protocol.ledger import Ledger
from rlhf_tasks.spec import CallAssignment, ExecutionPlan, NodeResult, SaveNode

DEVICES_PER_HOST = 8


def ppo_plan(n_ranks: int, n_seqs: int) -> ExecutionPlan:
    """PPO as one would place it: generation on all hosts, actor and critic trained on a half each."""
    cluster = Cluster(n_ranks // DEVICES_PER_HOST, DEVICES_PER_HOST)
    sizes = SimpleNamespace(
        batch_size=n_seqs,
        num_mini_batches=1,
        scoring_role="reward",
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
    """CPU seconds and messages of a run, restores apart."""

    iterations: int
    controller_s: float = 0.0
    ranks_s: float = 0.0
    messages: int = 0


@dataclass
class Drive:
    """A ledger and its ranks' inboxes, connected by a queue. Every stimulus is timed at its machine."""

    plan: ExecutionPlan
    iterations: int
    cost: Cost = field(init=False)
    queue: deque[tuple[bool, Callable[[], list[Any]]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.cost = Cost(self.iterations)
        self.saves = {node.name for node in self.plan.nodes if isinstance(node, SaveNode)}
        self.inboxes = [Inbox(rank) for rank in range(self.plan.n_devices)]
        self.ledger = Ledger(
            self.plan,
            run="bench",
            attempt=0,
            n_ranks=self.plan.n_devices,
            total_iterations=self.iterations,
            committed_step=0,
        )

    def run(self) -> Cost:
        """Drive the run to its end."""
        self.ask(lambda: self.ledger.start(0.0))
        outcome: list[do.Finished] = []
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
                if isinstance(instruction, do.Finished):
                    outcome.append(instruction)
                if isinstance(instruction, do.Ready | do.IterationCommitted):
                    self.ask(self.enter)
        return self.cost

    def ask(self, stimulus: Callable[[], list[Any]]) -> None:
        self.queue.append((True, stimulus))

    def tell(self, stimulus: Callable[[], list[Any]]) -> None:
        self.queue.append((False, stimulus))

    def enter(self) -> list[Any]:
        """As the flow does: enter whatever may be entered."""
        instructions: list[Any] = []
        while (iteration := self.ledger.enterable) is not None:
            instructions += self.ledger.enter(iteration, 0, 0.0)
        return instructions

    def carry_out(self, i: Any) -> None:
        """Do at once what a rank or a controller would do."""
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
                case do.Entered(key):
                    self.ask(lambda key=key: ledger.rank_entered(rank, key, 0.0))
                case do.Run(request):
                    result = NodeResult(key=request.key, rank=rank, started_s=0.0, ended_s=1.0)
                    self.tell(lambda result=result: self.as_rank(rank, inbox.finished(result, 0.0)))
                case do.Answer(result):
                    self.ask(lambda result=result: ledger.rank_done(result, 0.0))
                    if result.key.node in self.saves:
                        self.ask(lambda key=result.key: ledger.part_durable(rank, key, {}, 0.0))
        return []


def main() -> None:
    """Print one row per cluster size."""
    parser = argparse.ArgumentParser(description="What the runtime protocol costs.")
    parser.add_argument("--simulated-ranks", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--sequences-per-rank", type=int, default=4)
    arguments = parser.parse_args()
    print("ranks  nodes  messages/it  controller ms/it  us/rank-node  rank ms/it  ledger MiB")
    for n_ranks in arguments.simulated_ranks:
        plan = ppo_plan(n_ranks, n_ranks * arguments.sequences_per_rank)
        cost = Drive(plan, arguments.iterations).run()
        tracemalloc.start()
        drive = Drive(plan, 4)
        drive.run()
        held_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        n, rank_nodes = cost.iterations, sum(len(node.devices) for node in plan.nodes)
        controller_ms, rank_ms = 1e3 * cost.controller_s / n, 1e3 * cost.ranks_s / n / n_ranks
        print(
            f"{n_ranks:5}  {len(plan.nodes):5}  {cost.messages / n:11.0f}  {controller_ms:16.2f}"
            f"  {1e3 * controller_ms / rank_nodes:12.1f}  {rank_ms:10.3f}  {held_bytes / 2**20:10.1f}"
        )


if __name__ == "__main__":
    main()
