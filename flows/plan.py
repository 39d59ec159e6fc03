"""Flow `plan`: searches an execution plan and shows it, with its proof, as artifacts and a block. Runs nothing."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from pydantic import Field

from blocks.plan import StoredPlan
from flows.run.planning import compare, decided, hardware_of, limits_of, plan_for, problem_of
from flows.view import artifacts
from flows.view.forms import Form
from planner.report import extrapolation, plan_document, rejected_alternatives, result_document
from planner.search.search import SearchResult
from rlhf_tasks.algorithms.configurations import OfAnyAlgorithm, RunConfig, resolve_paths
from rlhf_tasks.config.settings import MOST_SECONDS


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
    settings = decided(resolve_paths(config, Path.cwd()))
    hardware = hardware_of(settings, Path(cluster) if cluster else None)
    problem = problem_of(settings, hardware, Path(profile) if profile else None)
    found = [*hardware.warnings, *problem.warnings]
    for warning in found:
        get_run_logger().warning(warning)
    limit_s = settings.planning.time_limit_s if time_limit_s is None else time_limit_s
    seed = settings.seed if seed is None else seed
    result = await asyncio.to_thread(plan_for, problem, mode, limit_s, seed)
    await artifacts.show_page(await asyncio.to_thread(artifacts.plan_page, result.plan))
    stretched = extrapolation(result.plan, problem.model)
    if stretched is not None:
        get_run_logger().warning(stretched)
    warnings = [*found, *filter(None, [stretched])]
    await artifacts.show_price(result, problem.model, warnings)
    name = (block or settings.name or settings.type).lower().replace("_", "-").replace(".", "-")
    await _as_block(result).asave(name, overwrite=True)
    if comparison:
        await artifacts.show_alternatives(await asyncio.to_thread(rejected_alternatives, result))
        limits_s = limits_of(mode, limit_s)
        found = await asyncio.to_thread(compare, problem, result, limits_s, seed)
        await artifacts.show_comparison(found, limits_s, getattr(settings, "total_iterations", 1))
    return result_document(result)


def _as_block(result: SearchResult) -> StoredPlan:
    plan = result.plan
    return StoredPlan(
        algorithm=plan.algorithm,
        n_hosts=plan.n_devices // plan.devices_per_host,
        devices_per_host=plan.devices_per_host,
        assignments=plan_document(plan),  # type: ignore[arg-type]  # pydantic parses it
        iteration_time_s=result.iteration_time_s,
        lower_bound_s=result.lower_bound_s,
        proof_class=result.proof_class,
    )
