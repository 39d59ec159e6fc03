"""A run that a signal ends is Cancelled in Prefect, at its last commit. Prefect's engine would call it Crashed."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled

from flows.cluster.shutdown import signal_received
from flows.view.prefect_api import PrefectApi

ANSWER_S = 3.0  # of the server; the process has flows.cluster.shutdown.END_S in all
CALLED = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interrupted(Abort):
    """A signal has ended the run. Prefect's engine takes `state` for the flow run's, and writes none of its own.

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

    await PrefectApi(flow_run.name or "").show(write, ANSWER_S)
