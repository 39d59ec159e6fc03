"""`prefect-rlhf rehearse`: hours of a run on a cluster that need not exist, in virtual time."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter
from rich.markup import escape
from rich.table import Column, Table

from flows.cluster.this_machine import cores_here
from flows.commands.options import check_range, check_writable, show_warnings, whole_seed, write_output
from flows.run.planning import Ranks, fastest, hardware_of, problem_of, rank_choices, typed, users_seconds
from flows.run.prepare import make_plan
from flows.view.terminal import Console
from planner.plan.workload import EvaluationWork
from planner.pricing.calls import CostModel
from planner.pricing.device_classes import Hardware
from planner.pricing.plans import COPIES, PlanPrice, loaded_bytes, price_plan, saved_bytes
from planner.pricing.problem import Problem
from rlhf_tasks.algorithms.configurations import ConfigError, load_config
from rlhf_tasks.config.base import RunConfig, TrainingConfig
from rlhf_tasks.protocol.messages import RunSpec
from rlhf_tasks.rehearsal import rehearsal
from rlhf_tasks.rehearsal.assumptions import Costs, InjectedFault, Machines, Noise, read_faults, scheduled
from rlhf_tasks.rehearsal.rehearsal import RehearsalRequest, Rehearsed
from rlhf_tasks.rehearsal.story import NEAR, OWN, RUNNING, CommitMade
from rlhf_tasks.spec import ExecutionPlan

MOST_HOURS = 24.0 * 366
DISKS = (1e6, 1e13)  # bytes per second, from a slow network to more than any host has
MOST_FAULTS = 10  # sentences of generations that ended
MOST_RANKS = 4  # that a sentence names
ITERATION_CPU_S, NODE_CPU_S = 0.25, 0.025
"""CPU seconds of a run's own processes (flow, Prefect's server, controller) for each iteration, and for each of its
nodes: what PPO and SFT of tiny models took on two cores (bench/results/runs.md)."""

console = Console()


def rehearse(
    *overrides: str,
    config: Path,
    hours: float = 24.0,
    faults: Path | None = None,
    disk_bytes_per_s: float = Machines.disk_bytes_per_s,
    noise: float = 0.05,
    seed: str | None = None,
    cluster: Path | None = None,
    profile: Path | None = None,
    every_iteration: Annotated[bool, Parameter(negative="")] = False,
    json_file: Annotated[Path | None, Parameter("--json")] = None,
) -> None:
    """Rehearse a run in virtual time: prefect-rlhf rehearse --config FILE [key.sub=value ...].

    The run's own controller, ledger and inboxes run a plan on simulated ranks, whose calls take the planner's times.
    Needs no GPU, no cluster and no weights. Prints iterations, effective training time, where the time went, commits
    and their lag, memory, and deadlines that nearly fired. Exit status 1 if the run gives up, or if a deadline fires
    without a fault.

    Parameters
    ----------
    overrides
        `key.sub=value`, the value being YAML.
    config
        The run's configuration, a YAML file.
    hours
        Hours of the run to rehearse, if it has not reached its last iteration by then.
    faults
        A YAML file with faults, a rate of them, or both (docs/rehearsal.md).
    disk_bytes_per_s
        Bytes that a host reads and writes per second in the run's and the models' folders.
    noise
        Standard deviation of the logarithm of a call's time relative to its price; 0: exactly the price.
    seed
        Seed of noise and drawn faults, a whole number from 0; default: the configuration's.
    cluster
        A YAML file with n_hosts, devices_per_host and device; default: as in the configuration.
    profile
        A file of `prefect-rlhf profile --out FILE`; default: the measured ones in <output_dir>/profiles/.
    every_iteration
        Rehearse every iteration. By default, iterations without an event are counted from similar ones. Takes minutes
        to hours.
    json_file
        File to write all figures to.
    """
    check_range("--hours", hours, 0.0, MOST_HOURS, "the hours are above 0 and at most a year's")
    check_range("--noise", noise, -math.ulp(0.0), 1.0, "the noise is from 0 to 1; 0.05 is about 5%")
    check_range("--disk-bytes-per-s", disk_bytes_per_s, *DISKS, "a disk moves 1e6 to 1e13 bytes per second")
    check_writable(json_file)
    used_seed = None if seed is None else whole_seed(seed)
    settings = load_config(config, overrides)
    given = None if faults is None else read_faults(faults)
    run = rehearsable(settings, cluster, profile)
    show_warnings(run.warnings)
    used_seed = settings.seed if used_seed is None else used_seed
    plan, machines = run.plan, Machines(disk_bytes_per_s=disk_bytes_per_s)
    strikes = scheduled(given, plan.n_devices, plan.devices_per_host, hours, used_seed, str(faults))
    with console.status("rehearsing ..."):
        found = rehearsed(
            run,
            hours=hours,
            machines=machines,
            noise=noise,
            seed=used_seed,
            faults=strikes,
            leaps=not every_iteration,
        )
    shown = (found, run.costs, machines, run.price, run.problem.model)
    if json_file is not None:
        write_output(json_file, json.dumps(rehearsal_document(*shown), indent=2) + "\n")
    show_rehearsal(console, *shown)
    if not found.finished or found.false_faults:
        raise SystemExit(1)


@dataclass(frozen=True)
class Rehearsable:
    """A configuration with its plan and the plan's price."""

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
    """The costs that a rehearsal needs, from the plan's price. cores: of a host."""
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
    """Node -> factor by which it takes longer because the run's own processes use the same cores.

    Empty on GPUs. Calls whose price measured runs have corrected are left out: their times include this.
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
    return rehearsal.rehearse(asked)


class Spent(NamedTuple):
    """One cause for which time was spent, its seconds, and their share of all."""

    cause: str
    seconds: float
    share: float


class Holder(NamedTuple):
    """Devices, or hosts, that hold the same: the first of them, their number, and part -> bytes."""

    first: int
    number: int
    parts: dict[str, float]


def effective_share(rehearsed: Rehearsed, costs: Costs) -> float:
    """Effective training time: the planned seconds of the committed iterations, as a share of all seconds."""
    return rehearsed.story.committed * costs.iteration_s / rehearsed.elapsed_s


def spent(rehearsed: Rehearsed, costs: Costs) -> list[Spent]:
    """Where the time went. The seconds add up to all that passed."""
    seconds, total = dict(rehearsed.story.seconds), rehearsed.elapsed_s
    planned_s = rehearsed.story.committed * costs.iteration_s
    # Iterations overlap while they wait for commits, so that running takes less than all of their planned seconds.
    beside_s = seconds.pop(RUNNING, 0.0) - planned_s
    rows = [("committed iterations, as planned", planned_s)]
    rows.append(("calls, beyond the plan: noise, slow hosts, shared cores, not committed, overlap", beside_s))
    rows += sorted(seconds.items(), key=lambda item: -item[1])
    return [Spent(cause, taken_s, taken_s / total) for cause, taken_s in rows if taken_s]


def device_memory(price: PlanPrice) -> list[Holder]:
    """What each device holds at its fullest moment; devices that hold the same stand together."""
    return _grouped({device: peak.parts for device, peak in price.peaks.items()})


def host_memory(rehearsed: Rehearsed, price: PlanPrice, model: CostModel) -> list[Holder]:
    """What each host's memory holds besides its system: of copies for commits the most that there were."""
    per_host, parts = model.cluster.devices_per_host, dict[int, dict[str, float]]()
    for host in range(model.cluster.n_hosts):
        process_bytes = model.classes.profile(host * per_host).process_bytes * per_host
        all_parts = {
            "copies waiting to be written": float(rehearsed.most_kept_bytes[host]),
            **{part: size for part, size in price.hosts.get(host, {}).items() if not part.endswith(COPIES)},
            "processes": float(process_bytes),
        }
        parts[host] = {part: size for part, size in all_parts.items() if size}
    return _grouped(parts)


