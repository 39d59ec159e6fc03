"""The training of a run: attempts, one after another, and an attempt as its flow sees it.

An attempt enters an iteration as soon as the controller says that it may be entered (docs/explanation/protocol.md,
delivery): it tells the controller, which delivers it, and the iteration's view (flows/view/iterations.py).
Whatever Prefect does or does not do meanwhile, the ranks continue.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed.comm import CommClosedError
from distributed.core import connect, rpc
from prefect.exceptions import Abort

from prefect_rlhf.flows.cluster.cluster import (
    ClusterError,
    DaskCluster,
    Member,
    another_rank,
    found_cluster,
    local_cluster,
    slots_of,
)
from prefect_rlhf.flows.cluster.this_machine import gpus_here
from prefect_rlhf.flows.run.device_loss import parts_left, smaller_plan
from prefect_rlhf.flows.run.orders import ENDINGS, Order, Orders
from prefect_rlhf.flows.run.planning import hardware_of, users_seconds
from prefect_rlhf.flows.run.prepare import Prepared
from prefect_rlhf.flows.run.progress import RunView
from prefect_rlhf.flows.run.replanning import Replanning
from prefect_rlhf.flows.run.run_folder import ATTEMPTS
from prefect_rlhf.flows.view.iterations import IterationView
from prefect_rlhf.flows.view.prefect_api import PrefectApi
from prefect_rlhf.flows.view.terminal import entering
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from prefect_rlhf.rlhf_tasks.algorithms.held_out import HELD_OUT
from prefect_rlhf.rlhf_tasks.checkpoint.commits import newest_step
from prefect_rlhf.rlhf_tasks.protocol.messages import (
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
from prefect_rlhf.rlhf_tasks.rank.host import Writer
from prefect_rlhf.rlhf_tasks.system.durable import replace_file
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, at, reach
from prefect_rlhf.rlhf_tasks.system.reading import read_json, reading

logger = logging.getLogger(__name__)
RESTARTS = "restarts.json"
ASK_EVERY_S = 5.0  # whether the controller still answers
ANSWER_S = 60.0  # its event loop waits for nobody, but the interpreter is held while torch is imported


class RunFailed(RuntimeError):
    """The run has ended without its last commit. The message has the cause, and where to continue from."""


class DevicesLost(RunFailed):
    """The attempt has ended because ranks were not there in time.

    why       which, and for how long they were awaited
    names     of their workers
    rebuilds  since the last commit
    """

    def __init__(self, end: GaveUp, names: frozenset[str], rebuilds: int) -> None:
        super().__init__(_ending(end))
        self.why, self.names, self.rebuilds = end.reason, names, rebuilds


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
    rebuilds        since the last commit
    """

    committed_step: int
    faults: tuple[str, ...]
    order: Order = Order.CONTINUE
    rebuilds: int = 0


