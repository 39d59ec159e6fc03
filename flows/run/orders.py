"""Orders to a run: pause, continue, stop, end. The latest order counts.

Orders come from the run folder (`prefect-rlhf pause`, `resume`, `stop` and `cancel` leave a file there) and from the
states of the flow run and of those that it is part of, which the UI, `prefect` and Prefect's API set. The flow
process looks at both every few seconds (`LOOK_EVERY_S`, `ASK_EVERY_S`), and writes the state that it has reached back
to Prefect. A server that does not answer changes nothing.

A run that a signal ends is Cancelled in Prefect, at its last commit. Prefect's engine would call it Crashed.
"""

import asyncio
import contextvars
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from pathlib import Path
from typing import NoReturn
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import Abort, Pause, PrefectException, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, Paused, Running, Suspended

from prefect_rlhf.flows.cluster.shutdown import signal_received
from prefect_rlhf.flows.run.run_folder import take_order
from prefect_rlhf.flows.view.prefect_api import PrefectApi

LOOK_EVERY_S = 0.5  # for a file in the run folder
ASK_EVERY_S = 3.0  # the Prefect server, for states
ANSWER_S = 20.0  # it answers within this, or is asked again later
SIGNAL_ANSWER_S = 3.0  # the same after a signal; the process has flows.cluster.shutdown.END_S in all
NO_ANSWER = (HTTPError, PrefectException, TimeoutError, OSError)
FINAL = (StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED)
CALLED = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}

logger = logging.getLogger(__name__)


class Order(Enum):
    """An order to a run. All except END take effect at the next commit."""

    CONTINUE = "continue"
    RENEW = "end at its next commit; another attempt then begins under a better plan"
    PAUSE = "pause at its next commit with its devices kept: models stay loaded, ranks are idle"
    RELEASE = "pause at its next commit with its devices released: the ranks end; resuming starts new ones"
    STOP = "end at its next commit as at its last iteration, with model and summary"
    LEAVE = "end at its next commit, and leave it to Prefect to start the flow run again"
    CANCEL = "end at its next commit as cancelled, without model and summary"
    END = "end at once: Prefect shows it as ended"


ENDINGS = (Order.STOP, Order.LEAVE, Order.CANCEL, Order.END)
"""Orders that cannot be taken back. Only an order further along in this tuple replaces one."""

COMMANDS = {
    "pause": Order.PAUSE,
    "release": Order.RELEASE,
    "resume": Order.CONTINUE,
    "stop": Order.STOP,
    "cancel": Order.CANCEL,
}
"""What may be left in the run folder (`flows.run.run_folder.leave_order`)."""


class Orders:
    """The order that counts, and its progress.

    wanted  the order
    why     who gave it, for messages
    held    the step at which the run is paused; None while it trains, or is still on its way to that commit
    left    id of the flow run's state when the order LEAVE came; a newer state belongs to the process that takes over
    say     tells the user a line
    """

    def __init__(self, say: Callable[[str], None] = logger.info) -> None:
        self.wanted = Order.CONTINUE
        self.why = ""
        self.held: int | None = None
        self.left: UUID | None = None
        self.say = say
        self._news = asyncio.Event()

    def give(self, order: Order, why: str) -> None:
        """Take an order. An order that ends the run is replaced only by one that ends it sooner."""
        if self.wanted in ENDINGS and (
            order not in ENDINGS or ENDINGS.index(order) <= ENDINGS.index(self.wanted)
        ):
            return
        if order is not self.wanted:
            self.wanted, self.why = order, why
            self._news.set()
            self.say(f"the run is to {order.value} ({why})")

    def hold(self, step: int | None) -> None:
        """Note the commit at which the run is held; None: it is no longer held."""
        told, self.held = self.held, step
        self._news.set()
        if step is not None and step != told and self.wanted in (Order.PAUSE, Order.RELEASE):
            self.say(f"paused at commit {step}")

    def renew(self) -> None:
        """Have the attempt end at its next commit, for another one to begin there. Orders of people come first."""
        if self.wanted is Order.CONTINUE:
            self.wanted = Order.RENEW
            self._news.set()

    def begin(self) -> None:
        """Note that an attempt begins."""
        self.held = None
        if self.wanted is Order.RENEW:
            self.wanted = Order.CONTINUE

    async def news(self) -> None:
        """Wait until there is another order, or the run is held. One at a time may wait."""
        await self._news.wait()
        self._news.clear()

    async def released(self) -> Order:
        """Wait until a run whose devices are released is to do something else."""
        while self.wanted in (Order.PAUSE, Order.RELEASE):
            await self.news()
        return self.wanted


