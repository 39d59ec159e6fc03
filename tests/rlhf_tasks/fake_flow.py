"""A flow without Prefect: takes the lease, enters what may be entered, and records the events."""

import asyncio
import pickle
import time
from pathlib import Path

from distributed.core import connect, rpc

from prefect_rlhf.rlhf_tasks.protocol.messages import (
    EVENT,
    Enter,
    Enterable,
    Finished,
    GaveUp,
    Held,
    Pause,
    RunSpec,
)
from tests.rlhf_tasks.settings import with_limits


def run_spec(cluster, plan, folder: Path, **options) -> RunSpec:
    options = {
        "run": "fake",
        "attempt": 1,
        "config": {},
        "iterations": 5,
        "executor": "tests.rlhf_tasks.fake_rank:make_executor",
        "snapshots": "tests.rlhf_tasks.fake_rank:make_snapshots",
        **options,
    }
    names = tuple(member.name for member in cluster.ranks[: plan.n_devices])
    return RunSpec(ranks=names, plan=plan, run_folder=str(folder), **with_limits(options))


async def open_lease(cluster, spec: RunSpec):
    comm = await connect(cluster.controller.address, **cluster.connection_args)
    await comm.write({"op": "rlhf_lease", "spec": spec.model_dump_json().encode()})
    return comm


async def follow(
    cluster, spec: RunSpec, until=(Finished, GaveUp, Held), patience_s: float = 300, pause_at=None
):
    """Events up to the first of `until`, each with its time since the lease was taken; a longer silence fails.

    pause_at  a pause is ordered when that iteration may be entered in generation 0
    Returns when the controller has let the ranks go: another run may follow at once.
    """
    comm = await open_lease(cluster, spec)
    start, events = time.monotonic(), []
    try:
        while not events or not isinstance(events[-1][1], until):
            event = EVENT.validate_json(await asyncio.wait_for(comm.read(), patience_s))
            events.append((time.monotonic() - start, event))
            if isinstance(event, Enterable):
                if (event.iteration, event.generation) == (pause_at, 0):
                    await comm.write(Pause().model_dump_json().encode())
                enter = Enter(iteration=event.iteration, generation=event.generation)
                await comm.write(enter.model_dump_json().encode())
    finally:
        comm.abort()
    await _let_go(cluster, spec)
    return events


async def _let_go(cluster, spec: RunSpec) -> None:
    """Wait until the controller does not serve an attempt any more, which it does for as long as a commit takes."""
    asked = {"function": pickle.dumps(_serves), "args": pickle.dumps((spec.run, spec.attempt))}
    async with rpc(cluster.controller.address, connection_args=cluster.connection_args) as controller:
        while (await controller.run(**asked))["result"]:
            await asyncio.sleep(0.05)


def _serves(run: str, attempt: int, dask_worker) -> bool:
    """On the controller: whether it is this attempt that it serves. (Members may share a process with others.)"""
    served = dask_worker.handlers["rlhf_lease"].__self__._attempt
    return served is not None and (served.spec.run, served.spec.attempt) == (run, attempt)
