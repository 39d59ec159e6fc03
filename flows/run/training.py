"""The part that all algorithms' flows share: the parent's loop.

The loop enters an iteration as soon as the controller says that it may be entered (docs/protocol.md, delivery): it
tells the controller, which delivers it, and the iteration's view (flows/view/iterations.py).
Whatever Prefect does or does not do meanwhile, the ranks continue.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.comm import CommClosedError
from distributed.core import connect, rpc
from prefect.exceptions import Abort

from flows.cluster.cluster import DaskCluster
from flows.run.orders import Order, Orders
from flows.run.run_folder import ATTEMPTS
from flows.view.iterations import IterationView
from flows.view.prefect_api import PrefectApi
from rlhf_tasks.protocol.messages import (
    EVENT,
    Aborted,
    Committed,
    Enter,
    Enterable,
    Faulted,
    Finished,
    GaveUp,
    Held,
    IterationRan,
    NodeBegun,
    NodeEnded,
    NotEntered,
    Pause,
    Resume,
    RunSpec,
    StopAfter,
)
from rlhf_tasks.rank.host import Writer
from rlhf_tasks.system.failpoints import Point, at, reach

logger = logging.getLogger(__name__)
ASK_EVERY_S = 5.0  # whether the controller still answers
HOOKS_S = 60.0  # what hooks may take after the last commit
CANCELLED_S = 4.0  # the same where the run is cancelled: a worker of Prefect's kills it 30 s after its signal
ANSWER_S = 60.0  # its event loop waits for nobody, but the interpreter is held while torch is imported


class RunFailed(RuntimeError):
    """The run has ended without its last commit. The message has the cause, and where to continue from."""


class ControllerLost(RunFailed):
    """The attempt has lost its controller or scheduler. Another one can continue from the last commit.

    rebuilds  attempts and rebuilds since the last commit, before this loss
    """

    def __init__(self, what: str, rebuilds: int) -> None:
        super().__init__(what)
        self.rebuilds = rebuilds


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How an attempt ended.

    committed_step  number of committed iterations
    faults          the causes of the rebuilds
    order           CONTINUE: the last iteration is committed; else the order for which the attempt ended at a commit
    again           it ended at a commit for another attempt to begin there (`RunControl.end_at_commit`)
    rebuilds        since the last commit
    """

    committed_step: int
    faults: tuple[str, ...]
    order: Order = Order.CONTINUE
    again: bool = False
    rebuilds: int = 0