class Attempts:
    """The attempts of a run, one after the other. When a controller or a scheduler is lost, devices were released, or
    the plan changes, the next attempt continues from the last commit; with `on_device_loss: shrink` also when ranks
    are lost, and when they are back.

    Attempts that end without a commit are counted together with rebuilds.

    blocks  Prefect Secret block that rewards name -> its value
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: Path,
        blocks: Mapping[str, str],
        view: RunView,
        orders: Orders,
        replanning: Replanning,
        restarts: "Restarts",
    ) -> None:
        self._prepared, self._folder, self._blocks = prepared, folder, dict(blocks)
        self._view, self._orders = view, orders
        self._replanning, self._restarts = replanning, restarts
        self._slots: list[Member | None] = []  # [devices of the whole cluster] the rank of each that is there
        self._returned = ""  # the name of a worker that is back, and that the present plan does without
        self._seen: set[str] = (
            set()
        )  # names of the workers of the cluster, also of those that no plan can use
        self._vain: set[str] = set()  # names of workers whose return has not given the run more devices
        self._returned_at: int | None = None  # the commit at which it was taken
        self._useless: set[str] = set()  # names of workers that came back and were lost again at once

    async def run(self, rebuilds: int) -> Order:
        """Until the run has reached its last iteration (CONTINUE, or STOP before that), or ends for another order.

        rebuilds  how many there were since the last commit, before this process
        """
        again = False
        while True:
            try:
                result = await self._on_a_cluster(rebuilds, again)
            except (ControllerLost, DevicesLost) as lost:
                wanted = self._orders.wanted
                if wanted is Order.END:
                    raise Abort(self._orders.why) from None
                if wanted in ENDINGS and (wanted is not Order.STOP or newest_step(self._folder)):
                    return wanted  # which is at the last commit: nothing is gained by another attempt
                if isinstance(lost, DevicesLost):
                    raise
                rebuilds, again = lost.rebuilds + 1, True
                self._restarts.count(rebuilds, str(lost))
                self._view.say(f"{lost}: a new attempt begins at the last commit")
                continue
            order = result.order
            if order is Order.RENEW:  # on a cluster that is found, or begun, anew
                rebuilds, again = result.rebuilds, False
                continue
            if order is Order.RELEASE:
                order = await self._orders.released()
                if order is Order.CONTINUE or (order is Order.STOP and not newest_step(self._folder)):
                    rebuilds, again = 0, False
                    self._restarts.count(rebuilds, "")
                    continue
                if order is Order.END:
                    raise Abort(self._orders.why)
            self._restarts.forget()
            return order

    async def _on_a_cluster(self, rebuilds: int, again: bool) -> TrainingResult:
        """An attempt on a cluster; where it ends for a change of plan, the next one on the same cluster."""
        self._view.starting()
        await self._change_plan()
        needs, least = self._replanning.expectation.needs, self._least()
        with entering(
            "cluster", cluster_of(self._prepared.config, self._folder, needs, again, least), self._view.say
        ) as cluster:
            cluster = await self._fit_to(cluster)
            while True:
                try:
                    result = await self._attempt(cluster, rebuilds)
                except DevicesLost as lost:
                    if self._prepared.config.on_device_loss != "shrink" or self._orders.wanted in ENDINGS:
                        raise
                    rebuilds, cluster = lost.rebuilds, await self._without(cluster, lost)
                    continue
                if result.order is not Order.RENEW:
                    return result
                rebuilds = result.rebuilds
                await self._change_plan()
                # The order came after the attempt had ended.
                if self._orders.wanted in (Order.RELEASE, Order.LEAVE, Order.CANCEL):
                    self._orders.hold(result.committed_step)
                    return replace(result, order=self._orders.wanted)
                if self._returned:
                    return result

    def _least(self) -> int | None:
        """Ranks with which a run that may shrink is content at once; None where it needs all."""
        config = self._prepared.config
        if config.on_device_loss != "shrink" or newest_step(self._folder) is None:
            return None
        return self._replanning.present.plan.n_devices

    async def _fit_to(self, cluster: DaskCluster) -> DaskCluster:
        """The cluster whose ranks are those of the present plan, which is another one where ranks are missing or are
        back. Raises RunFailed."""
        place, replanning = self._prepared.config.cluster, self._replanning
        if self._prepared.config.on_device_loss == "shrink":
            ranks = [rank for rank in cluster.ranks if rank.name not in self._useless]
            slots = slots_of(ranks, place.n_hosts, place.per_host)
            returned, self._returned = self._returned, ""
            more = bool(returned) and slots.count(None) < self._slots.count(None)
            if more:
                self._returned_at = newest_step(self._folder) or 0
            elif returned:
                self._vain.add(returned)
            self._slots, self._seen = slots, {rank.name for rank in cluster.ranks}
            if None in slots:
                return await self._shrunk(
                    cluster, "devices are back" if more else "workers are missing", more
                )
        if replanning.present.plan.n_devices < place.n_devices:
            with _logged():
                await replanning.return_to_all(newest_step(self._folder) or 0)
            self._view.plan_changed(replanning.present.plan)
        return cluster

    async def _without(self, cluster: DaskCluster, lost: DevicesLost) -> DaskCluster:
        """The cluster without lost ranks, with a plan for the others. Raises RunFailed."""
        if self._returned_at == (newest_step(self._folder) or 0):
            self._useless |= lost.names
        self._seen -= lost.names
        self._vain -= lost.names
        self._slots = [None if rank is None or rank.name in lost.names else rank for rank in self._slots]
        return await self._shrunk(cluster, lost.why)

    async def _shrunk(self, cluster: DaskCluster, why: str, more: bool = False) -> DaskCluster:
        """The part of a cluster that a plan uses. The present plan stays where a part of its size is left, unless
        there are `more` devices than it was made for. Raises RunFailed."""
        config, present = self._prepared.config, self._replanning.present.plan
        parts = parts_left([rank is not None for rank in self._slots], config.cluster.per_host)
        size = Cluster(present.n_devices // present.devices_per_host, present.devices_per_host)
        part = None if more else next((part for part in parts if part.cluster == size), None)
        if part is None:
            self._view.say(f"{why}: searching for a plan for the devices that are left")
            step = newest_step(self._folder) or 0
            try:
                part, plan, problem, _ = await asyncio.to_thread(smaller_plan, config, parts)
            except ConfigError as error:
                raise RunFailed(
                    f"{why}, and there is no plan for the devices that are left: {error} {step} iterations are "
                    "committed; resume to continue from there when the devices are back."
                ) from None
            why = f"{why}: {plan.n_devices} of {config.cluster.n_devices} devices"
            with _logged():
                await self._replanning.follow(step, plan, problem, why)
            self._view.plan_changed(plan)
        ranks = [self._slots[slot] for slot in part.slots]
        return replace(cluster, ranks=tuple(rank for rank in ranks if rank is not None))

    async def _change_plan(self) -> None:
        """Change to the better plan, if one was found."""
        step = newest_step(self._folder)
        if step is not None and await self._replanning.take(step):
            self._view.plan_changed(self._replanning.present.plan)

    async def _attempt(self, cluster: DaskCluster, rebuilds: int) -> TrainingResult:
        prepared, config = self._prepared, self._prepared.config
        plan, expected = self._replanning.present.plan, self._replanning.expectation
        self._view.loading()
        self._replanning.cost.begins(time.monotonic())
        spec = RunSpec(
            run=self._folder.name,
            plan=plan,
            config=config.model_dump(mode="json"),
            run_folder=str(self._folder),
            iterations=prepared.iterations,
            limits=config.limits,
            rebuilds=rebuilds,
            predicted_s=expected.price.longest_s,
            users_s=users_seconds(config, plan, len(prepared.held_out.get(HELD_OUT, ()))),
            peak_flops_per_s=expected.peak_flops_per_s,
            blocks=self._blocks,
        )
        watch = asyncio.create_task(self._watch_for_return(cluster))
        try:
            return await run_training(
                spec, cluster, on_event=self._hear, api=self._view.api, orders=self._orders
            )
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch_for_return(self, cluster: DaskCluster) -> None:
        """End the attempt at its next commit when devices that it does without are back."""
        if None not in self._slots:
            return
        self._returned = await another_rank(cluster, self._seen | self._useless | self._vain)
        self._view.say("a lost device is back: the run takes it at the next commit")
        self._orders.renew()

    def _hear(self, event: Any) -> None:
        """Show an event of the controller, and judge the plan by it."""
        self._replanning.on_event(event)
        if self._replanning.better is not None or self._returned:
            self._orders.renew()
        self._view.on_event(event)


@contextmanager
def _logged() -> Iterator[None]:
    """Raises RunFailed where a new plan cannot be priced or written down."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise RunFailed(
            f"the new plan could not be priced or written to the log of plans: {error}"
        ) from error