@asynccontextmanager
async def watched_orders(folder: Path, flow_run_id: str, say: Callable[[str], None]) -> AsyncIterator[Orders]:
    """The orders to the run of a flow run, from its folder and from Prefect, while the context lasts."""
    orders, ended, loop = Orders(say), threading.Event(), asyncio.get_running_loop()
    context = contextvars.copy_context()  # a thread has none, and `say` writes to the flow run's log

    def give(order: Order, why: str) -> None:
        loop.call_soon_threadsafe(orders.give, order, why, context=context)

    threading.Thread(target=_watch_folder, args=(folder, give, ended), name="orders", daemon=True).start()
    states = asyncio.create_task(StateWatch(UUID(flow_run_id), orders).run())
    try:
        yield orders
    finally:
        ended.set()
        states.cancel()
        await asyncio.gather(states, return_exceptions=True)


# --- the file in the run folder -------------------------------------------------------------------------


def _watch_folder(folder: Path, give: Callable[[Order, str], None], ended: threading.Event) -> None:
    """On a thread: a cluster that starts blocks the event loop."""
    while not ended.wait(LOOK_EVERY_S):
        command = take_order(folder)
        if command in COMMANDS:
            give(COMMANDS[command], f"prefect-rlhf {command}")
        elif command is not None:
            logger.warning("%r in %s is not an order, and is left out", command[:80], folder)


# --- the flow run's states ------------------------------------------------------------------------------


class StateWatch:
    """Turns states that others have set into orders, and shows their effect.

    Watches the flow run and all that it is a subflow of: a pipeline that is paused pauses its stage.
    """

    def __init__(self, flow_run_id: UUID, orders: Orders) -> None:
        self._own = flow_run_id
        self._orders = orders
        self._chain: list[UUID] = []  # the flow run, then what it is part of
        self._flow: UUID | None = None  # of the flow run, once that has been seen
        self._seen: dict[UUID, State] = {}  # flow run -> its newest state that was looked at, or set by us

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                async with get_client() as client:
                    while True:
                        async with asyncio.timeout(ANSWER_S):
                            await self._look(client)
                        await asyncio.sleep(ASK_EVERY_S)
            except NO_ANSWER as error:
                logger.debug("the flow run's state is not known now: %r", error)
            await asyncio.sleep(ASK_EVERY_S)

    async def _look(self, client: PrefectClient) -> None:
        if not self._chain:
            self._chain = await _chain(client, self._own)
        asked = FlowRunFilter(id=FlowRunFilterId(any_=self._chain))
        runs = {run.id: run for run in await client.read_flow_runs(flow_run_filter=asked)}
        if self._own not in runs:
            if self._flow is not None:
                await client.read_flow(
                    self._flow
                )  # not found where the database is a new one: no news of the run
                self._orders.give(Order.END, "its flow run was deleted")
            return
        self._flow = runs[self._own].flow_id
        seen = {run_id: state.id for run_id, state in self._seen.items()}
        news = [(run.state, run) for run in runs.values() if run.state and seen.get(run.id) != run.state.id]
        for state, run in sorted(news, key=lambda new: new[0].timestamp):
            before = self._seen.get(run.id)
            self._seen[run.id] = state
            order = order_of(run)
            if order is Order.CONTINUE and (before is None or not is_pause(before)):
                continue  # it has begun: nobody has resumed it
            if order is not None:
                self._orders.give(order, f"flow run {run.name!r} is {state.name}")
        if self._orders.wanted is Order.LEAVE and self._orders.left is None:
            self._orders.left = self._seen[self._own].id
        for run in runs.values():
            await self._show(client, run)

    async def _show(self, client: PrefectClient, run: FlowRun) -> None:
        """Set the state of a flow run if it differs from what the run does."""
        assert run.state is not None
        shown, step = run.state, self._orders.held
        if self._orders.wanted in (Order.PAUSE, Order.RELEASE) and step is not None and run.id == self._own:
            state = paused_state(run, step, self._orders.wanted)
            if (shown.type, shown.name, shown.message) == (state.type, state.name, state.message):
                return
        elif self._orders.wanted in (Order.CONTINUE, Order.RENEW, Order.STOP) and (
            is_pause(shown) or is_resumed(run)
        ):
            state = Running(message=f"Resumed: {self._orders.why}")
        else:
            return
        result = await client.set_flow_run_state(run.id, state, force=True)
        if result.state is None:
            return
        self._seen[run.id] = result.state
        # Somebody may have set a state since ours was read: ours has replaced it, but it counts.
        history = await client.read_flow_run_states(run.id)
        since = next((place for place, one in enumerate(history) if one.id == shown.id), len(history))
        for missed in history[since + 1 :]:
            order = (
                order_of(run.model_copy(update={"state": missed})) if missed.id != result.state.id else None
            )
            if order is not None:
                self._orders.give(order, f"flow run {run.name!r} was {missed.name}")


