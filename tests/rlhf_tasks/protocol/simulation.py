"""A simulated cluster: real ledger, real inboxes, no-op ranks, a virtual clock, a bad network.

Nodes compute nothing, but they rendezvous as collectives do: a node ends on its ranks when all have entered
it; a lost peer makes some fail and leaves others hanging. Every rank carries a small state (role -> version
and a chain of hashes) that is trained, saved, committed and loaded: two runs can be compared bit by bit.
"""

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rlhf_tasks.protocol import instructions as do
from rlhf_tasks.protocol.inbox import Inbox
from rlhf_tasks.protocol.ledger import Ledger
from rlhf_tasks.protocol.phases import Phase, Timeouts
from rlhf_tasks.protocol.sequencer import Deadlines
from rlhf_tasks.spec import (
    CallNode,
    ExecutionPlan,
    NodeFailure,
    NodeKey,
    NodeRequest,
    NodeResult,
    ReallocateNode,
    ReleaseNode,
    SaveNode,
)

TIMEOUTS = Timeouts(blame_s=4, entry_s=20, reset_s=5, restart_s=30, restore_s=20, durable_s=20, commit_s=20)
DEADLINES = Deadlines(floor_s=10)
NOTICED_S = 3.0
RESEND_S = 1.0
TICK_S = 0.5


@dataclass(frozen=True)
class Network:
    """How messages travel: each is lost, doubled and delayed at random; senders repeat until acknowledged."""

    loss: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.01


@dataclass
class Disk:
    """What survives every process: the commits, and the metrics appended with them."""

    commits: dict[int, do.WriteCommit] = field(default_factory=dict)
    metrics: dict[int, dict[str, dict[int, str]]] = field(default_factory=dict)


def digest(*parts: object) -> str:
    """A short hash of anything printable."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


class Process:
    """Something that can be killed."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.alive = True

    def carry_out(self, instructions: Iterable[Any]) -> None:
        """Do what a machine asks, telling the world before and after each (where tests kill)."""
        for instruction in instructions:
            for moment in ("before", "after"):
                if self.alive and moment == "after":
                    getattr(self, "do_" + type(instruction).__name__)(instruction)
                if self.alive:
                    self.world.watch(self, moment, instruction)

    def later(self, delay_s: float, stimulus: Callable[[], list[Any]]) -> None:
        """After a while, if the process still lives, give its machine a stimulus and carry out the answer."""

        def fire() -> None:
            if self.alive:
                self.carry_out(stimulus())

        self.world.at(delay_s, fire)


