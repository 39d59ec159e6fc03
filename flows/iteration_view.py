"""What Prefect shows of a run's iterations: a subflow for each, whose tasks are the plan's nodes.

`Training` tells what has happened, and waits for nothing here: the ranks go on whatever Prefect does or does not do.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Any

from prefect import Flow, flow
from prefect.states import Cancelled

from flows.cluster import Cluster
from flows.task_runner import ControllerTaskRunner
from rlhf_tasks.protocol.scheduled_plans import ScheduledPlan, plan_at
from rlhf_tasks.tasks import run_node
from rlhf_tasks.transport import Aborted, Committed, NotEntered, RunSpec

logger = logging.getLogger(__name__)
VIEW_LAG_S = 60.0  # what Prefect's view of an iteration may need after the iteration has ended
RETIRE_S = 5.0  # what subflows get to report their end when the run ends early


class IterationAborted(RuntimeError):
    """An iteration was given up; the message is the cause: rank, call, iteration, error, traceback."""


class IterationView:
    """The subflows of one attempt. Used inside its flow.

    Prefect pickles a subflow with its tasks; this object stays behind (`__reduce__`), since a task needs
    nothing of it.
    """

    def __init__(self, spec: RunSpec, cluster: Cluster) -> None:
        self._spec = spec
        self._cluster = cluster
        self._plans = spec.plans
        self._ends: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._subflows: set[asyncio.Task[Any]] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()

    def entered(self, iteration: int, generation: int) -> None:
        """An iteration has been delivered under a generation."""
        self._ends[iteration, generation] = asyncio.get_running_loop().create_future()
        subflow = asyncio.create_task(self._flow(iteration, generation)())
        self._subflows.add(subflow)
        subflow.add_done_callback(lambda ended: self._subflow_ended(ended, (iteration, generation)))

    def plan_changed(self, planned: ScheduledPlan) -> None:
        """Iterations go by another plan from one of them on."""
        self._plans += (planned,)

    def ended(self, end: Committed | Aborted | NotEntered) -> None:
        """An iteration has ended, under a generation or (committed) whichever it was entered under last."""
        generation = None if isinstance(end, Committed) else end.generation
        for place, future in self._ends.items():
            if place[0] == end.iteration and generation in (None, place[1]) and not future.done():
                future.set_result(end)

    async def complete(self) -> None:
        """The run has ended well: wait until its iterations are shown, for at most `VIEW_LAG_S`."""
        await self._wait(VIEW_LAG_S)

    async def close(self) -> None:
        """Show no more: what has not ended has been aborted."""
        for end in self._ends.values():
            if not end.done():
                end.set_result(Aborted(iteration=-1, generation=-1, cause="the run has ended."))
        await self._wait(RETIRE_S)

    async def _wait(self, seconds: float) -> None:
        """Let the subflows report their ends; those that cannot are cancelled."""
        if self._subflows:
            _, late = await asyncio.wait(self._subflows, timeout=seconds)
            for subflow in late:
                subflow.cancel()

    def _subflow_ended(self, subflow: asyncio.Task[Any], place: tuple[int, int]) -> None:
        """Nobody watches the iteration any more: its end, which holds every rank's results, is forgotten."""
        self._subflows.discard(subflow)
        end = self._ends.get(place)
        if end is not None and end.done():
            del self._ends[place]
        if not subflow.cancelled() and (error := subflow.exception()) is not None:
            logger.info("a subflow has ended: %s", error)

    def _flow(self, iteration: int, generation: int) -> Flow[[], Any]:
        """The subflow of one iteration: flow `ppo-iteration`, run `it-00042`, after a rebuild `it-00042-r1`."""
        rebuilt = f"-r{generation}" if generation else ""
        runner: Any = ControllerTaskRunner(  # Prefect's annotation admits no runner with futures of its own
            self._cluster.scheduler_address,
            self._cluster.controller.address,
            client_kwargs={"security": self._cluster.security},
        )

        @flow(
            name=f"{self._spec.plan.algorithm}-iteration",
            flow_run_name=f"it-{iteration:05d}{rebuilt}",
            task_runner=runner,
            persist_result=False,
            retries=0,
        )
        async def watch() -> Any:
            return await self._watch(iteration, generation)

        return watch

    async def _watch(self, iteration: int, generation: int) -> Any:
        """The body of a subflow: one task per plan node, with the plan's edges; ends as the iteration does.

        Raises IterationAborted with the cause.
        """
        tasks: dict[str, Any] = {}
        for node in plan_at(self._plans, iteration).plan.nodes:
            task = run_node.with_options(name=node.name, task_run_name=f"{node.name}-it{iteration}")
            tasks[node.name] = task.submit(
                self._spec.run,
                iteration,
                generation,
                node.name,
                return_state=False,
                wait_for=[tasks[name] for name in node.after],
            )
        end = await self._ends[iteration, generation]
        finished = await _all_done(list(tasks.values()), VIEW_LAG_S)
        if isinstance(end, Aborted):
            raise IterationAborted(f"{end.cause}\n{end.traceback}".rstrip())
        if isinstance(end, NotEntered):
            return Cancelled(message=end.reason)
        if not finished:
            logger.warning("iteration %d is committed; Prefect's view of it is not complete", iteration)
        return None


async def _all_done(futures: list[Any], seconds: float) -> bool:
    """Wait for Prefect futures on Dask; True when all have ended in time. One that never does holds no thread."""
    loop = asyncio.get_running_loop()
    ends = [loop.create_future() for _ in futures]

    def end(position: int) -> None:
        if not ends[position].done():
            ends[position].set_result(None)

    for position, future in enumerate(futures):
        # Dask calls back on a thread of its own, if need be after this loop has ended.
        def call_back(_: Any, position: int = position) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(end, position)

        future.wrapped_future.add_done_callback(call_back)
    _, late = await asyncio.wait(ends, timeout=seconds)
    return not late
