"""A rehearsal: attempts of a run on a simulated cluster, from its first second to its end."""

import asyncio
import gc
import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from prefect_rlhf.rlhf_tasks.controller import attempt as controller
from prefect_rlhf.rlhf_tasks.controller.attempt import Attempt, Surroundings
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    Aborted,
    Cause,
    Committed,
    Enterable,
    Faulted,
    Finished,
    GaveUp,
    Held,
    IterationRan,
    RunSpec,
)
from prefect_rlhf.rlhf_tasks.protocol.progress import Pace
from prefect_rlhf.rlhf_tasks.rehearsal.assumptions import (
    ControllerFault,
    Costs,
    HostFault,
    InjectedFault,
    Machines,
    Noise,
    RankFault,
    SlowFault,
)
from prefect_rlhf.rlhf_tasks.rehearsal.cluster import SimulatedCluster
from prefect_rlhf.rlhf_tasks.rehearsal.ranks import Process, SimulatedRankMissing
from prefect_rlhf.rlhf_tasks.rehearsal.story import OWN, Story, WaitLog, Window
from prefect_rlhf.rlhf_tasks.rehearsal.time_and_disk import CommitsOnDisk, SimulatedSnapshots, VirtualTime
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError

REHEARSED = 100_000  # nodes of single ranks in a window: what two windows take is seconds to a minute
FEWEST, MOST = 4, 40  # iterations of a window


class Smaller(NamedTuple):
    """What a run does with the devices that it has.

    slots  their numbers in the whole cluster, in rank order
    spec   with the plan for them
    """

    slots: tuple[int, ...]
    spec: RunSpec
    costs: Costs


class HostBack(NamedTuple):
    """A lost host has started its ranks again."""

    at_s: float
    host: int


@dataclass(frozen=True)
class RehearsalRequest:
    """What is rehearsed.

    spec    the run's first attempt, as its flow would describe it
    hours   the most that it may last
    faults  in the order in which they strike
    leaps   whether quiet times are counted and not rehearsed
    smaller  of a run that may shrink: which devices are there -> what it does with them. Raises ConfigError where no
             plan fits
    """

    spec: RunSpec
    costs: Costs
    machines: Machines
    noise: Noise
    keep_last: int
    hours: float
    faults: Sequence[InjectedFault] = ()
    leaps: bool = True
    smaller: Callable[[Sequence[bool]], Smaller] | None = None


@dataclass(frozen=True)
class Rehearsed:
    """What came of a rehearsal.

    ended            how the run ended, in a sentence
    finished         its last iteration is committed, or its hours are over
    rehearsed        iterations that ran node by node; the others are counted from windows like them
    most_kept_bytes  host -> the most bytes of copies that waited to be written
    """

    story: Story
    watch: WaitLog
    elapsed_s: float
    ended: str
    finished: bool
    rehearsed: int
    most_kept_bytes: Counter[int]

    @property
    def false_faults(self) -> list[str]:
        """The ledger's sentences of faults that nothing had caused but the run's own limits."""
        return [fault.sentence for fault in self.story.faults if fault.cause == OWN]


def rehearse(request: RehearsalRequest) -> Rehearsed:
    """Rehearse a run. Takes seconds to minutes, whatever the hours."""
    return carried_out(Rehearsal(request))


def carried_out(rehearsal: "Rehearsal") -> Rehearsed:
    """Carry out a rehearsal to its end. Its loop is closed after it."""
    with _closing(rehearsal.loop) as loop, _rare_collection(), _without_news():
        return loop.run_until_complete(rehearsal.run())


@contextmanager
def _closing(loop: VirtualTime) -> Generator[VirtualTime]:
    """Leaves nothing over on a loop."""
    try:
        yield loop
    finally:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()


