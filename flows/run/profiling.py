"""Measured profiles: a separate run on the run's cluster, whose nodes time layers and collectives.

Its figures go to a cache in the output folder. Plans of runs with these models read them there.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import Any

from prefect import flow

from flows.cluster.forks import refuse_unguarded_script
from flows.cluster.server import prefect_server
from flows.cluster.shutdown import ending_in_time
from flows.run.orders import cancelled_by_signals
from flows.run.planning import (
    grid_of,
    hardware_of,
    measured_folders,
    on_ranks,
    only_device,
    problem_of,
    profile_folder,
    rank_counts,
    typed,
)
from flows.run.training import cluster_of, run_training
from planner.pricing.figures import MeasuredProfile, store
from rlhf_tasks.algorithms.configurations import RunConfig
from rlhf_tasks.profiling.measurements import Measurements, ProfileSpec, pieces_of, profile_plan
from rlhf_tasks.protocol.messages import Committed, RunSpec
from rlhf_tasks.spec import NodeResult

PIECE_DEADLINE_S = 900.0  # of one model under one tp degree


@flow(name="rlhf-profile", persist_result=False)
async def rlhf_profile(config: RunConfig) -> list[str]:
    """Measure the models of a configuration on its cluster, in minutes, on each number of ranks that a run of it may
    have. Returns the profiles' files."""
    refuse_unguarded_script()
    async with cancelled_by_signals(lambda: "before the last measurement"):
        return [
            str(store(profile, profile_folder(config)))
            for number in rank_counts(config)
            for profile in await measure_profiles(on_ranks(config, number))
        ]


async def measure_profiles(config: RunConfig) -> list[MeasuredProfile]:
    """One profile for each shape among a configuration's models, on its stated ranks. Called inside a flow.

    Raises ConfigError for inline models, several device classes and a cluster that does not fit, RunFailed when the
    measuring run fails.
    """
    hardware = hardware_of(config)
    device = only_device(hardware)
    config = typed(config, hardware.classes)
    workload = problem_of(config, hardware).model.workload
    folders = measured_folders(config)
    n_devices, per_host = config.cluster.n_devices, config.cluster.per_host
    pieces = pieces_of({f: grid_of(config, workload, s) for s, f in folders.items()}, n_devices, per_host)
    spec = ProfileSpec(dtype=config.dtype, devices_per_host=per_host, pieces=pieces)
    folder = profile_folder(config) / f"run-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    folder.mkdir(parents=True)
    results: dict[str, Sequence[NodeResult]] = {}
    limits = {"deadline_floor_s": PIECE_DEADLINE_S, "max_restarts": 0, "snapshot_every": 1}

    def on_event(event: Any) -> None:
        if isinstance(event, Committed):
            results.update(event.results)

    with (
        ending_in_time(asyncio.current_task()),
        prefect_server(folder),
        cluster_of(config, folder) as cluster,
    ):
        run = RunSpec(
            run=folder.name,
            plan=profile_plan(pieces, n_devices, per_host),
            config=spec.model_dump(mode="json"),
            run_folder=str(folder),
            iterations=1,
            limits=config.limits.model_copy(update=limits),
            executor="rlhf_tasks.profiling.measure:make_executor",
            snapshots="rlhf_tasks.profiling.measurements:NoSnapshots",
        )
        await run_training(run, cluster, on_event=on_event)
    shared = [m for node, piece in pieces.items() if piece.folder == "" for m in _measured(results[node])]
    dispatch_s = dispatch_of(results, [node for node, piece in pieces.items() if piece.kind == "idle"])
    return [
        MeasuredProfile.of(
            device.name,
            config.cluster.n_hosts,
            per_host,
            shape,
            workload.itemsize,
            [
                *shared,
                *(m for node, piece in pieces.items() if piece.folder == f for m in _measured(results[node])),
            ],
            dispatch_s,
        )
        for shape, f in folders.items()
    ]


def dispatch_of(results: Mapping[str, Sequence[NodeResult]], idle: Sequence[str]) -> float:
    """Median seconds on a rank from one node without work to the next: what a node's dispatch costs."""
    ends = [{r.rank: (r.started_s, r.ended_s) for r in results[node]} for node in idle]
    return median(
        max(after[rank][0] - before[rank][1], 0.0) for before, after in pairwise(ends) for rank in after
    )


def _measured(results: Sequence[NodeResult]) -> list[Measurements]:
    return [Measurements.model_validate(result.details) for result in results]
