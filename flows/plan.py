"""Flows that train nothing: `plan` searches an execution plan, `rlhf-profile` measures what plans are priced by."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from pydantic import Field

from prefect_rlhf.blocks.plan import StoredPlan
from prefect_rlhf.flows.cluster.forks import refuse_unguarded_script
from prefect_rlhf.flows.cluster.server import prefect_server
from prefect_rlhf.flows.cluster.shutdown import ending_in_time
from prefect_rlhf.flows.run.downloads import fetched
from prefect_rlhf.flows.run.orders import cancelled_by_signals
from prefect_rlhf.flows.run.planning import (
    compare,
    decided,
    grid_of,
    hardware_of,
    limits_of,
    measured_folders,
    on_ranks,
    only_device,
    problem_of,
    profile_folder,
    rank_counts,
    typed,
)
from prefect_rlhf.flows.run.training import cluster_of, run_training
from prefect_rlhf.flows.view import artifacts
from prefect_rlhf.flows.view.forms import Form
from prefect_rlhf.planner.pricing.figures import MeasuredProfile, store
from prefect_rlhf.planner.report import extrapolation, plan_document, rejected_alternatives, result_document
from prefect_rlhf.planner.search.search import SearchResult, find_plan
from prefect_rlhf.rlhf_tasks.algorithms.configurations import OfAnyAlgorithm, RunConfig, resolve_paths
from prefect_rlhf.rlhf_tasks.config.settings import MOST_SECONDS
from prefect_rlhf.rlhf_tasks.profiling.measurements import Measurements, ProfileSpec, pieces_of, profile_plan
from prefect_rlhf.rlhf_tasks.protocol.messages import Committed, RunSpec
from prefect_rlhf.rlhf_tasks.spec import NodeResult

PIECE_DEADLINE_S = 900.0  # of one model under one tp degree


def _run_name() -> str:
    config = (flow_run.parameters or {}).get("config")
    return f"plan/{getattr(config, 'name', None) or getattr(config, 'type', flow_run.id[:8])}"


@flow(name="plan", flow_run_name=_run_name, persist_result=False)
async def plan(
    config: Annotated[RunConfig, OfAnyAlgorithm(), Form()],
    cluster: str | None = None,
    profile: str | None = None,
    mode: str = "search",
    time_limit_s: Annotated[float, Field(gt=0, le=MOST_SECONDS)] | None = None,
    block: str | None = None,
    comparison: bool = True,
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None,
) -> dict[str, Any]:
    """Plan a run without running it. Needs no GPU, no cluster and no weights. Returns the figures that
    `prefect-rlhf plan --json` writes.

    Args:
        config: The run's configuration; models may be inline Hugging Face configurations.
        cluster: A YAML file with n_hosts, devices_per_host and device; default: as in the configuration.
        profile: A file of `prefect-rlhf profile --out` with profiles of a cluster like this one, measured or
            computed; default: the measured ones in <output_dir>/profiles/.
        mode: search, mcmc, heuristic, symmetric or disjoint.
        time_limit_s: Seconds that a search may take; default: planning.time_limit_s.
        block: Name of the block in which the plan is saved; default: the configuration's name, or its type.
        comparison: Whether to also find the plans of the other modes, and why each call is not placed elsewhere.
        seed: Seed of the search; default: the configuration's.
    """
    settings = decided(fetched(resolve_paths(config, Path.cwd()), weights=False).config)
    hardware = hardware_of(settings, Path(cluster) if cluster else None)
    problem = problem_of(settings, hardware, Path(profile) if profile else None)
    warnings = [*hardware.warnings, *problem.warnings]
    for warning in warnings:
        get_run_logger().warning(warning)
    limit_s = settings.planning.time_limit_s if time_limit_s is None else time_limit_s
    seed = settings.seed if seed is None else seed
    result = await asyncio.to_thread(find_plan, problem, mode, limit_s, seed)
    await artifacts.show_page(await asyncio.to_thread(artifacts.plan_page, result.plan))
    stretched = extrapolation(result.plan, problem.model)
    if stretched is not None:
        get_run_logger().warning(stretched)
        warnings.append(stretched)
    await artifacts.show_price(result, problem.model, warnings)
    name = (block or settings.name or settings.type).lower().replace("_", "-").replace(".", "-")
    await _as_block(result).asave(name, overwrite=True)
    if comparison:
        await artifacts.show_alternatives(await asyncio.to_thread(rejected_alternatives, result))
        limits_s = limits_of(mode, limit_s)
        plans = await asyncio.to_thread(compare, problem, result, limits_s, seed)
        await artifacts.show_comparison(plans, limits_s, getattr(settings, "total_iterations", 1))
    return result_document(result)


def _as_block(result: SearchResult) -> StoredPlan:
    plan = result.plan
    return StoredPlan(
        algorithm=plan.algorithm,
        n_hosts=plan.n_devices // plan.devices_per_host,
        devices_per_host=plan.devices_per_host,
        assignments=plan_document(plan),
        iteration_time_s=result.iteration_time_s,
        lower_bound_s=result.lower_bound_s,
        proof_class=result.proof_class,
    )


# --- measured profiles ---


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
            executor="prefect_rlhf.rlhf_tasks.profiling.measure:make_executor",
            snapshots="prefect_rlhf.rlhf_tasks.profiling.measurements:NoSnapshots",
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