class RunControl:
    """Actions of a hook on the run that it watches. They take effect at the first iteration not yet delivered.

    ends_at_commit  the attempt ends at its next commit, and another one begins there
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.ends_at_commit = False

    def stop_after(self, iteration: int) -> None:
        """Make an iteration the last one."""
        self._writer.put(StopAfter(iteration=iteration))

    def end_at_commit(self) -> None:
        """End the attempt at its next commit, for another one to begin there."""
        if not self.ends_at_commit:
            self.ends_at_commit = True
            self._writer.put(Pause())


OnCommit = Callable[[Committed, RunControl], Awaitable[None]]
OnEvent = Callable[[Any], None]


async def run_training(
    spec: RunSpec,
    cluster: DaskCluster,
    *,
    on_commit: OnCommit | None = None,
    api: PrefectApi | None = None,
    on_event: OnEvent | None = None,
    dispatch_ahead: bool = True,
    orders: Orders | None = None,
) -> TrainingResult:
    """Run a plan to its last iteration, from the last commit in the run folder if there is one. Call it in
    a flow.

    spec            the attempt, which gets its number and its ranks here
    on_commit       awaited for each committed iteration, in order, beside the training; its errors are logged. It
                    should be quick: commits that it has not handled are kept, and dropped `HOOKS_S` after the last
                    commit
    api             the connection to Prefect, which the hooks use too
    on_event        called at once with each of the controller's events, whatever the other hooks wait for
    dispatch_ahead  False: an iteration is entered only when the one before is committed, which needs snapshot_every=1
    orders          what the run is to do; default: continue to its last iteration
    Raises ValueError where it could never end, RunFailed with the cause, ControllerLost, and
    `prefect.exceptions.Abort` where it is ordered to END.
    Cancelling the caller ends the run: the cluster is free again within seconds.
    """
    every = spec.limits.snapshot_every
    if not dispatch_ahead and every != 1:
        raise ValueError(
            f"dispatch_ahead=False waits for the commit of each iteration, and snapshot_every={every} does not "
            "commit each. Make it 1."
        )
    ranks = tuple(member.name for member in cluster.ranks[: spec.plan.n_devices])
    spec = spec.model_copy(update={"attempt": next_attempt(Path(spec.run_folder)), "ranks": ranks})
    with at(attempt=spec.attempt):
        reach(Point.ATTEMPT)
    hooks, api, orders = Hooks(on_commit, on_event), api or PrefectApi(spec.run), orders or Orders()
    return await Training(spec, cluster, hooks, api, dispatch_ahead, orders).run()


def next_attempt(run_folder: Path) -> int:
    """The number of a new attempt: 1, 2, ... Attempts at the same moment get different ones."""
    attempts = run_folder / ATTEMPTS
    attempts.mkdir(parents=True, exist_ok=True)
    made = [int(path.name) for path in attempts.iterdir() if path.name.isdecimal()]
    number = 1 + max(made, default=0)
    while True:
        try:
            os.close(os.open(attempts / str(number), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            number += 1
        else:
            return number


@dataclass(frozen=True, slots=True)
class Hooks:
    """What is called beside a training."""

    on_commit: OnCommit | None = None
    on_event: OnEvent | None = None

    def hear(self, event: Any) -> None:
        """Pass an event to the code that shows it; an error there is logged, and training continues."""
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception:
                logger.exception("%s cannot be shown; training continues", event.kind)


class Training:
    """One attempt, seen from its flow."""

    def __init__(
        self,
        spec: RunSpec,
        cluster: DaskCluster,
        hooks: Hooks,
        api: PrefectApi,
        dispatch_ahead: bool,
        orders: Orders,
    ) -> None:
        self.spec = spec
        self.cluster = cluster
        self._view = IterationView(spec, api)
        self._hooks = hooks
        self._dispatch_ahead = dispatch_ahead
        self._in_flight: set[tuple[int, int]] = set()  # iteration, generation; kept without dispatch_ahead
        self._held: Enterable | None = None
        self._orders = orders
        self._faults: list[str] = []
        self._again = False
        self._rebuilds = spec.rebuilds  # since the last commit

    async def run(self) -> TrainingResult:
        """Hold the lease, follow the events, and leave nothing running."""
        lease = {"op": "rlhf_lease", "spec": self.spec.model_dump_json().encode()}
        try:
            comm = await connect(self.cluster.controller.address, **self.cluster.connection_args)
            await comm.write(lease)
        except OSError as error:
            raise ControllerLost(
                f"the controller of run {self.spec.run} is gone: {error}", self._rebuilds
            ) from None
        writer = Writer(comm)
        news: asyncio.Queue[Committed | None] = asyncio.Queue()
        control = RunControl(writer)
        hooks = asyncio.create_task(self._run_hooks(news, control))
        liveness = asyncio.create_task(self._watch_controller(comm))
        try:
            step, order = await self._obey_and_follow(comm, writer, news, control)
            news.put_nowait(None)
            cancelled = order is Order.CANCEL
            _, late = await asyncio.wait([hooks], timeout=CANCELLED_S if cancelled else HOOKS_S)
            if late:
                logger.warning("the hooks take too long; %d events do not reach them", news.qsize())
            if not (cancelled or self._again):  # closing it has a shorter limit, and the devices wait
                await self._view.complete()
        except CommClosedError:
            what = "is gone"
            if liveness.done() and not liveness.cancelled():
                what = f"has not answered for {ANSWER_S:g} s, as if its process was stopped"
            raise ControllerLost(f"the controller of run {self.spec.run} {what}", self._rebuilds) from None
        finally:
            writer.close()
            hooks.cancel()
            liveness.cancel()
            await self._view.close()
        return TrainingResult(step, tuple(self._faults), order, self._again, self._rebuilds)

    async def _obey_and_follow(
        self, comm: Any, writer: Writer, news: asyncio.Queue[Committed | None], control: RunControl
    ) -> tuple[int, Order]:
        """Until the last commit, or the one for which the attempt is to end: its step, and the order."""
        self._orders.hold(None)
        obeying = asyncio.create_task(self._obey(writer, control))
        following = asyncio.create_task(self._follow(comm, writer, news, control))
        try:
            await asyncio.wait({obeying, following}, return_when=asyncio.FIRST_COMPLETED)
            return (following.result(), Order.CONTINUE) if following.done() else obeying.result()
        finally:
            obeying.cancel()
            following.cancel()
            await asyncio.gather(obeying, following, return_exceptions=True)

    async def _obey(self, writer: Writer, control: RunControl) -> tuple[int, Order]:
        """Pass the orders on; ends at the commit, with its step and the order, at which the attempt is to end."""
        orders, passed_on = self._orders, Order.CONTINUE
        while True:
            order = orders.wanted
            if order is Order.END:
                raise Abort(orders.why)
            if order is not passed_on:
                passed_on = order
                if order is Order.CONTINUE:
                    orders.hold(None)
                    writer.put(Resume())
                    if control.ends_at_commit:
                        writer.put(Pause())
                else:
                    writer.put(StopAfter(iteration=0) if order is Order.STOP else Pause())
            if orders.held is not None and order in (Order.RELEASE, Order.LEAVE, Order.CANCEL):
                return orders.held, order
            await orders.news()

    async def _follow(
        self, comm: Any, writer: Writer, news: asyncio.Queue[Committed | None], control: RunControl
    ) -> int:
        """Act on the controller's events until the last commit, or where another attempt begins; its step."""
        while True:
            event = EVENT.validate_json(await comm.read())
            self._hooks.hear(event)
            match event:
                case Enterable() as place:
                    self._enter(place, writer)
                case Held(step=step):
                    leaves = self._orders.wanted in (Order.RELEASE, Order.LEAVE, Order.CANCEL)
                    if control.ends_at_commit and not leaves and self._orders.wanted is not Order.STOP:
                        self._again = True
                        return step
                    if leaves or self._orders.wanted is Order.PAUSE:  # else it was taken back meanwhile
                        self._orders.hold(step)
                case Committed() as committed:
                    self._rebuilds = 0
                    news.put_nowait(committed)
                    self._view.committed(committed.iteration)
                    self._in_flight = {place for place in self._in_flight if place[0] != committed.iteration}
                    if self._held is not None:
                        self._enter(self._held, writer)
                case NodeBegun() | NodeEnded() as node:
                    self._view.node(node)
                case IterationRan() as ran:
                    self._view.ended(ran)
                case Aborted() | NotEntered() as end:
                    self._in_flight.discard((end.iteration, end.generation))
                    self._view.ended(end)
                case Faulted(cause=cause, generation=generation):
                    self._faults.append(str(cause))
                    self._rebuilds += 1
                    logger.warning("generation %d has ended: %s. Rebuilding the ranks.", generation, cause)
                case Finished(step=step):
                    return step
                case GaveUp() as end:
                    raise RunFailed(_ending(end))

    async def _watch_controller(self, comm: Any) -> None:
        """Break the lease when the controller does not answer any more: its connections outlive a hung process."""
        address, arguments = self.cluster.controller.address, self.cluster.connection_args
        answered_s = time.monotonic()
        async with rpc(address, connection_args=arguments) as controller:
            while time.monotonic() - answered_s < ANSWER_S:
                await asyncio.sleep(ASK_EVERY_S)
                with suppress(OSError):  # no answer in time among them
                    await asyncio.wait_for(controller.identity(), ANSWER_S)
                    answered_s = time.monotonic()
        comm.abort()

    def _enter(self, place: Enterable, writer: Writer) -> None:
        """Deliver an iteration, and have it shown."""
        if not self._dispatch_ahead:
            if self._in_flight:
                self._held = place
                return
            self._held = None
            self._in_flight.add((place.iteration, place.generation))
        with at(iteration=place.iteration, generation=place.generation, attempt=self.spec.attempt):
            reach(Point.ENTER)
            writer.put(Enter(iteration=place.iteration, generation=place.generation))
            reach(Point.ENTERED)
        self._view.entered(place.iteration, place.generation)

    async def _run_hooks(self, news: asyncio.Queue[Committed | None], control: RunControl) -> None:
        while (committed := await news.get()) is not None:
            if self._hooks.on_commit is not None:
                try:
                    await self._hooks.on_commit(committed, control)
                except Exception:
                    logger.exception("a hook failed at %s; training continues", committed.kind)


def _ending(end: GaveUp) -> str:
    """Why an attempt has ended, with the traceback of the user's code if that is the cause, and where to continue."""
    step = end.committed_step
    where = "" if step is None else f"{step} iterations are committed; resume to continue from there."
    if end.traceback:
        return f"{end.reason}\n{end.traceback.rstrip()}\nCorrect that. {where}".rstrip()
    return f"{end.reason} {where}".rstrip()
