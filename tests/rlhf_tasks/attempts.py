"""Attempts of a run on a cluster, by a flow without Prefect: begun, and continued when processes were killed."""

import asyncio
import time
from pathlib import Path

from distributed import Client

from prefect_rlhf.flows.cluster.cluster import found_cluster
from prefect_rlhf.rlhf_tasks.protocol.messages import Committed, Faulted, Finished
from tests.rlhf_tasks.fake_flow import follow, run_spec
from tests.rlhf_tasks.settings import STARTUP_S

PATIENCE_S = 400.0


def attend(cluster, spec, **options):
    """The events of a run, whose ranks may have to import torch on a busy machine."""
    return follow(cluster, spec, patience_s=PATIENCE_S, **options)


def spec_of_job(cluster, job, folder, iterations, **options):
    """A run of a prepared job on real ranks, in its own folder."""
    folder.mkdir(exist_ok=True)
    job.rows.keep(folder)
    options = {
        "run": folder.name,
        "config": job.config.model_dump(mode="json"),
        "iterations": iterations,
        "deadline_floor_s": 200.0,
        "executor": "prefect_rlhf.rlhf_tasks.rank.plan_nodes:make_executor",
        "snapshots": "prefect_rlhf.rlhf_tasks.checkpoint.commits:run_snapshots",
        **options,
    }
    return run_spec(cluster, job.plan, folder, **options)


def run_undisturbed(cluster, spec):
    """Carry out a run that nothing disturbs: the folder that it leaves."""
    events = asyncio.run(attend(cluster, spec))
    assert not of_type(events, Faulted)
    assert isinstance(events[-1][1], Finished)
    return Path(spec.run_folder)


def of_type(events, kind):
    return [event for _, event in events if isinstance(event, kind)]


def committed(events):
    return [event.iteration for event in of_type(events, Committed)]


def found(cluster, folder):
    """The cluster as it is now: a controller that died has another address."""
    return found_cluster(cluster.scheduler_address, len(cluster.ranks), folder=folder, deadline_s=STARTUP_S)


def resume(cluster, folder, gone, spec_of):
    """Another attempt, once the workers of the addresses `gone` are known to be dead: its events.

    spec_of  the cluster as it is then -> the attempt
    """
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        while not gone.isdisjoint(client.run_on_scheduler(_workers)):
            time.sleep(0.05)
    with found(cluster, folder) as now:
        return asyncio.run(attend(now, spec_of(now)))


def _workers(dask_scheduler):
    return list(dask_scheduler.workers)
