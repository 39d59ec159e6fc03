"""The number of ranks of a run: the stated one, or this machine's choice; on CPUs a measured one.

The ranks of a cluster of our own share this machine's cores, so fewer CPU ranks have more threads each. Which is
faster depends on model and machine, and no figure of a device tells it: numbers of ranks are compared only where
profiles of them were measured, each with the threads that its ranks have.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from flows.cluster.this_machine import cores_here, gpus_here, ranks_here, threads_of_ranks
from flows.run.planning import hardware_of, problem_of, typed
from planner.plan.build import PlanError
from planner.pricing.cluster_file import Hardware
from planner.pricing.plans import price_plan
from planner.pricing.problem import Problem, ProblemError
from rlhf_tasks.algorithms.configurations import MADE_PLANS, ConfigError
from rlhf_tasks.config.base import RunConfig
from rlhf_tasks.spec import ExecutionPlan

T = TypeVar("T")


class Ranks(NamedTuple):
    """A configuration with a number of ranks and a decided `dtype`, and what it then asks of the planner."""

    config: RunConfig
    hardware: Hardware
    problem: Problem

    @property
    def number(self) -> int:
        return self.config.cluster.n_devices

    @property
    def measured(self) -> bool:
        """Whether there is a measured profile of every model."""
        model = self.problem.model
        shapes = {role.shape for role in model.models.values()}
        return all(shapes <= profiles.keys() for profiles in model.measured)

    def __str__(self) -> str:
        """As in `2 ranks of 1 thread`."""
        threads = threads_of_ranks(self.number)
        return f"{self.number} rank{'s' * (self.number > 1)} of {threads} thread{'s' * (threads > 1)}"


def rank_counts(config: RunConfig) -> list[int]:
    """Numbers of ranks of a host that a run may have, the one to prefer first.

    Where `cluster.devices_per_host` is a number, that one, and with `plan: auto` the fewer that divide it. Where it
    is `auto`, what `ranks_here` says, then all powers of two up to the cores, upwards; only one rank where the
    devices are elsewhere or the plan is given by hand. No others where ranks are not CPU slots of this machine.
    """
    cluster, stated = config.cluster, config.cluster.devices_per_host
    is_here = cluster.address is None and cluster.n_hosts == 1
    on_cpus = is_here and not gpus_here()
    if stated != "auto":
        fewer = range(stated - 1, 0, -1) if on_cpus and config.plan == "auto" else ()
        return [stated, *(number for number in fewer if stated % number == 0)]
    if not is_here or config.planning.device is not None or config.plan not in MADE_PLANS:
        return [1]
    first = ranks_here()
    others = [2**n for n in range(cores_here().bit_length())] if on_cpus else []
    return [first, *(number for number in others if number != first)]


def decided(config: RunConfig) -> RunConfig:
    """A configuration with the number of ranks that is to be preferred."""
    return on_ranks(config, rank_counts(config)[0])


def on_ranks(config: RunConfig, number: int) -> RunConfig:
    """A configuration with another number of ranks of a host."""
    return config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"devices_per_host": number})}
    )


def rank_choices(
    config: RunConfig,
    prompt_tokens: Iterable[int] | None = None,
    profile: Path | None = None,
    kept: int | None = None,
) -> list[Ranks]:
    """The numbers of ranks to plan with, the one to prefer first.

    Others follow where profiles were measured of the first and of them. Where the first has no measured profile and
    nobody stated it, the fewer ranks follow, for a model that does not fit the first.

    prompt_tokens, profile  as `problem_of` takes them
    kept                    number of ranks of the plan that a run has already; then there is no other choice
    Raises ConfigError as `problem_of` does.
    """
    tokens = None if prompt_tokens is None else tuple(prompt_tokens)

    def of(number: int) -> Ranks:
        chosen = on_ranks(config, number)
        hardware = hardware_of(chosen)
        chosen = typed(chosen, hardware.classes)
        return Ranks(chosen, hardware, problem_of(chosen, hardware, profile, tokens))

    (first, *others), is_stated = rank_counts(config), config.cluster.devices_per_host != "auto"
    if kept is not None:
        return [of(first if is_stated and kept not in others else kept)]
    found = [of(first)]
    if not found[0].measured:
        return [*found, *(of(number) for number in others if not is_stated and number < first)]
    for number in others:
        try:
            choice = of(number)
        except ConfigError:  # the file of profiles has none of so many ranks
            continue
        if choice.measured:
            found.append(choice)
    return found


def fastest(
    choices: list[Ranks], plan: Callable[[Ranks], T], plan_of: Callable[[T], ExecutionPlan]
) -> tuple[Ranks, T, str | None]:
    """(number of ranks, its plan, a sentence where it is not the first one): the one with the fastest plan; where
    there are no measured profiles, the first that has a plan.

    plan  finds the plan of a number of ranks; plan_of: the plan in what it found
    Figures of earlier runs count where all numbers have some: where one has, others would only look faster.
    Raises PlanError, ProblemError or ConfigError, of the first number, where none has a plan.
    """
    if len(choices) == 1:
        return choices[0], plan(choices[0]), None
    found: list[tuple[Ranks, T]] = []
    fault: Exception | None = None
    for choice in choices:
        try:
            found.append((choice, plan(choice)))
        except (PlanError, ProblemError, ConfigError) as error:
            fault = fault or error
        else:
            if not choice.measured:
                break
    if not found:
        assert fault is not None, "without a plan there is a fault"
        raise fault
    all_ran = all(choice.problem.model.history for choice, _ in found)

    def time_s(choice: Ranks, made: T) -> float:
        model = choice.problem.model
        return price_plan(plan_of(made), model if all_ran else model.without_history()).iteration_time_s

    seconds = [time_s(choice, made) for choice, made in found]
    least_s = min(seconds)
    best, made = found[seconds.index(least_s)]
    if best is choices[0]:
        return best, made, None
    others = ", ".join(
        f"{time:.4g} s on {choice}"
        for time, (choice, _) in zip(seconds, found, strict=True)
        if choice is not best
    )
    why = (
        f"{least_s:.4g} s an iteration, against {others}" if others else f"there is no plan for {choices[0]}"
    )
    return best, made, f"the run takes {best}: {why}."
