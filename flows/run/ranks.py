"""One CPU rank with all threads, or several with fewer: what `plan: auto` chooses among.

The ranks of a cluster of our own share this machine's cores, so fewer ranks have more threads each. Which is faster
depends on model and machine, and no figure of a device tells it: only numbers of ranks count for which profiles were
measured, each with the threads that its ranks have.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from flows.cluster.this_machine import gpus_here, threads_of_ranks
from flows.run.planning import hardware_of, problem_of, typed
from planner.plan.build import PlanError
from planner.pricing.cluster_file import Hardware
from planner.pricing.problem import Problem, ProblemError
from rlhf_tasks.algorithms.configurations import ConfigError
from rlhf_tasks.config.base import RunConfig

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
    """Numbers of ranks of a host that `plan: auto` may choose: the stated one, then the fewer that divide it.

    Only the stated one where the plan is not searched, and where ranks are not CPU slots of this machine.
    """
    stated = config.cluster
    free = config.plan == "auto" and stated.address is None and stated.n_hosts == 1 and not gpus_here()
    fewer = range(stated.devices_per_host - 1, 0, -1) if free else ()
    return [stated.devices_per_host, *(n for n in fewer if stated.devices_per_host % n == 0)]


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
    """The numbers of ranks to plan with, the stated one first.

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

    stated, *fewer = rank_counts(config)
    if kept is not None:
        return [of(kept if kept in fewer else stated)]
    found = [of(stated)]
    for number in fewer if found[0].measured else ():
        try:
            choice = of(number)
        except ConfigError:  # the file of profiles has none of so many ranks
            continue
        if choice.measured:
            found.append(choice)
    return found


def fastest(
    choices: list[Ranks], plan: Callable[[Ranks], T], time_s: Callable[[Ranks, T], float]
) -> tuple[Ranks, T, str | None]:
    """(number of ranks, its plan, a sentence where it is not the stated one): the one with the fastest plan.

    plan    finds the plan of a number of ranks; time_s: seconds of an iteration under it
    Raises PlanError, ProblemError or ConfigError, of the stated number, where none has a plan.
    """
    if len(choices) == 1:
        return choices[0], plan(choices[0]), None
    found: list[tuple[float, Ranks, T]] = []
    fault: Exception | None = None
    for choice in choices:
        try:
            made = plan(choice)
        except (PlanError, ProblemError, ConfigError) as error:
            fault = fault or error
        else:
            found.append((time_s(choice, made), choice, made))
    if not found:
        assert fault is not None, "without a plan there is a fault"
        raise fault
    seconds, best, made = min(found, key=lambda one: one[0])
    if best is choices[0]:
        return best, made, None
    others = ", ".join(f"{time:.4g} s on {choice}" for time, choice, _ in found if choice is not best)
    told = f"plan: auto takes {best}: {seconds:.4g} s an iteration{f', against {others}' if others else ''}."
    return best, made, told
