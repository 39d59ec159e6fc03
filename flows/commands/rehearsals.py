"""`prefect-rlhf rehearse`: hours of a run on a cluster that need not exist, in virtual time."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape
from rich.table import Column, Table

from prefect_rlhf.flows.cluster.this_machine import cores_here
from prefect_rlhf.flows.commands.options import (
    check_range,
    check_writable,
    show_warnings,
    whole_seed,
    write_output,
)
from prefect_rlhf.flows.run.device_loss import parts_left, refuse_no_shrink, smaller_plan
from prefect_rlhf.flows.run.downloads import fetched
from prefect_rlhf.flows.run.planning import (
    Ranks,
    fastest,
    hardware_of,
    problem_of,
    rank_choices,
    typed,
    users_seconds,
)
from prefect_rlhf.flows.run.prepare import make_plan
from prefect_rlhf.flows.view.terminal import Console
from prefect_rlhf.planner.plan.workload import EvaluationWork
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.device_classes import Hardware
from prefect_rlhf.planner.pricing.plans import COPIES, PlanPrice, loaded_bytes, price_plan, saved_bytes
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, load_config
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.protocol.messages import RunSpec
from prefect_rlhf.rlhf_tasks.rehearsal import rehearsal
from prefect_rlhf.rlhf_tasks.rehearsal.assumptions import (
    Costs,
    InjectedFault,
    Machines,
    Noise,
    read_faults,
    scheduled,
)
from prefect_rlhf.rlhf_tasks.rehearsal.rehearsal import RehearsalRequest, Rehearsed
from prefect_rlhf.rlhf_tasks.rehearsal.story import NEAR, OWN, RUNNING, CommitMade, Story
from prefect_rlhf.rlhf_tasks.spec import CallNode, ExecutionPlan

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
        A YAML file with faults, a rate of them, or both (docs/how-to/plan.md).
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
    stated_seed = None if seed is None else whole_seed(seed)
    settings = fetched(load_config(config, overrides), weights=False).config
    fault_plan = None if faults is None else read_faults(faults)
    run = rehearsable(settings, cluster, profile)
    show_warnings(run.warnings)
    used_seed = settings.seed if stated_seed is None else stated_seed
    n_devices, per_host = run.plan.n_devices, run.plan.devices_per_host
    strikes = scheduled(fault_plan, n_devices, per_host, hours, used_seed, str(faults))
    on_cpus = all(profile.is_on_host for profile in run.problem.model.classes.profiles)
    machines = (Machines.of_cpus if on_cpus else Machines)(disk_bytes_per_s)
    with console.status("rehearsing ..."):
        outcome = rehearsed(
            run,
            hours=hours,
            machines=machines,
            noise=noise,
            seed=used_seed,
            faults=strikes,
            leaps=not every_iteration,
        )
    document = rehearsal_document(outcome, run, machines)
    if json_file is not None:
        write_output(json_file, json.dumps(document, indent=2) + "\n")
    _show(outcome, run, machines, document)
    if not outcome.finished or outcome.false_faults:
        raise SystemExit(1)


@dataclass(frozen=True)
class Rehearsable:
    """A configuration with its plan and the plan's price. cores: of a host; profile: as `rehearsable` takes it"""

    config: TrainingConfig
    hardware: Hardware
    problem: Problem
    plan: ExecutionPlan
    price: PlanPrice
    costs: Costs
    cores: int
    profile: Path | None
    warnings: tuple[str, ...]

    @property
    def spec(self) -> RunSpec:
        """An attempt with the plan."""
        config, plan, evaluation = self.config, self.plan, self.problem.model.workload.evaluation
        return RunSpec(
            run="rehearsal",
            attempt=1,
            ranks=tuple(f"rank-{rank}" for rank in range(plan.n_devices)),
            plan=_undecided(plan),
            config=config.model_dump(mode="json"),
            run_folder="",
            iterations=config.total_iterations,
            limits=config.limits,
            predicted_s=self.price.longest_s,
            users_s=users_seconds(config, plan, 0 if evaluation is None else evaluation.rows),
        )

    def smaller(self, there: Sequence[bool]) -> rehearsal.Smaller:
        """What a run that may shrink does without some devices. Raises ConfigError."""
        parts = parts_left(there, self.plan.devices_per_host)
        part, plan, problem, _ = smaller_plan(self.config, parts, self.hardware, self.profile)
        price = price_plan(plan, problem.model)
        made = priced(self.config, part.of(self.hardware), problem, plan, price, self.cores, self.profile)
        return rehearsal.Smaller(part.slots, made.spec, made.costs)