class Rank(Process):
    """One process of one rank: an inbox, an engine thread that runs one job, and the state in its memory."""

    def __init__(self, world: "World", rank: int) -> None:
        super().__init__(world)
        self.rank = rank
        self.inbox = Inbox(rank, gap_deadline_s=10)
        self.stuck = False
        self.job: NodeKey | None = None
        self.epoch = 0  # clearing ends background writes of older epochs
        self.params: dict[str, tuple[int, str]] = {}
        self.copies: dict[tuple[str, Any], int] = {}
        self.later(TICK_S, self.tick)

    @property
    def now(self) -> float:
        return self.world.now

    def tick(self) -> list[Any]:
        self.later(TICK_S, self.tick)
        return self.inbox.tick(self.now)

    def tell(self, stimulus: Callable[[Ledger], list[Any]]) -> None:
        """Send the controller news of this rank."""
        controller = self.world.controller
        self.world.post(self, controller, lambda: stimulus(controller.ledger))

    def begin(self, key: NodeKey) -> None:
        assert self.job is None, f"rank {self.rank} was to run {key} while it runs {self.job}"
        self.job = key

    def fail(self, key: NodeKey, error: str) -> None:
        """The job ends by an error (unless it has ended, or the thread is stuck)."""

        def ended() -> list[Any]:
            if self.job != key or self.stuck:
                return []
            self.job = None
            return self.inbox.failed(NodeFailure(key=key, rank=self.rank, error=error), self.now)

        self.later(self.world.jitter(), ended)

    def end(self, key: NodeKey, stimulus: Callable[[], list[Any]]) -> None:
        """The job ends well (unless it failed before, or the thread is stuck)."""

        def ended() -> list[Any]:
            if self.job != key or self.stuck:
                return []
            self.job = None
            return stimulus()

        self.later(self.world.jitter(), ended)

    # --- jobs -------------------------------------------------------------------------------------------

    def do_Clear(self, instruction: do.Clear) -> None:
        self.begin(instruction.key)
        self.epoch += 1
        self.params, self.copies = {}, {}
        self.end(instruction.key, lambda: self.inbox.cleared(instruction.key, self.now))

    def do_Load(self, instruction: do.Load) -> None:
        self.begin(instruction.key)
        self.world.rendezvous(
            instruction.key, range(self.world.n_ranks), self, lambda: self.load(instruction)
        )

    def load(self, instruction: do.Load) -> list[Any]:
        for node in self.world.saves(self.rank):
            if instruction.step is None:
                self.params[node.role] = (0, digest("initial", node.role))
                self.save(instruction.key._replace(node=node.name), self.params[node.role])
            else:
                self.params[node.role] = self.world.disk.commits[instruction.step].parts[node.name][self.rank]
        return self.inbox.loaded(instruction.key, self.now)

    def do_Run(self, instruction: do.Run) -> None:
        request = instruction.request
        self.begin(request.key)
        self.world.record(self, request)
        ranks = self.world.plan.node(request.key.node).devices
        self.world.rendezvous(request.key, ranks, self, lambda: self.compute(request))

    def compute(self, request: NodeRequest) -> list[Any]:
        node = self.world.plan.node(request.key.node)
        for role, version in request.versions.items():
            copy = self.copies.get((role, getattr(node, "placement", None)))
            found = self.params.get(role, (version,))[0] if copy is None else copy
            assert found == version, f"rank {self.rank}: {request.key} expects {role} {version}, not {found}"
        if isinstance(node, ReallocateNode):
            self.copies[node.role, node.destination] = request.versions[node.role]
        elif isinstance(node, ReleaseNode):
            self.copies.pop((node.role, node.placement), None)
        elif isinstance(node, CallNode) and node.trains and node.call.role in self.params:
            version, chain = self.params[node.call.role]
            self.params[node.call.role] = (version + 1, digest(chain, node.name, request.first_sample))
        elif isinstance(node, SaveNode) and self.world.controller.is_snapshot(request.key.iteration):
            self.save(request.key, self.params[node.role])
        seen = digest(node.name, request.first_sample, sorted(self.params.items()))
        result = NodeResult(key=request.key, rank=self.rank, started_s=0, ended_s=self.now, digest=seen)
        return self.inbox.finished(result, self.now)

    def save(self, key: NodeKey, state: tuple[int, str]) -> None:
        """Write a part in the background."""
        epoch = self.epoch

        def written() -> list[Any]:
            if epoch == self.epoch:
                self.tell(lambda ledger: ledger.part_durable(self.rank, key, state, self.now))
            return []

        self.later(self.world.jitter(3), written)

    def do_Interrupt(self, instruction: do.Interrupt) -> None:
        self.fail(instruction.key, "interrupted")

    # --- news for the controller ------------------------------------------------------------------------

    def do_Entered(self, instruction: do.Entered) -> None:
        self.tell(lambda ledger: ledger.rank_entered(self.rank, instruction.key, self.now))

    def do_Answer(self, instruction: do.Answer) -> None:
        self.tell(lambda ledger: ledger.rank_done(instruction.result, self.now))

    def do_AnswerFailure(self, instruction: do.AnswerFailure) -> None:
        self.tell(lambda ledger: ledger.rank_failed(instruction.failure, self.now))

    def do_ResetDone(self, instruction: do.ResetDone) -> None:
        self.tell(lambda ledger: ledger.rank_reset(self.rank, instruction.key.generation, self.now))

    def do_RestoreDone(self, instruction: do.RestoreDone) -> None:
        self.tell(lambda ledger: ledger.rank_restored(self.rank, instruction.key.generation, self.now))

    def do_Refuse(self, instruction: do.Refuse | do.Gap) -> None:
        self.tell(
            lambda ledger: ledger.rank_refused(self.rank, instruction.key, instruction.reason, self.now)
        )

    do_Gap = do_Refuse