def _grouped(parts: dict[int, dict[str, float]]) -> list[Holder]:
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for number, held in sorted(parts.items()):
        groups.setdefault(tuple(sorted((part, round(size)) for part, size in held.items())), []).append(
            number
        )
    return [Holder(members[0], len(members), parts[members[0]]) for members in groups.values()]


def commit_figures(commits: list[CommitMade], costs: Costs) -> dict[str, float]:
    """Number, bytes, lags and distances of commits, in seconds."""
    lags = sorted(commit.lag_s for commit in commits)
    apart = sorted(b.at_s - a.at_s for a, b in pairwise(commits))
    return {
        "commits": len(commits),
        "commit_bytes": costs.commit_bytes,
        "lag_median_s": median(lags) if lags else 0.0,
        "lag_longest_s": max(lags, default=0.0),
        "apart_median_s": median(apart) if apart else 0.0,
        "apart_longest_s": max(apart, default=0.0),
    }


def rehearsal_document(
    rehearsed: Rehearsed,
    costs: Costs,
    machines: Machines,
    price: PlanPrice,
    model: CostModel,
) -> dict[str, Any]:
    """All figures of a rehearsal, JSON-able."""
    story = rehearsed.story
    return {
        "ended": rehearsed.ended,
        "finished": rehearsed.finished,
        "elapsed_s": rehearsed.elapsed_s,
        "planned_iteration_s": costs.iteration_s,
        "iterations_committed": story.committed,
        "iterations_rehearsed": rehearsed.rehearsed,
        "effective_training_time": effective_share(rehearsed, costs),
        "spent": [row._asdict() for row in spent(rehearsed, costs)],
        "commits": commit_figures(story.commits, costs),
        "faults_struck": dict(story.struck),
        "generations_ended": [
            {"at_s": fault.at_s, "cause": fault.cause, "sentence": fault.sentence} for fault in story.faults
        ],
        "waits": {
            what: {"used_s": wait.used_s, "limit_s": wait.limit_s, "near": wait.near}
            for what, wait in sorted(rehearsed.watch.waits.items())
        },
        "device_memory": [holder._asdict() for holder in device_memory(price)],
        "host_memory": [holder._asdict() for holder in host_memory(rehearsed, price, model)],
        "disk_bytes_per_s": machines.disk_bytes_per_s,
    }


