"""A simulated cluster, the world of `simulated_processes`: a virtual clock, a bad network, a disk."""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from rlhf_tasks.protocol import instructions as do
from rlhf_tasks.protocol.ledger import Ledger
from rlhf_tasks.protocol.messages import Finished, GaveUp
from rlhf_tasks.protocol.phases import Phase
from rlhf_tasks.protocol.scheduled_plans import ScheduledPlan, plan_at
from rlhf_tasks.spec import (
    ExecutionPlan,
    NodeKey,
    NodeRequest,
    PlanNode,
    SaveNode,
    SaveSamplesNode,
)
from tests.rlhf_tasks.protocol.simulated_processes import (
    NOTICED_S,
    RESEND_S,
    Controller,
    Disk,
    Network,
    Process,
    Rank,
)

HELD_S = 30.0  # longer than anything else takes


def first_come(plan: ExecutionPlan, is_first: bool) -> list[PlanNode]:
    """A plan's nodes in the order of an iteration, by the names that `ahead_plan` gives."""
    ahead = ("to_generate", "generate", "save_samples") if is_first and plan.lead else ()
    return [*map(plan.node, ahead), *(node for node in plan.nodes if node.name not in ahead)]


class World:
    """Clock, network, disk, ranks and controller. Everything random comes from one seed.

    next_plan, change_after   the flow changes to this plan when it hears that this iteration is committed
    pause_after  the flow pauses the run when it hears that this iteration is committed, and resumes it HELD_S after
                 it has heard that the run is held
    watch  called with (process, "before" | "after", instruction) around every instruction
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        *,
        iterations: int,
        seed: int = 0,
        n_ranks: int | None = None,
        network: Network | None = None,
        snapshot_every: int | Literal["auto"] = 1,
        snapshot_max_s: float = 1e9,
        next_plan: ExecutionPlan | None = None,
        change_after: int = 0,
        pause_after: int | None = None,
        watch: Callable[["World", Process, str, Any], None] = lambda world, process, moment, instruction: (
            None
        ),
    ) -> None:
        self.iterations = iterations
        self.snapshot_every, self.snapshot_max_s = snapshot_every, snapshot_max_s
        self.next_plan, self.change_after = next_plan, change_after
        self.pause_after, self.is_paused, self.held_at = pause_after, False, list[int]()
        self.lead = plan.lead
        self.n_ranks = plan.n_devices if n_ranks is None else n_ranks
        self.network = network or Network()
        self.rng = random.Random(seed)
        self.now = 0.0
        self.disk = Disk([ScheduledPlan(iteration=0, plan=plan)])
        self.requests: dict[tuple[int, int, str], NodeRequest] = {}
        self.orders: dict[tuple[int, int, int], list[tuple[int, str]]] = {}
        self._watch = watch
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._meetings: dict[NodeKey, dict[int, tuple[Rank, Callable[[], list[Any]]]]] = {}
        self.ranks: dict[int, Rank | None] = {rank: Rank(self, rank) for rank in range(self.n_ranks)}
        self.controller = Controller(self, attempt=0)

    # --- time and messages ------------------------------------------------------------------------------

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._count), event))

    def jitter(self, scale: float = 1.0) -> float:
        return scale * self.rng.uniform(0.01, 0.2)

    def watch(self, process: Process, moment: str, instruction: object) -> None:
        self._watch(self, process, moment, instruction)

    def post(self, source: Process, destination: Process, stimulus: Callable[[], list[Any]]) -> None:
        """Send at least once: repeat until a copy and its acknowledgement have both come through."""
        net, rng, acknowledged = self.network, self.rng, [False]

        def arrive() -> None:
            if destination.alive:
                acknowledged[0] |= rng.random() >= net.loss
                destination.carry_out(stimulus())

        def attempt() -> None:
            if acknowledged[0] or not source.alive or not destination.alive:
                return
            for _ in range(1 + (rng.random() < net.duplicate)):
                if rng.random() >= net.loss:
                    self.at(rng.uniform(0, 2 * net.delay_s), arrive)
            self.at(RESEND_S, attempt)

        attempt()

    def run(self, until_s: float = 5000.0) -> Finished | GaveUp:
        """Let time pass until the attempt ends. Fails when nothing ends it."""
        while self.controller.outcome is None:
            assert self.now < until_s, f"hangs in {self.controller.ledger.phase}"
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.controller.outcome

    def pause(self) -> None:
        """The flow orders a pause; one that was held, ends."""
        self.is_paused = True
        self.delivered_when_paused = self.controller.ledger.account.newest_delivered + 1
        self._tell(lambda ledger: ledger.pause(self.now))

    def held(self, step: int) -> None:
        """The flow hears that the run is held, looks on for a while, and resumes it."""
        assert self.is_paused
        assert max(self.disk.commits) == step
        self.held_at.append(step)
        if len(self.held_at) > 1:  # after a fault, or by the next attempt
            return
        self.at(HELD_S, self._resume)

    def _resume(self) -> None:
        self.is_paused = False
        self._tell(lambda ledger: ledger.resume(self.now))

    # --- processes --------------------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        """End a rank's process; the nanny notices, tells the controller, and starts the next one."""
        process = self.ranks[rank]
        if process is None:
            return
        process.alive, self.ranks[rank] = False, None
        for key, members in self._meetings.items():
            if rank in members:
                self._break(key, members, rank)
        noticed = self.rng.uniform(0, NOTICED_S)
        self.at(noticed, lambda: self._tell(lambda ledger: ledger.rank_lost(rank, "killed", self.now)))
        self.at(noticed + self.rng.uniform(0, 5), lambda: self._start(rank))

    def restart_controller(self) -> None:
        """The controller dies; its leases end when the ranks notice; then the next attempt begins."""
        old = self.controller
        old.alive = False
        for process in self.ranks.values():
            if process is not None:
                process.later(
                    self.rng.uniform(0, NOTICED_S),
                    lambda p=process: p.inbox.client_lost(old.client, self.now),
                )
        self.controller = Controller(self, old.attempt + 1)

    def _tell(self, stimulus: Callable[[Ledger], list[Any]]) -> None:
        self.controller.carry_out(stimulus(self.controller.ledger))

    def _start(self, rank: int) -> None:
        self.ranks[rank] = Rank(self, rank)
        self._tell(lambda ledger: ledger.rank_started(rank, self.now))

    def _break(self, key: NodeKey, members: dict[int, tuple[Rank, Any]], dead: int) -> None:
        """A peer is gone: some fail at once, others hang until they are interrupted."""
        for rank, (process, _) in members.items():
            if rank != dead and process.alive and self.rng.random() < 0.5:
                process.fail(key, "connection closed by peer")

    def rendezvous(
        self, key: NodeKey, ranks: Iterable[int], process: Rank, then: Callable[[], list[Any]]
    ) -> None:
        """The process enters a collective; when all ranks are in it, it ends on each, in any order."""
        members = self._meetings.setdefault(key, {})
        members[process.rank] = (process, then)
        if set(members) == set(ranks) and all(member.alive for member, _ in members.values()):
            del self._meetings[key]
            for member, end in members.values():
                member.end(key, end)

    # --- what is checked --------------------------------------------------------------------------------

    def plan(self, iteration: int) -> ExecutionPlan:
        """What an iteration goes by."""
        return plan_at(self.disk.plans, iteration).plan

    def saves(self, rank: int, iteration: int) -> list[SaveNode]:
        return [node for node in self.plan(iteration).on(rank) if isinstance(node, SaveNode)]

    def record(self, process: Rank, request: NodeRequest) -> None:
        """Order on every rank, no node twice in a generation, the same requests in every generation."""
        key, rank = request.key, process.rank
        assert not (self.is_paused and self.held_at), f"rank {rank} runs {key} while the run is held"
        order = self.orders.setdefault((key.attempt, key.generation, rank), [])
        assert request.number == len(order), f"rank {rank} ran number {request.number} as number {len(order)}"
        order.append((key.iteration, key.node))
        plain = replace(request, key=key._replace(attempt=0, generation=0), number=0, in_snapshot=True)
        if self.lead:  # in a generation's first iteration, what runs ahead may have more to do
            plain = replace(plain, deadline_s=0.0)
        assert self.requests.setdefault((rank, key.iteration, key.node), plain) == plain

    def commit(self, commit: do.WriteCommit, digests: dict[int, dict[str, dict[int, str]]]) -> None:
        """The rename. Commits are in order, never repeated, whole, and of one version."""
        last = max(self.disk.commits, default=None)
        first = 0 if last is None else last
        assert commit.step == 0 if last is None else commit.step > last
        assert commit.iterations == tuple(range(first, commit.step))
        plan = self.plan(max(commit.step - 1, 0))
        assert commit.plan == plan
        assert commit.cursor == commit.step * plan.n_seqs
        for node in (node for node in plan.nodes if isinstance(node, SaveNode)):
            parts = commit.parts[node.name]
            assert set(parts) == set(node.devices)
            assert {version for version, _ in parts.values()} == {commit.versions[node.role]}
        for parts in (
            commit.parts[n.name] for n in plan.nodes if isinstance(n, SaveSamplesNode) and commit.step
        ):
            ahead = range(commit.step, commit.step + self.lead)
            wanted = {t: f"{t} by {max(0, t - self.lead)}" for t in ahead}
            assert list(parts.values()) == [wanted] * len(parts)
        self.disk.commits[commit.step] = commit
        self.disk.metrics.update(digests)

    def check_orders(self) -> None:
        """On every rank, in every generation, what ran is a prefix of the plan's order. In its first iteration what
        runs ahead comes first."""
        for (_, _, rank), order in self.orders.items():
            iterations = range(order[0][0], order[-1][0] + 1)
            expected = [
                (t, node.name)
                for t in iterations
                for node in first_come(self.plan(t), t == iterations[0])
                if rank in node.devices
            ]
            assert order == expected[: len(order)]

    @property
    def final(self) -> tuple[Any, ...]:
        """Everything that two runs must agree on: the last commit's parts, cursor, versions; all metrics."""
        commit = self.disk.commits[max(self.disk.commits)]
        return commit.step, commit.cursor, commit.versions, commit.parts, self.disk.metrics

    @property
    def stopped(self) -> bool:
        return self.controller.ledger.phase is Phase.STOPPED