class Restarts:
    """The count of attempts and rebuilds since the newest commit, which `max_restarts` bounds, also across
    processes of one flow run that Prefect starts again: the run folder has it."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most

    def begin(self, started_again: bool) -> int:
        """Count a process that takes the run up. Returns the count. Raises RunFailed when it is one too many.

        started_again  by Prefect: its process before was killed, or left
        """
        if not started_again:
            self.forget()
        count = self._so_far() + 1 if started_again else 0
        self.count(count, "its process has ended")
        return count

    def count(self, count: int, why: str) -> None:
        """Write down that an attempt begins. Raises RunFailed when it is one too many."""
        if count > self._most:
            self.forget()
            raise RunFailed(
                f"{why} (after max_restarts={self._most} restarts without a commit in between). Resume to "
                "continue from the last commit."
            )
        record = {"step": newest_step(self._folder), "rebuilds": count}
        replace_file(self._folder / RESTARTS, json.dumps(record) + "\n")

    def forget(self) -> None:
        """Delete the count, so that the next process begins at 0."""
        (self._folder / RESTARTS).unlink(missing_ok=True)

    def _so_far(self) -> int:
        """The count so far; -1 if the process before this one has ended properly, 0 for a damaged record."""
        path = self._folder / RESTARTS
        if not path.exists():
            return -1
        try:
            with reading(path, "no count of restarts"):
                record = read_json(path)
                return int(record["rebuilds"]) if record["step"] == newest_step(self._folder) else 0
        except ConfigError:
            return 0


@contextmanager
def cluster_of(
    config: RunConfig,
    folder: Path,
    needs: Mapping[int, float] | None = None,
    again: bool = False,
    least: int | None = None,
) -> Iterator[DaskCluster]:
    """The cluster that a configuration names, or one of our own on this machine, which has all its ranks.

    again  this process has lost it
    least  as `form_cluster` takes it
    needs  rank -> bytes of tensors by the plan, which a cluster found by address must have room for
    """
    place = config.cluster
    if place.address is not None:
        with found_cluster(
            place.address,
            place.n_devices,
            folder=folder,
            devices_per_host=place.per_host,
            deadline_s=config.startup_s,
            assumed=None if config.planning.device else hardware_of(config).classes.profile(0),
            needs=needs,
            again=again,
            least=least,
        ) as cluster:
            yield cluster
    else:
        gpus = gpus_here()
        if 0 < len(gpus) < place.n_devices:
            raise ClusterError(
                f"cluster.n_hosts={place.n_hosts} x devices_per_host={place.per_host} are {place.n_devices} "
                f"ranks; this machine has {len(gpus)} visible GPUs ({', '.join(gpus)}). Ask for fewer, or name a "
                "larger cluster by cluster.address."
            )
        with local_cluster(
            place.n_devices,
            gpus=gpus,
            folder=folder / "scratch",
            deadline_s=config.startup_s,
        ) as cluster:
            yield cluster


async def run_training(
    spec: RunSpec,
    cluster: DaskCluster,
    *,
    on_event: Callable[[Any], None] = lambda event: None,
    api: PrefectApi | None = None,
    orders: Orders | None = None,
) -> TrainingResult:
    """Run a plan to its last iteration, from the last commit in the run folder if there is one. Call it in
    a flow.

    spec      the attempt, which gets its number and its ranks here
    on_event  called at once with each of the controller's events, in order; it waits for nothing, and its errors are
              logged
    api       the connection to Prefect
    orders    what the run is to do; default: continue to its last iteration
    Raises RunFailed with the cause, ControllerLost, and `prefect.exceptions.Abort` where it is ordered to END.
    Cancelling the caller ends the run: the cluster is free again within seconds.
    """
    ranks = tuple(member.name for member in cluster.ranks[: spec.plan.n_devices])
    spec = spec.model_copy(update={"attempt": next_attempt(Path(spec.run_folder)), "ranks": ranks})
    with at(attempt=spec.attempt):
        reach(Point.ATTEMPT)
    return await Training(spec, cluster, on_event, api or PrefectApi(spec.run), orders or Orders()).run()


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


class Training:
    """One attempt, seen from its flow."""

    def __init__(
        self,
        spec: RunSpec,
        cluster: DaskCluster,
        on_event: Callable[[Any], None],
        api: PrefectApi,
        orders: Orders,
    ) -> None:
        self._spec, self._cluster = spec, cluster
        self._view = IterationView(spec, api)
        self._on_event, self._orders = on_event, orders
        self._faults: list[str] = []
        self._rebuilds = spec.rebuilds  # since the last commit

    async def run(self) -> TrainingResult:
        """Hold the lease, follow the events, and leave nothing running."""
        lease = {"op": "rlhf_lease", "spec": self._spec.model_dump_json().encode()}
        try:
            comm = await connect(self._cluster.controller.address, **self._cluster.connection_args)
            await comm.write(lease)
        except OSError as error:
            raise ControllerLost(
                f"the controller of run {self._spec.run} is gone: {error}", self._rebuilds
            ) from None
        writer = Writer(comm)
        liveness = asyncio.create_task(self._watch_controller(comm))
        try:
            step, order = await self._obey_and_follow(comm, writer)
            # Closing the view has a shorter limit; the devices wait meanwhile.
            if order not in (Order.CANCEL, Order.RENEW):
                await self._view.complete()
        except CommClosedError:
            what = "is gone"
            if liveness.done() and not liveness.cancelled():
                what = f"has not answered for {ANSWER_S:g} s, as if its process were stopped"
            raise ControllerLost(f"the controller of run {self._spec.run} {what}", self._rebuilds) from None
        finally:
            writer.close()
            liveness.cancel()
            await self._view.close()
        return TrainingResult(step, tuple(self._faults), order, self._rebuilds)

    async def _obey_and_follow(self, comm: Any, writer: Writer) -> tuple[int, Order]:
        """Until the last commit, or the one for which the attempt is to end: its step, and the order."""
        self._orders.begin()
        obeying = asyncio.create_task(self._obey(writer))
        following = asyncio.create_task(self._follow(comm, writer))
        try:
            await asyncio.wait({obeying, following}, return_when=asyncio.FIRST_COMPLETED)
            return (following.result(), Order.CONTINUE) if following.done() else obeying.result()
        finally:
            obeying.cancel()
            following.cancel()
            await asyncio.gather(obeying, following, return_exceptions=True)

    async def _obey(self, writer: Writer) -> tuple[int, Order]:
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
                else:
                    writer.put(StopAfter(iteration=0) if order is Order.STOP else Pause())
            if orders.held is not None and order in (Order.RENEW, Order.RELEASE, Order.LEAVE, Order.CANCEL):
                return orders.held, order
            await orders.news()

    async def _follow(self, comm: Any, writer: Writer) -> int:
        """Act on the controller's events until the last commit; its step."""
        while True:
            event = EVENT.validate_json(await comm.read())
            try:
                self._on_event(event)
            except Exception:
                logger.exception("%s cannot be shown; training continues", event.kind)
            match event:
                case Enterable() as place:
                    self._enter(place, writer)
                case Held(step=step):
                    # With CONTINUE or STOP, the order to hold was taken back meanwhile.
                    if self._orders.wanted not in (Order.CONTINUE, Order.STOP):
                        self._orders.hold(step)
                case Committed(iteration=iteration):
                    self._rebuilds = 0
                    self._view.committed(iteration)
                case NodeBegun() | NodeEnded() as node:
                    self._view.node(node)
                case IterationRan() | Aborted() | NotEntered() as end:
                    self._view.ended(end)
                case Faulted(cause=cause, generation=generation):
                    self._faults.append(str(cause))
                    self._rebuilds += 1
                    logger.warning("generation %d has ended: %s. Rebuilding the ranks.", generation, cause)
                case Finished(step=step):
                    return step
                case GaveUp(missing=missing) as end:
                    if missing:
                        names = frozenset(self._spec.ranks[rank] for rank in missing)
                        raise DevicesLost(end, names, self._rebuilds)
                    raise RunFailed(_ending(end))

    async def _watch_controller(self, comm: Any) -> None:
        """Break the lease when the controller does not answer any more: its connections outlive a hung process."""
        address, arguments = self._cluster.controller.address, self._cluster.connection_args
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
        with at(iteration=place.iteration, generation=place.generation, attempt=self._spec.attempt):
            reach(Point.ENTER)
            writer.put(Enter(iteration=place.iteration, generation=place.generation))
            reach(Point.ENTERED)
        self._view.entered(place.iteration, place.generation)


def _ending(end: GaveUp) -> str:
    """Why an attempt has ended, with the traceback of the user's code if that is the cause, and where to continue."""
    step = end.committed_step
    where = "" if step is None else f"{step} iterations are committed; resume to continue from there."
    if end.traceback:
        return f"{end.reason}\n{end.traceback.rstrip()}\nCorrect that. {where}".rstrip()
    return f"{end.reason.removesuffix('.')}. {where}".rstrip()