def _undecided(plan: ExecutionPlan) -> ExecutionPlan:
    """The same plan, whose calls all run: rehearsed ones have no metrics by which to decide."""
    nodes = [
        node.model_copy(update={"call": node.call.model_copy(update={"decides": (), "when": ""})})
        if isinstance(node, CallNode)
        else node
        for node in plan.nodes
    ]
    return plan.model_copy(update={"nodes": tuple(nodes)})


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
        chosen, (plan, price), _ = fastest(choices, plan_of, lambda made: made[0])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    assert isinstance(chosen.config, TrainingConfig), "the number of ranks is all that is chosen"
    cores = cores_here() if cluster is None else chosen.hardware.cluster.devices_per_host
    if config.on_device_loss == "shrink" and cluster is None:
        refuse_no_shrink(chosen.config)
    return priced(chosen.config, chosen.hardware, chosen.problem, plan, price, cores, profile)


def priced(
    config: TrainingConfig,
    hardware: Hardware,
    problem: Problem,
    plan: ExecutionPlan,
    price: PlanPrice,
    cores: int,
    profile: Path | None = None,
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
    return Rehearsable(config, hardware, problem, plan, price, costs, cores, profile, warnings)


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
    request = RehearsalRequest(
        run.spec,
        run.costs,
        machines,
        Noise(seed, noise),
        run.config.keep_last,
        hours,
        faults,
        leaps,
        run.smaller if run.config.on_device_loss == "shrink" else None,
    )
    return rehearsal.rehearse(request)


def effective_share(rehearsed: Rehearsed, costs: Costs) -> float:
    """Effective training time: the planned seconds of the committed iterations, as a share of all seconds."""
    return rehearsed.story.committed * costs.iteration_s / rehearsed.elapsed_s


def rehearsal_document(outcome: Rehearsed, run: Rehearsable, machines: Machines) -> dict[str, Any]:
    """All figures of a rehearsal, JSON-able."""
    story, model = outcome.story, run.problem.model
    return {
        "ended": outcome.ended,
        "finished": outcome.finished,
        "elapsed_s": outcome.elapsed_s,
        "planned_iteration_s": run.costs.iteration_s,
        "iterations_committed": story.committed,
        "iterations_rehearsed": outcome.rehearsed,
        "effective_training_time": effective_share(outcome, run.costs),
        "spent": _spent(outcome, run.costs),
        "commits": _commit_figures(story.commits, run.costs),
        "faults_struck": dict(story.struck),
        "generations_ended": [
            {"at_s": fault.at_s, "cause": fault.cause, "sentence": fault.sentence} for fault in story.faults
        ],
        "waits": {
            what: {"used_s": wait.used_s, "limit_s": wait.limit_s, "near": wait.near}
            for what, wait in sorted(outcome.watch.waits.items())
        },
        "device_memory": _grouped({device: peak.parts for device, peak in run.price.peaks.items()}),
        "host_memory": _grouped(_host_memory(outcome, run.price, model)),
        "disk_bytes_per_s": machines.disk_bytes_per_s,
    }


def _spent(rehearsed: Rehearsed, costs: Costs) -> list[dict[str, Any]]:
    """Where the time went: cause, seconds, and their share of all. The seconds add up to all that passed."""
    seconds, total = dict(rehearsed.story.seconds), rehearsed.elapsed_s
    planned_s = rehearsed.story.committed * costs.iteration_s
    # Iterations overlap while they wait for commits, so that running takes less than all of their planned seconds.
    beside_s = seconds.pop(RUNNING, 0.0) - planned_s
    rows = [("committed iterations, as planned", planned_s)]
    rows.append(("calls, beyond the plan: noise, slow hosts, shared cores, not committed, overlap", beside_s))
    rows += sorted(seconds.items(), key=lambda item: -item[1])
    return [
        {"cause": cause, "seconds": taken_s, "share": taken_s / total} for cause, taken_s in rows if taken_s
    ]


def _commit_figures(commits: list[CommitMade], costs: Costs) -> dict[str, float]:
    """Number, bytes, lags and distances of commits, in seconds."""
    lags = [commit.lag_s for commit in commits] or [0.0]
    apart = [b.at_s - a.at_s for a, b in pairwise(commits)] or [0.0]
    return {
        "commits": len(commits),
        "commit_bytes": costs.commit_bytes,
        "lag_median_s": median(lags),
        "lag_longest_s": max(lags),
        "apart_median_s": median(apart),
        "apart_longest_s": max(apart),
    }


def _host_memory(rehearsed: Rehearsed, price: PlanPrice, model: CostModel) -> dict[int, dict[str, float]]:
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
    return parts


def _grouped(parts: Mapping[int, dict[str, float]]) -> list[dict[str, Any]]:
    """Devices, or hosts, that hold the same bytes of each part: the first of them, their number, and the parts."""
    groups: dict[frozenset[tuple[str, int]], dict[str, Any]] = {}
    for number, sizes in sorted(parts.items()):
        alike = frozenset((part, round(size)) for part, size in sizes.items())
        groups.setdefault(alike, {"first": number, "number": 0, "parts": sizes})["number"] += 1
    return list(groups.values())


def _show(outcome: Rehearsed, run: Rehearsable, machines: Machines, figures: Mapping[str, Any]) -> None:
    """Show all figures of a rehearsal.

    figures  of `rehearsal_document`
    """
    story = outcome.story
    _say(
        f"[bold]Rehearsal[/] on {run.problem.model.classes}, {run.costs.iteration_s:.4g} s per iteration by the plan"
    )
    how = "Ended" if outcome.finished else "[red]Failed[/]"
    _say(f"[bold]{how}[/] after {duration(outcome.elapsed_s)}: {escape(shortened(outcome.ended))}")
    leapt = story.leapt_iterations
    counted = f", {leapt} of them not rehearsed but counted from similar ones" if leapt else ""
    share = figures["effective_training_time"]
    _say(f"{story.committed} iterations committed{counted}; effective training time {share:.1%}")
    _say(
        f"disk: {machines.disk_bytes_per_s / 1e9:.3g} GB/s for each host, "
        f"{machines.thread_bytes_per_s / 1e9:.3g} for one thread\n"
    )
    table = Table(Column("where the time went", no_wrap=True), box=None, pad_edge=False)
    for head in ("seconds", "share"):
        table.add_column(head, justify="right")
    for row in figures["spent"]:
        table.add_row(row["cause"], f"{row['seconds']:.0f}", f"{row['share']:.1%}")
    console.print(table)
    commits = figures["commits"]
    lag_s, longest_s = duration(commits["lag_median_s"]), duration(commits["lag_longest_s"])
    _say(
        f"\n[bold]Commits[/]: {commits['commits']} of {commits['commit_bytes'] / 1e9:.3g} GB; from one to the next "
        f"{duration(commits['apart_median_s'])} (median), {duration(commits['apart_longest_s'])} (longest); behind "
        f"their iterations {lag_s} (median), {longest_s} (longest)"
    )
    _show_memory("device", figures["device_memory"])
    _show_memory("host", figures["host_memory"])
    _show_faults(story)
    near = outcome.watch.near
    _say(f"\n[bold]Deadlines[/] that came within a factor of {1 / NEAR:g} of firing: {len(near) or 'none'}")
    for what, wait in near.items():
        _say(f"  {what}: {wait.used_s:.4g} of {wait.limit_s:.4g} s at most; {wait.near} times that near")


def _say(sentence: str) -> None:
    console.print(sentence, highlight=False, soft_wrap=True)


def _show_memory(of: str, holders: Sequence[Mapping[str, Any]]) -> None:
    """The largest total first; what is below a hundredth of a gigabyte is left out."""
    _say(f"\n[bold]Memory[/] of a {of}, GB at its fullest moment")
    for total, holder in sorted(
        ((sum(holder["parts"].values()), holder) for holder in holders), key=lambda pair: -pair[0]
    ):
        parts = sorted(holder["parts"].items(), key=lambda item: -item[1])
        listed = ", ".join(f"{part} {size / 1e9:.3g}" for part, size in parts if size >= 1e7) or "nothing"
        like = f" and {holder['number'] - 1} like it" if holder["number"] > 1 else ""
        _say(f"  {of} {holder['first']}{like}: {total / 1e9:.3g} ({listed})")


def _show_faults(story: Story) -> None:
    struck = ", ".join(f"{number} {kind}" for kind, number in sorted(story.struck.items())) or "none"
    _say(f"\n[bold]Faults[/]: {struck}; generations that ended: {len(story.faults)}")
    false = [fault for fault in story.faults if fault.cause == OWN]
    for fault in (false or story.faults)[:MOST_FAULTS]:
        _say(f"  at {duration(fault.at_s)}, {fault.cause}: {escape(shortened(fault.sentence))}")
    if false:
        _say(f"  [bold red]{len(false)} of them without a fault[/]: a limit of the run is too tight")


def shortened(sentence: str) -> str:
    """A sentence that names a few ranks of many."""

    def few(match: re.Match[str]) -> str:
        ranks = match[1].split(", ")
        return f"ranks {', '.join(ranks[:MOST_RANKS])} and {len(ranks) - MOST_RANKS} more"

    return re.sub(rf"ranks (\d+(?:, \d+){{{MOST_RANKS},}})", few, sentence)


def duration(seconds: float) -> str:
    """Seconds for people: `95 s`, `12.5 min`, `7.1 h`."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"
