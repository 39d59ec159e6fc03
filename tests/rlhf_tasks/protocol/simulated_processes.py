"""The processes of a simulated cluster: real ledger, real inboxes, no-op ranks.

Nodes compute nothing, but they rendezvous as collectives do: a node ends on its ranks when all have entered
it; a lost peer makes some fail and leaves others hanging. Every rank carries a small state (role -> version
and a chain of hashes) that is trained, saved, committed and loaded: two runs can be compared bit by bit.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_tasks.protocol import instructions as do
from rlhf_tasks.protocol.inbox import Inbox
from rlhf_tasks.protocol.ledger import Ledger
from rlhf_tasks.protocol.messages import (
    Committed,
    Done,
    Failed,
    Faulted,
    Finished,
    GaveUp,
    Held,
    NodeEnded,
    NotEntered,
    Told,
)
from rlhf_tasks.protocol.phases import Timeouts
from rlhf_tasks.protocol.scheduled_plans import ScheduledPlan
from rlhf_tasks.spec import (
    CallNode,
    NodeFailure,
    NodeKey,
    NodeRequest,
    NodeResult,
    ReallocateNode,
    ReleaseNode,
    SaveNode,
    SaveSamplesNode,
)
from tests.rlhf_tasks.settings import limits

if TYPE_CHECKING:
    from tests.rlhf_tasks.protocol.simulation import World

TIMEOUTS = Timeouts(blame_s=4, entry_s=20, reset_s=5, restart_s=30)
LIMITS = {"io_floor_s": 20, "io_least_bytes_per_s": 10, "deadline_factor": 10, "deadline_floor_s": 10}
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
    """What survives every process: the plans, the commits, and the metrics appended with them."""

    plans: list[ScheduledPlan]
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
        self.drawn: dict[int, str] = {}  # iteration -> what was generated for it
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
        if instruction.keep_state:
            self.check_against_commit()
        self.epoch += 1
        self.params, self.copies, self.drawn = {}, {}, {}
        self.end(instruction.key, lambda: self.inbox.cleared(instruction.key, self.now))

    def check_against_commit(self) -> None:
        """What this rank is to keep is what it has in the newest commit."""
        _, commit = max(self.world.disk.commits.items())
        for node in commit.plan.nodes:
            if isinstance(node, SaveNode) and self.rank in node.devices:
                assert self.params[node.role] == commit.parts[node.name][self.rank]

    def do_Load(self, instruction: do.Load) -> None:
        self.begin(instruction.key)
        self.world.rendezvous(
            instruction.key, range(self.world.n_ranks), self, lambda: self.load(instruction)
        )

    def load(self, instruction: do.Load) -> list[Any]:
        for node in self.world.saves(self.rank, instruction.step or 0):
            if instruction.step is None:
                self.params[node.role] = (0, digest("initial", node.role))
                self.save(instruction.key._replace(node=node.name), self.params[node.role])
            else:
                parts = self.world.disk.commits[instruction.step].parts[node.name]
                (self.params[node.role],) = set(parts.values())
        commit = self.world.disk.commits.get(instruction.step or 0)
        for node in self.world.plan(instruction.step or 0).on(self.rank):
            if isinstance(node, SaveSamplesNode) and instruction.step and commit is not None:
                self.drawn = dict(commit.parts[node.name][min(node.writers)])
        self.first = instruction.step or 0
        return self.inbox.loaded(instruction.key, self.now)

    def do_Run(self, instruction: do.Run) -> None:
        request = instruction.request
        self.begin(request.key)
        self.world.record(self, request)
        ranks = self.world.plan(request.key.iteration).node(request.key.node).devices
        self.world.rendezvous(request.key, ranks, self, lambda: self.compute(request))

    def compute(self, request: NodeRequest) -> list[Any]:
        node = self.world.plan(request.key.iteration).node(request.key.node)
        for role, version in request.versions.items():
            copy = self.copies.get((role, getattr(node, "placement", None)))
            found = self.params.get(role, (version,))[0] if copy is None else copy
            assert found == version, f"rank {self.rank}: {request.key} expects {role} {version}, not {found}"
        if isinstance(node, ReallocateNode):
            self.copies[node.role, node.destination] = request.versions[node.role]
        elif isinstance(node, ReleaseNode):
            self.copies.pop((node.role, node.placement), None)
        elif isinstance(node, CallNode) and node.lead:
            now = (
                request.key.iteration
            )  # where the commit has nothing, for all iterations up to the one ahead
            first = now if now == self.first and not self.drawn else now + node.lead
            for iteration in range(first, now + node.lead + 1):
                self.drawn[iteration] = f"{iteration} by {request.versions[node.call.role]}"
        elif isinstance(node, CallNode) and node.trains and node.call.role in self.params:
            version, chain = self.params[node.call.role]
            if self.world.lead:
                now = request.key.iteration
                assert self.drawn[now] == f"{now} by {max(0, now - self.world.lead)}"
            self.params[node.call.role] = (version + 1, digest(chain, node.name, request.first_sample))
        elif isinstance(node, SaveSamplesNode) and request.in_snapshot and self.rank in node.writers:
            step = request.key.iteration + 1
            self.save(request.key, {t: self.drawn[t] for t in range(step, step + node.lead)})
        elif isinstance(node, SaveNode) and request.in_snapshot:
            self.save(request.key, self.params[node.role])
        seen = digest(node.name, request.first_sample, sorted(self.params.items()))
        result = NodeResult(key=request.key, rank=self.rank, started_s=0, ended_s=self.now, digest=seen)
        return self.inbox.finished(result, self.now)

    def save(self, key: NodeKey, state: object) -> None:
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

    def do_Told(self, news: Told) -> None:
        key, generation = news.key, news.key.generation
        match news.kind:
            case "entered":
                self.tell(lambda ledger: ledger.rank_entered(self.rank, key, self.now))
            case "reset":
                self.tell(lambda ledger: ledger.rank_reset(self.rank, generation, self.now))
            case "restored":
                self.tell(lambda ledger: ledger.rank_restored(self.rank, generation, self.now))
            case "refused":
                self.tell(lambda ledger: ledger.rank_refused(self.rank, key, news.reason, self.now))

    def do_Done(self, news: Done) -> None:
        self.tell(lambda ledger: ledger.rank_done(news.result, self.now))

    def do_Failed(self, news: Failed) -> None:
        self.tell(lambda ledger: ledger.rank_failed(news.failure, self.now))


class Controller(Process):
    """One attempt: a ledger, and a flow that enters whatever may be entered."""

    def __init__(self, world: "World", attempt: int) -> None:
        super().__init__(world)
        self.attempt = attempt
        self.client = f"client-{attempt}"
        last = max(world.disk.commits, default=None)
        self.ledger = Ledger(
            world.disk.plans,
            run="run",
            attempt=attempt,
            n_ranks=world.n_ranks,
            total_iterations=world.iterations,
            committed_step=last,
            cursor=0 if last is None else world.disk.commits[last].cursor,
            limits=limits(snapshot_every=world.snapshot_every, snapshot_max_s=world.snapshot_max_s, **LIMITS),
            timeouts=TIMEOUTS,
        )
        self.outcome: Finished | GaveUp | None = None
        self.faults: list[Faulted] = []
        self.done: list[tuple[int, str]] = []
        self.later(0, lambda: self.ledger.start(world.now))
        if world.is_paused:
            self.later(0, lambda: self.ledger.pause(world.now))
        self.later(TICK_S, self.tick)

    def tick(self) -> list[Any]:
        """Time, a flow that enters what it may, and a watcher that asks for things long past."""
        self.later(TICK_S, self.tick)
        ledger, now = self.ledger, self.world.now
        stale = ledger.enter(max(ledger.account.next_iteration - 1, 0), ledger.generation - 1, now)
        assert all(isinstance(i, NotEntered) for i in stale), "an older generation's task entered again"
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
        client, world = self.client, self.world
        names = ("run", self.attempt, i.generation, client)
        self.ask(i.rank, lambda inbox: inbox.reset(*names, world.now, i.keep_state))

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
                node: {rank: answer.digest for rank, answer in results.items()}
                for node, results in self.ledger.account.results(t).items()
            }
            for t in i.iterations
        }

        def renamed() -> list[Any]:
            self.world.commit(i, digests)
            return self.ledger.commit_done(i.step, self.world.now)

        self.later(self.world.jitter(3), renamed)

    def do_LogPlan(self, i: do.LogPlan) -> None:
        def written() -> list[Any]:
            self.world.disk.plans.append(i.planned)
            return self.ledger.plan_logged(self.world.now)

        self.later(self.world.jitter(3), written)

    def do_Committed(self, i: Committed) -> None:
        if self.world.change_after == i.iteration and self.world.next_plan is not None:
            self.carry_out(self.ledger.change_plan(self.world.next_plan, {}, self.world.now))
        if self.world.pause_after == i.iteration:
            self.world.pause()

    def do_Held(self, i: Held) -> None:
        self.world.held(i.step)

    def do_NodeEnded(self, i: NodeEnded) -> None:
        answered = self.ledger.account.results(i.iteration)[i.node]
        assert set(answered) == set(self.world.plan(i.iteration).node(i.node).devices)

    def do_Faulted(self, i: Faulted) -> None:
        self.faults.append(i)

    def do_Finished(self, i: Finished | GaveUp) -> None:
        assert self.outcome is None
        self.outcome = i

    do_GaveUp = do_Finished

    def nothing(self, i: object) -> None:
        """Instructions that only tell the flow something."""

    do_Ready = do_NotEntered = do_IterationDone = do_Aborted = do_PlanChanged = do_PlanKept = nothing
