"""From a run's configuration to its rehearsal. Loads no torch, and needs neither cluster nor weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.cluster.this_machine import cores_here
from flows.run.planning import hardware_of, problem_of, typed
from flows.run.prepare import make_plan
from flows.run.ranks import Ranks, fastest, rank_choices
from flows.run.users_seconds import users_seconds
from planner.plan.workload import EvaluationWork
from planner.pricing.calls import CostModel
from planner.pricing.cluster_file import Hardware
from planner.pricing.plans import PlanPrice, price_plan
from planner.pricing.problem import Problem
from planner.pricing.stored import loaded_bytes, saved_bytes
from rlhf_tasks.algorithms.configurations import ConfigError
from rlhf_tasks.config.base import RunConfig, TrainingConfig
from rlhf_tasks.protocol.messages import RunSpec
from rlhf_tasks.rehearsal.costs import Costs, Machines, Noise
from rlhf_tasks.rehearsal.faults import InjectedFault
from rlhf_tasks.rehearsal.rehearsal import RehearsalRequest, Rehearsed, rehearse
from rlhf_tasks.spec import ExecutionPlan

ITERATION_CPU_S, NODE_CPU_S = 0.25, 0.025
"""CPU seconds of a run's own processes (flow, Prefect's server, controller) for each iteration, and for each of its
nodes: what PPO and SFT of tiny models took on two cores (bench/results/runs.md)."""


@dataclass(frozen=True)
class Rehearsable:
    """A configuration with its plan and what the planner prices of it."""

    config: TrainingConfig
    problem: Problem
    plan: ExecutionPlan
    price: PlanPrice
    costs: Costs
    warnings: tuple[str, ...]


def rehearsable(config: RunConfig, cluster: Path | None = None, profile: Path | None = None) -> Rehearsable:
    """Plan a configuration as a run of it would be, and price the plan.

    cluster, profile  as `prefect-rlhf plan` takes them
    Raises ConfigError.
    """
    if not isinstance(config, TrainingConfig):
        raise ConfigError(
            f"a run of type {config.type!r} makes no commits: there is nothing to rehearse. Name a configuration "
            "that trains."
        )
    if cluster is None:
        choices = rank_choices(config, profile=profile)
    else:
        hardware = hardware_of(config, cluster)
        choices = [Ranks(typed(config, hardware.classes), hardware, problem_of(config, hardware, profile))]

    def plan_of(ranks: Ranks) -> tuple[ExecutionPlan, PlanPrice]:
        plan = make_plan(ranks.config, ranks.problem)
        return plan, price_plan(plan, ranks.problem.model)

    try:
        chosen, (plan, price), _ = fastest(choices, plan_of, lambda found: found[0])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    assert isinstance(chosen.config, TrainingConfig), "the number of ranks is all that is chosen"
    cores = cores_here() if cluster is None else chosen.hardware.cluster.devices_per_host
    return priced(chosen.config, chosen.hardware, chosen.problem, plan, price, cores)


def priced(
    config: TrainingConfig,
    hardware: Hardware,
    problem: Problem,
    plan: ExecutionPlan,
    price: PlanPrice,
    cores: int,
) -> Rehearsable:
    """What a rehearsal of a plan must know, from its price. cores: of a host."""
    model = problem.model
    evaluation = model.workload.evaluation
    slower = _slower_beside(plan, price, model, cores)
    costs = Costs(
        node_s={node: seconds * slower.get(node, 1.0) for node, seconds in price.due_s.items()},
        copy_s=price.copy_s,
        saved_bytes=saved_bytes(plan, model),
        read_bytes=loaded_bytes(plan, model),
        iteration_s=price.iteration_time_s,
        evaluate_every=evaluation.every if isinstance(evaluation, EvaluationWork) else 1,
        sync_every=model.workload.sync_every if config.follows else 1,
        iterations=config.total_iterations,
        to_end_s={node: seconds * slower.get(node, 1.0) for node, seconds in price.to_end_s.items()},
    )
    warnings = (*hardware.warnings, *problem.warnings)
    return Rehearsable(config, problem, plan, price, costs, warnings)


def _slower_beside(plan: ExecutionPlan, price: PlanPrice, model: CostModel, cores: int) -> dict[str, float]:
    """Node -> by how much it takes longer because the run's own processes need the cores that compute.

    None does on GPUs. Calls whose price figures of runs correct took that time there.
    """
    if not all(profile.is_on_host for profile in model.classes.profiles):
        return {}
    own_s = (ITERATION_CPU_S + NODE_CPU_S * len(plan.nodes)) / cores
    corrected = {ran.call for ran in model.history}
    return {
        node.name: 1 + own_s / price.iteration_time_s for node in plan.nodes if node.name not in corrected
    }


def rehearsed(
    run: Rehearsable,
    *,
    hours: float,
    machines: Machines,
    noise: float,
    seed: int,
    faults: Sequence[InjectedFault] = (),
    leaps: bool = True,
) -> Rehearsed:
    """Rehearse a run from its first second.

    noise  standard deviation of the logarithm of what nodes take, against their price
    leaps  whether quiet times are counted and not rehearsed
    """
    config, plan = run.config, run.plan
    evaluation = run.problem.model.workload.evaluation
    spec = RunSpec(
        run="rehearsal",
        attempt=1,
        ranks=tuple(f"rank-{rank}" for rank in range(plan.n_devices)),
        plan=plan,
        config=config.model_dump(mode="json"),
        run_folder="",
        iterations=config.total_iterations,
        limits=config.limits,
        predicted_s=run.price.longest_s,
        users_s=users_seconds(config, plan, 0 if evaluation is None else evaluation.rows),
    )
    asked = RehearsalRequest(
        spec, run.costs, machines, Noise(seed, noise), config.keep_last, hours, faults, leaps
    )
    return rehearse(asked)