class Controller(Process):
    """One attempt: a ledger, and a flow that enters whatever may be entered."""

    def __init__(self, world: "World", attempt: int) -> None:
        super().__init__(world)
        self.attempt = attempt
        self.client = f"client-{attempt}"
        last = max(world.disk.commits, default=None)
        self.ledger = Ledger(
            world.plan,
            run="run",
            attempt=attempt,
            n_ranks=world.n_ranks,
            total_iterations=world.iterations,
            committed_step=last,
            cursor=0 if last is None else world.disk.commits[last].cursor,
            snapshot_every=world.snapshot_every,
            deadlines=DEADLINES,
            timeouts=TIMEOUTS,
        )
        self.outcome: do.Finished | do.GiveUp | None = None
        self.faults: list[do.Fault] = []
        self.done: list[tuple[int, str]] = []
        self.later(0, lambda: self.ledger.start(world.now))
        self.later(TICK_S, self.tick)

    def is_snapshot(self, iteration: int) -> bool:
        return self.ledger.account.commits.schedule.is_snapshot(iteration)

    def tick(self) -> list[Any]:
        """Time, a flow that enters what it may, and a watcher that asks for things long past."""
        self.later(TICK_S, self.tick)
        ledger, now = self.ledger, self.world.now
        stale = ledger.enter(max(ledger.account.next_iteration - 1, 0), ledger.generation - 1, now)
        assert all(isinstance(i, do.RefuseEntry) for i in stale), "an older generation's task entered again"
        return ledger.tick(now)

    def carry_out(self, instructions: Iterable[Any]) -> None:
        super().carry_out(instructions)
        if self.alive and (iteration := self.ledger.enterable) is not None:
            self.carry_out(self.ledger.enter(iteration, self.ledger.generation, self.world.now))
            assert self.ledger.enter(iteration, self.ledger.generation, self.world.now) == []

    def ask(self, rank: int, stimulus: Callable[[Inbox], list[Any]]) -> None:
        """Send a rank's present process a message."""
        process = self.world.ranks[rank]
        if process is not None:
            self.world.post(self, process, lambda: stimulus(process.inbox))

    def do_ResetRank(self, i: do.ResetRank) -> None:
        attempt, client, world = self.attempt, self.client, self.world
        self.ask(i.rank, lambda inbox: inbox.reset("run", attempt, i.generation, client, world.now))

    def do_RestoreRank(self, i: do.RestoreRank) -> None:
        attempt, world = self.attempt, self.world
        self.ask(i.rank, lambda inbox: inbox.restore("run", attempt, i.generation, i.step, world.now))

    def do_RestartRank(self, i: do.RestartRank) -> None:
        if not i.lost:
            self.world.kill(i.rank)

    def do_Send(self, i: do.Send) -> None:
        self.ask(i.rank, lambda inbox: inbox.deliver(i.requests, self.world.now))

    def do_WriteCommit(self, i: do.WriteCommit) -> None:
        digests = {
            t: {
                node.name: {r: a.digest for r, a in self.ledger.account.results(t, node.name).items()}
                for node in self.world.plan.nodes
            }
            for t in i.iterations
        }

        def renamed() -> list[Any]:
            self.world.commit(i, digests)
            return self.ledger.commit_done(i.step, self.world.now)

        self.later(self.world.jitter(3), renamed)

    def do_NodeDone(self, i: do.NodeDone) -> None:
        assert set(i.results) == set(self.world.plan.node(i.node).devices)

    def do_Fault(self, i: do.Fault) -> None:
        self.faults.append(i)

    def do_Finished(self, i: do.Finished | do.GiveUp) -> None:
        assert self.outcome is None
        self.outcome = i

    do_GiveUp = do_Finished

    def nothing(self, i: object) -> None:
        """Instructions that only tell the flow something."""

    do_Ready = do_RefuseEntry = do_IterationDone = do_IterationCommitted = do_AbortIteration = nothing


class World:
    """Clock, network, disk, ranks and controller. Everything random comes from one seed.

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
        snapshot_every: int = 1,
        watch: Callable[["World", Process, str, Any], None] = lambda world, process, moment, instruction: (
            None
        ),
    ) -> None:
        self.plan, self.iterations, self.snapshot_every = plan, iterations, snapshot_every
        self.n_ranks = plan.n_devices if n_ranks is None else n_ranks
        self.network = network or Network()
        self.rng = random.Random(seed)
        self.now = 0.0
        self.disk = Disk()
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

    def run(self, until_s: float = 5000.0) -> do.Finished | do.GiveUp:
        """Let time pass until the attempt ends. Fails when nothing ends it."""
        while self.controller.outcome is None:
            assert self.now < until_s, f"hangs in {self.controller.ledger.phase}"
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.controller.outcome

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

    def saves(self, rank: int) -> list[SaveNode]:
        return [node for node in self.plan.on(rank) if isinstance(node, SaveNode)]

    def record(self, process: Rank, request: NodeRequest) -> None:
        """Order on every rank, no node twice in a generation, the same requests in every generation."""
        key, rank = request.key, process.rank
        order = self.orders.setdefault((key.attempt, key.generation, rank), [])
        assert request.number == len(order), f"rank {rank} ran number {request.number} as number {len(order)}"
        order.append((key.iteration, key.node))
        plain = request.model_copy(
            update={"key": key._replace(attempt=0, generation=0), "number": 0},
        )
        assert self.requests.setdefault((rank, key.iteration, key.node), plain) == plain

    def commit(self, commit: do.WriteCommit, digests: dict[int, dict[str, dict[int, str]]]) -> None:
        """The rename. Commits are in order, never repeated, whole, and of one version."""
        last = max(self.disk.commits, default=None)
        first = 0 if last is None else last
        assert commit.step == 0 if last is None else commit.step > last
        assert commit.iterations == tuple(range(first, commit.step))
        assert commit.cursor == commit.step * self.plan.n_seqs
        for node in (node for node in self.plan.nodes if isinstance(node, SaveNode)):
            parts = commit.parts[node.name]
            assert set(parts) == set(node.devices)
            assert {version for version, _ in parts.values()} == {commit.versions[node.role]}
        self.disk.commits[commit.step] = commit
        self.disk.metrics.update(digests)

    def check_orders(self) -> None:
        """On every rank, in every generation, what ran is a prefix of the plan's order."""
        for (_, _, rank), order in self.orders.items():
            names = [node.name for node in self.plan.on(rank)]
            first = order[0][0]
            expected = [(first + n // len(names), names[n % len(names)]) for n in range(len(order))]
            assert order == expected

    @property
    def final(self) -> tuple[Any, ...]:
        """Everything that two runs must agree on: the last commit's parts, cursor, versions; all metrics."""
        commit = self.disk.commits[max(self.disk.commits)]
        return commit.step, commit.cursor, commit.versions, commit.parts, self.disk.metrics

    @property
    def stopped(self) -> bool:
        return self.controller.ledger.phase is Phase.STOPPED