async def _chain(client: PrefectClient, flow_run_id: UUID) -> list[UUID]:
    """A flow run, and those that it is a subflow of, from the inside out."""
    chain = [flow_run_id]
    while True:
        run = await client.read_flow_run(chain[-1])
        if run.parent_task_run_id is None:
            return chain
        task = await client.read_task_run(run.parent_task_run_id)
        if task.flow_run_id is None:
            return chain
        chain.append(task.flow_run_id)


def order_of(run: FlowRun) -> Order | None:
    """The order that somebody has given by setting a flow run's state; None: no order.

    Suspended, as the UI's Pause sets it, means that Prefect schedules the flow run again when it is resumed: its
    process leaves. It also leaves after a pause that has given the deployment's slot to others, and if the flow run
    is scheduled again already. Without a deployment nobody starts the flow run again: its process stays, and
    continues.
    """
    state = run.state
    assert state is not None
    if state.type is StateType.PAUSED:
        if run.deployment_id is None:
            return Order.RELEASE if state.state_details.pause_reschedule else Order.PAUSE
        return Order.LEAVE if state.state_details.pause_reschedule or holds_slot(state) else Order.PAUSE
    if state.type is StateType.CANCELLING:
        return Order.CANCEL
    if is_resumed(run):
        return Order.CONTINUE
    if state.type in (StateType.SCHEDULED, StateType.PENDING):
        return Order.LEAVE
    if state.type is StateType.RUNNING and not is_pause(state):
        return Order.CONTINUE
    return Order.END if state.type in FINAL else None


def is_pause(state: State) -> bool:
    """Whether a flow run is shown as paused: with the slot of its deployment kept, by the name alone."""
    return state.type is StateType.PAUSED or state.name == "Paused"


def is_resumed(run: FlowRun) -> bool:
    """Whether a suspended flow run was resumed that only its own process can continue."""
    assert run.state is not None
    return run.deployment_id is None and run.state.type in (StateType.SCHEDULED, StateType.PENDING)


def paused_state(run: FlowRun, step: int, order: Order) -> State[None]:
    """The state in which Prefect should show a paused run.

    A run that has a slot of its deployment's concurrency limit, and keeps its devices, keeps the slot too. Then the
    state is of type Running, since Prefect takes the slot away in any other state.
    """
    assert run.state is not None
    devices = "kept" if order is Order.PAUSE else "released"
    message = f"at commit {step}; devices are {devices}"
    if order is Order.PAUSE and holds_slot(run.state):
        return State(type=StateType.RUNNING, name="Paused", message=message)
    state: State[None] = Paused()
    if run.state.type is StateType.PAUSED:  # its time limit counts
        details = run.state.state_details.model_copy(update={"pause_reschedule": False})
        state = state.model_copy(update={"state_details": details})
    return state.model_copy(update={"message": message})