def show_rehearsal(
    console: Console,
    rehearsed: Rehearsed,
    costs: Costs,
    machines: Machines,
    price: PlanPrice,
    model: CostModel,
) -> None:
    """Show all figures of a rehearsal."""
    _show_head(console, rehearsed, costs, machines, model)
    table = Table(Column("where the time went", no_wrap=True), box=None, pad_edge=False)
    for head in ("seconds", "share"):
        table.add_column(head, justify="right")
    for row in spent(rehearsed, costs):
        table.add_row(row.cause, f"{row.seconds:.0f}", f"{row.share:.1%}")
    console.print(table)
    _show_commits(console, rehearsed, costs)
    _show_memory(console, "device", device_memory(price))
    _show_memory(console, "host", host_memory(rehearsed, price, model))
    _show_faults(console, rehearsed)
    _show_deadlines(console, rehearsed)


def _say(console: Console, sentence: str) -> None:
    console.print(sentence, highlight=False, soft_wrap=True)


def _show_head(
    console: Console, rehearsed: Rehearsed, costs: Costs, machines: Machines, model: CostModel
) -> None:
    story = rehearsed.story
    _say(
        console, f"[bold]Rehearsal[/] on {model.classes}, {costs.iteration_s:.4g} s per iteration by the plan"
    )
    how = "Ended" if rehearsed.finished else "[red]Failed[/]"
    _say(console, f"[bold]{how}[/] after {told(rehearsed.elapsed_s)}: {escape(shortened(rehearsed.ended))}")
    counted = story.leapt_iterations
    by = f", {counted} of them counted from rehearsed ones like them" if counted else ""
    share = effective_share(rehearsed, costs)
    _say(console, f"{story.committed} iterations committed{by}; effective training time {share:.1%}")
    _say(
        console,
        f"disk: {machines.disk_bytes_per_s / 1e9:.3g} GB/s for each host, "
        f"{machines.thread_bytes_per_s / 1e9:.3g} for one thread\n",
    )


def _show_commits(console: Console, rehearsed: Rehearsed, costs: Costs) -> None:
    figures = commit_figures(rehearsed.story.commits, costs)
    _say(
        console,
        f"\n[bold]Commits[/]: {figures['commits']:.0f} of {figures['commit_bytes'] / 1e9:.3g} GB; from one to the "
        f"next {told(figures['apart_median_s'])} (median), {told(figures['apart_longest_s'])} (longest); behind "
        f"their iterations {told(figures['lag_median_s'])} (median), {told(figures['lag_longest_s'])} (longest)",
    )


def _show_memory(console: Console, of: str, holders: list[Holder]) -> None:
    """The largest total first; what is below a hundredth of a gigabyte is left out."""
    _say(console, f"\n[bold]Memory[/] of a {of}, GB at its fullest moment")
    for holder in sorted(holders, key=lambda h: -sum(h.parts.values())):
        parts = sorted(holder.parts.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{part} {size / 1e9:.3g}" for part, size in parts if size >= 1e7)
        like = f" and {holder.number - 1} like it" if holder.number > 1 else ""
        _say(
            console,
            f"  {of} {holder.first}{like}: {sum(holder.parts.values()) / 1e9:.3g} ({listed or 'nothing'})",
        )


def _show_faults(console: Console, rehearsed: Rehearsed) -> None:
    story = rehearsed.story
    struck = ", ".join(f"{number} {kind}" for kind, number in sorted(story.struck.items())) or "none"
    _say(console, f"\n[bold]Faults[/]: {struck}; generations that ended: {len(story.faults)}")
    own = [fault for fault in story.faults if fault.cause == OWN]
    for fault in (own or story.faults)[:MOST_FAULTS]:
        _say(console, f"  at {told(fault.at_s)}, {fault.cause}: {escape(shortened(fault.sentence))}")
    if own:
        _say(console, f"  [bold red]{len(own)} of them without a fault[/]: a limit of the run is too tight")


def _show_deadlines(console: Console, rehearsed: Rehearsed) -> None:
    near = rehearsed.watch.near
    _say(
        console,
        f"\n[bold]Deadlines[/] that came within a factor of {1 / NEAR:g} of firing: {len(near) or 'none'}",
    )
    for what, wait in near.items():
        _say(
            console,
            f"  {what}: {wait.used_s:.4g} of {wait.limit_s:.4g} s at most; {wait.near} times so near",
        )


def shortened(sentence: str) -> str:
    """A sentence that names a few ranks of many."""

    def few(match: re.Match[str]) -> str:
        ranks = match[1].split(", ")
        return f"ranks {', '.join(ranks[:MOST_RANKS])} and {len(ranks) - MOST_RANKS} more"

    return re.sub(rf"ranks (\d+(?:, \d+){{{MOST_RANKS},}})", few, sentence)


def told(seconds: float) -> str:
    """Seconds for people: `95 s`, `12.5 min`, `7.1 h`."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"