@contextmanager
def _rare_collection() -> Generator[None]:
    """Lets the garbage collector come rarely: otherwise it takes most of the time with a thousand ranks."""
    thresholds = gc.get_threshold()
    gc.set_threshold(500_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def _without_news() -> Generator[None]:
    """Keeps the controller's log of rehearsed faults off the terminal; errors of its own come through."""
    log = logging.getLogger(controller.__name__)
    log.addFilter(_is_own_error)
    try:
        yield
    finally:
        log.removeFilter(_is_own_error)


def _is_own_error(record: logging.LogRecord) -> bool:
    return record.exc_info is not None


class Nowhere:
    """Where simulated ranks meet: they need no store."""

    host, port = "simulated", 0

    def close(self) -> None:
        """There is nothing to close."""


class Rehearsal:
    """One rehearsal: the flow of the run, and the faults.

    attempt  makes an attempt on the controller; process: a process of a rank
    commits  what lies on the disk
    """

    def __init__(
        self,
        request: RehearsalRequest,
        attempt: Callable[[Surroundings, RunSpec, Callable[[Any], None]], Attempt] = Attempt,
        process: Callable[[SimulatedCluster, int], Process] = Process,
        commits: CommitsOnDisk | None = None,
    ) -> None:
        self.loop = loop = VirtualTime()
        self._request = request
        self._make_attempt = attempt
        self._story, self._watch = Story(), WaitLog()
        self._make_process = process
        self._whole = Smaller(tuple(range(request.spec.plan.n_devices)), request.spec, request.costs)
        self._uses, self.cluster = self._whole, self._cluster_of(self._whole)
        self._back_s: dict[int, float] = {}  # host -> when it is back, of the run's seconds
        self._is_returning = False  # the attempt is to end at its next commit: a host is back
        self._kept_bytes = Counter[int]()  # of the clusters before this one
        self._commits = commits or CommitsOnDisk()
        self.attempt: Attempt | None = None
        self._starting: asyncio.Task[None] | None = None  # what starts the attempt
        self._snapshots: SimulatedSnapshots | None = None
        self._rebuilds = request.spec.rebuilds
        self._over: asyncio.Future[tuple[str, bool]] = loop.create_future()
        self._faults: list[InjectedFault | HostBack] = list(request.faults)
        self._timer: asyncio.TimerHandle | None = None
        self._rehearsed = 0
        self._quiet = QuietTimes(self._story, window_of(request), request.costs.cycle)

    def _cluster_of(self, uses: Smaller) -> SimulatedCluster:
        """A cluster of the devices that a run uses."""
        request, limits = self._request, self._request.spec.limits
        cluster = SimulatedCluster(
            self.loop,
            uses.spec.plan,
            uses.costs,
            request.machines,
            request.noise,
            self._watch,
            Pace(limits.io_floor_s, limits.io_least_bytes_per_s),
            lambda idle: self._story.idle(idle, self.loop.time()) if cluster is self.cluster else None,
            self._hit,
            self._make_process,
        )
        return cluster

    @property
    def _now_s(self) -> float:
        """Seconds of the run, those of quiet times that were not rehearsed among them."""
        return self.loop.time() + self._story.leapt_s

    async def run(self) -> Rehearsed:
        """From the run's beginning to its end."""
        self._set_timer()
        self.begin(self._request.spec)
        ended, finished = await self._over
        story, snapshots = self._story, self._snapshots
        story.at(self.loop.time())
        if snapshots is not None and snapshots.writing_since_s is not None:
            self._commit_took(self.loop.time() - snapshots.writing_since_s)
        self._keep_bytes()
        return Rehearsed(story, self._watch, self._now_s, ended, finished, self._rehearsed, self._kept_bytes)

    # --- the flow -----------------------------------------------------------------------------------------

    def begin(self, spec: RunSpec) -> None:
        """Begin an attempt."""
        around = Surroundings(self.cluster.link, Nowhere(), self._make_snapshots)
        attempt = self.attempt = self._make_attempt(around, spec, lambda event: self.hear(attempt, event))
        self._starting = self.cluster.start(self._start(attempt))

    async def _start(self, attempt: Attempt) -> None:
        try:
            await attempt.start()
        except SimulatedRankMissing as error:
            self._give_up(str(error), True)

    def _make_snapshots(self, spec: RunSpec) -> SimulatedSnapshots:
        request, costs = self._request, self._uses.costs
        self._snapshots = SimulatedSnapshots(
            self.loop,
            self._commits,
            self.cluster.disks[0],
            costs.commit_bytes,
            costs.n_files,
            request.keep_last,
            self._commit_took,
        )
        return self._snapshots

    def _commit_took(self, seconds: float) -> None:
        self._watch.used("commit", seconds, self._request.spec.limits.io_floor_s)

    def hear(self, attempt: Attempt, event: Any) -> None:
        """An event for the flow."""
        if attempt is not self.attempt:
            return
        now, story = self.loop.time(), self._story
        match event:
            case Enterable():
                story.ready(now, self.cluster.well)
                self.cluster.post(attempt.enter, event.iteration, event.generation)
            case IterationRan(iteration=iteration):
                self._rehearsed += 1
                story.iteration_ran(iteration, now)
            case Committed(iteration=iteration):
                self._rebuilds = 0
                story.has_committed(iteration)
                step = attempt.ledger.committed_step
                if step is not None and step == iteration + 1:
                    story.commit_written(step, now)
                    self.cluster.post(self._look_for_quiet)
            case Faulted(cause=cause):
                self._rebuilds += 1
                self._quiet.disturbed()
                story.faulted(_sentence(cause, story.leapt_iterations), now)
            case Aborted(iteration=iteration):
                story.aborted(iteration)
            case Finished():
                self._end(f"finished: iteration {story.committed} is committed", True)
            case Held() if self._is_returning:
                story.renews(now)
                self.cluster.start(self._renew())
            case GaveUp(reason=reason, missing=missing):
                self._give_up(reason, bool(missing))
            case _:
                pass  # what only a view of a run shows

    def _end(self, how: str, finished: bool) -> None:
        if not self._over.done():
            self._over.set_result((how, finished))

    # --- fewer devices ------------------------------------------------------------------------------------

    def _give_up(self, reason: str, are_missing: bool) -> None:
        """An attempt has given up. Where ranks are missing, a run that may shrink begins the next one."""
        if are_missing and self._request.smaller is not None and not all(self._there()):
            self.cluster.start(self._renew())
        else:
            self._end(f"the run gave up: {reason}", False)

    def _there(self) -> list[bool]:
        """Of each device of the whole cluster: whether its host is there."""
        per_host = self._whole.spec.plan.devices_per_host
        return [self._back_s.get(slot // per_host, 0.0) <= self._now_s for slot in self._whole.slots]

    async def _renew(self) -> None:
        """The next attempt, with the devices that are there. Those of its ranks that had no process have one at once,
        and hosts that were slow are not any more."""
        old, self.attempt, self._is_returning = self.attempt, None, False
        self._quiet.disturbed()
        if old is None:
            return
        await old.close()
        uses, smaller = self._whole, self._request.smaller
        if not all(self._there()):
            await asyncio.sleep(self._request.machines.replan_s)
        if not all(there := self._there()) and smaller is not None:
            try:
                uses = smaller(there)
            except ConfigError as error:
                self._end(f"the run gave up: there is no plan for the devices that are left: {error}", False)
                return
        self._keep_bytes()
        self._uses = uses
        self.cluster = self._cluster_of(uses)
        self._story.idle(True, self.loop.time())
        gone = {host: at_s for host, at_s in self._back_s.items() if at_s > self._now_s}
        self._faults = [one for one in self._faults if not isinstance(one, HostBack)]
        for host, at_s in gone.items():
            insort(
                self._faults,
                HostBack(at_s + self._request.machines.start_s, host),
                key=lambda one: one.at_s,
            )
        self._set_timer()
        self._begin_again(old, uses.spec)

    def _keep_bytes(self) -> None:
        """The most bytes of copies on each host, by its number in the whole cluster."""
        for host, kept_bytes in self.cluster.most_kept_bytes.items():
            number = self._hosts[host]
            self._kept_bytes[number] = max(self._kept_bytes[number], kept_bytes)

    @property
    def _hosts(self) -> list[int]:
        """Of each host that the run uses, its number in the whole cluster."""
        of_whole, per_host = self._whole.spec.plan.devices_per_host, self._uses.spec.plan.devices_per_host
        return [slot // of_whole for slot in self._uses.slots[::per_host]]

    def _take_back(self, back: HostBack) -> None:
        """A host is back: the attempt ends at its next commit, and the next one has its devices."""
        if self._back_s[back.host] <= self._now_s and self.attempt is not None:
            self._is_returning = True
            self.attempt.pause()

    # --- faults and hours ---------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        """Wait for the next fault, or for the end of the hours."""
        if self._timer is not None:
            self._timer.cancel()
        end_s = 3600 * self._request.hours
        at_s = min(self._faults[0].at_s, end_s) if self._faults else end_s
        self._timer = self.loop.call_later(max(0.0, at_s - self._now_s), self._due)

    def _due(self) -> None:
        if not self._faults or self._faults[0].at_s >= 3600 * self._request.hours:
            self._end(f"{self._request.hours:g} hours are over", True)
            return
        due = self._faults.pop(0)
        if isinstance(due, HostBack):
            self._take_back(due)
        else:
            self.strike(due)
        self._set_timer()

    def strike(self, fault: InjectedFault) -> None:
        """A fault strikes."""
        self._quiet.disturbed()
        self._story.struck[fault.kind] += 1
        if isinstance(fault, ControllerFault):
            self._hit(fault.kind)
            self._story.faulted("the controller's process is gone", self.loop.time())
            self.cluster.start(self._next_attempt())
            return
        if isinstance(fault, HostFault):
            back_s = self._now_s + fault.for_s
            self._back_s[fault.host] = max(back_s, self._back_s.get(fault.host, 0.0))
        here = self._here(fault)
        if here is None:
            return
        if isinstance(here, SlowFault):
            self._story.slows(here.kind)
            self.loop.call_later(here.for_s, self._calm, here.kind)
        self.cluster.strike(here)

    def _here(self, fault: RankFault | HostFault | SlowFault) -> RankFault | HostFault | SlowFault | None:
        """A fault by the numbers of what the run uses; None of what it does without."""
        if isinstance(fault, RankFault):
            slots = self._uses.slots
            return fault.model_copy(update={"rank": slots.index(fault.rank)}) if fault.rank in slots else None
        hosts = self._hosts
        return fault.model_copy(update={"host": hosts.index(fault.host)}) if fault.host in hosts else None

    def _hit(self, kind: str) -> None:
        """A fault hits something, when it strikes or later."""
        self._quiet.disturbed()
        self._story.hits(kind, self.loop.time())

    def _calm(self, kind: str) -> None:
        self._story.calms(kind)
        self._quiet.disturbed()

    async def _next_attempt(self) -> None:
        """The controller is lost: the flow begins another attempt at the last commit (flows/run/runs.py)."""
        old, starting, self.attempt = self.attempt, self._starting, None
        if self._snapshots is not None:
            self._snapshots.died()
        if old is None or starting is None:
            return
        first = max(self._commits.cursors, default=0)
        self._story.aborted(first)
        self.cluster.forget_links()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await old.close()
        self._rebuilds += 1
        if self._rebuilds > self._request.spec.limits.max_restarts:
            self._end(f"the run gave up: its controller was lost, after {self._rebuilds - 1} restarts", False)
            return
        await asyncio.sleep(self._request.machines.attempt_s)
        self._begin_again(old, self._uses.spec)

    def _begin_again(self, old: Attempt, spec: RunSpec) -> None:
        """Begin the attempt after another one, with the iterations that are left to rehearse."""
        update = {
            "attempt": old.spec.attempt + 1,
            "rebuilds": self._rebuilds,
            "iterations": self._request.spec.iterations - self._story.leapt_iterations,
        }
        self.begin(spec.model_copy(update=update))

    # --- quiet times --------------------------------------------------------------------------------------

    def _look_for_quiet(self) -> None:
        """At a commit: count what follows instead of rehearsing it, where all is as it was for a while."""
        attempt = self.attempt
        if not self._request.leaps or attempt is None or attempt.ledger.committed_step is None:
            return
        window = self._quiet.window(attempt.ledger.committed_step, self.loop.time())
        if window is None or self._story.slow:
            return
        until_s = 3600 * self._request.hours
        if self._faults:
            until_s = min(until_s, self._faults[0].at_s)
        left = attempt.ledger.last_iteration + 1 - attempt.ledger.committed_step
        times = int(min((until_s - self._now_s) / window.seconds, (left - FEWEST) / window.iterations))
        if times < 1:
            return
        self._story.leap(window, times)
        attempt.stop_after(attempt.ledger.last_iteration - times * window.iterations)
        self._set_timer()


def window_of(request: RehearsalRequest) -> int:
    """Iterations of a window: as many as are rehearsed in seconds."""
    nodes = sum(len(node.devices) for node in request.spec.plan.nodes)
    return min(MOST, max(FEWEST, REHEARSED // nodes))


def _sentence(cause: Cause, leapt_iterations: int) -> str:
    """What the ledger says of a fault, with the number that the iteration has in the run."""
    iteration = None if cause.iteration is None else cause.iteration + leapt_iterations
    return str(replace(cause, iteration=iteration))


class QuietTimes:
    """Finds times in which a run repeats itself: two windows, one after the other, that are alike.

    iterations  of a window, at least
    cycle       a window has whole cycles of so many iterations, after which what not every one has comes again
    """

    def __init__(self, story: Story, iterations: int, cycle: int) -> None:
        self._story, self._iterations, self._cycle = story, iterations, cycle
        self._marks: list[tuple[int, float, dict[str, float], int]] = []

    def disturbed(self) -> None:
        """Something has happened, or ceased to: what was before does not count."""
        self._marks = []

    def window(self, step: int, now_s: float) -> Window | None:
        """At a commit: a window that what follows is like; None where that is not known."""
        story = self._story
        story.at(now_s)
        self._marks.append((step, now_s, dict(story.seconds), len(story.commits)))
        later = self._between(self._start(len(self._marks) - 1), len(self._marks) - 1)
        if later is None:
            return None
        first = self._start(self._start(len(self._marks) - 1))
        earlier = self._between(first, self._start(len(self._marks) - 1))
        return later if earlier is not None and later.is_like(earlier) else None

    def _start(self, end: int | None) -> int | None:
        """The number of the newest mark from which there is a window to the mark `end`."""
        if end is None:
            return None
        step = self._marks[end][0]
        return next(
            (
                number
                for number in range(end - 1, -1, -1)
                if step - self._marks[number][0] >= self._iterations
                and (step - self._marks[number][0]) % self._cycle == 0
            ),
            None,
        )

    def _between(self, first: int | None, last: int | None) -> Window | None:
        if first is None or last is None:
            return None
        (step, at_s, spent, n), (end, until_s, total, m) = self._marks[first], self._marks[last]
        states = {state: seconds - spent.get(state, 0.0) for state, seconds in total.items()}
        return Window(end - step, until_s - at_s, states, tuple(self._story.commits[n:m]))