async def leave_to_prefect(flow_run_id: str, step: int, left: UUID | None) -> NoReturn:
    """Leave the flow run as suspended: the process ends, and Prefect starts it again when it is resumed. Raises
    `prefect.exceptions.Pause`, which the flow is to let pass.

    left  the flow run's state when the order came; a flow run that runs in a later state was started again already
    """
    state: State[None] = Paused()
    try:
        async with asyncio.timeout(ANSWER_S), get_client() as client:
            run = await client.read_flow_run(UUID(flow_run_id))
            shown = run.state
            if shown is not None and (
                shown.type is StateType.PAUSED or (shown.type is StateType.RUNNING and shown.id == left)
            ):
                state = Paused() if run.deployment_id is None else Suspended()
                details = state.state_details
                if shown.type is StateType.PAUSED:
                    limit = {"pause_timeout": shown.state_details.pause_timeout}
                    details = details.model_copy(update=limit)
                message = f"at commit {step}; devices are released"
                state = state.model_copy(update={"state_details": details, "message": message})
                await client.set_flow_run_state(run.id, state, force=True)
    except NO_ANSWER as error:  # it is suspended all the same
        logger.warning("Prefect does not show that the run has left at commit %d: %r", step, error)
    raise Pause(state=state)


def holds_slot(state: State) -> bool:
    """Whether a flow run in a state has, or had until this state, a slot of its deployment's concurrency limit."""
    return state.state_details.deployment_concurrency_lease_id is not None


# --- signals ---


class Interrupted(Abort):
    """A signal has ended the run. Prefect's engine shows `state` as the flow run's, and writes none of its own.

    number      of the signal
    flow_run_id  the flow run that was told to end; those that it is part of end with it
    """

    def __init__(self, number: signal.Signals, state: State[None], flow_run_id: str) -> None:
        super().__init__(state.message)
        self.number, self.state, self.flow_run_id = number, state, flow_run_id


@asynccontextmanager
async def cancelled_by_signals(where: Callable[[], str]) -> AsyncIterator[None]:
    """For the body of a flow: when Ctrl-C or SIGTERM has ended it, shows it as Cancelled and raises Interrupted.

    where  how far the run has come, for the state's message
    A flow run of a worker's stays Crashed: whoever ends its process does not mean the run, which
    deployments/automations.yaml starts again.
    """
    if os.environ.get("PREFECT__FLOW_RUN_ID"):
        yield
        return
    try:
        with terminated_as_cancelled():
            yield
    except Interrupted as inner:
        if inner.flow_run_id != flow_run.id:
            await _show(inner.state)
        raise
    except (asyncio.CancelledError, TerminationSignal):
        number = signal_received()
        if number is None:
            raise
        state: State[None] = Cancelled(message=f"{where()}; ended by {CALLED[number]}")
        await _show(state)
        raise Interrupted(number, state, flow_run.id or "") from None


@contextmanager
def terminated_as_cancelled() -> Iterator[None]:
    """Inside, SIGTERM cancels the current task, as asyncio has Ctrl-C do. Prefect's handler would raise wherever the
    main thread is: then the event loop ends, and nobody is left to show the iterations' ends.

    Does nothing outside the main thread.
    """
    task = asyncio.current_task()
    if task is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: task.cancelling() or task.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def _show(state: State[None]) -> None:
    """Set this flow run's state, if the server answers in time."""

    async def write() -> None:
        async with get_client() as client:
            await client.set_flow_run_state(UUID(flow_run.id), state, force=True)

    await PrefectApi(flow_run.name or "").show(write, SIGNAL_ANSWER_S)
