"""`prefect-rlhf plan`: where each call of an algorithm should run, what that costs, and how much better a plan could
be.

Two more commands show the input of a plan: `profile` measures or computes the figures that price it, `graph` draws
the calls.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Annotated, Literal

import yaml
from cyclopts import Parameter
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from prefect_rlhf.flows.cluster.shutdown import run_in_thread
from prefect_rlhf.flows.commands.options import (
    check_range,
    check_writable,
    show_warnings,
    warnings,
    whole,
    whole_seed,
    write_output,
)
from prefect_rlhf.flows.run.downloads import fetched
from prefect_rlhf.flows.run.planning import (
    Ranks,
    compare,
    computed_profiles,
    decided,
    fastest,
    hardware_of,
    limits_of,
    measured_folders,
    only_device,
    problem_of,
    rank_choices,
)
from prefect_rlhf.flows.run.run_folder import refuse_unwritable
from prefect_rlhf.flows.view.terminal import Console, tell
from prefect_rlhf.planner.plan.build import PlanError
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.figures import write_profiles
from prefect_rlhf.planner.pricing.plans import PlanPrice, shortfall
from prefect_rlhf.planner.pricing.problem import Deadline, Problem
from prefect_rlhf.planner.report import (
    ALTERNATIVES,
    Alternative,
    alternative_rows,
    call_rows,
    corrections,
    extrapolation,
    figures_source,
    host_sentences,
    mode_rows,
    plan_document,
    proof_sentence,
    rejected_alternatives,
    reserve_sentences,
    result_document,
    told_limits,
)
from prefect_rlhf.planner.search.baselines import heuristic_plan, priced_plan
from prefect_rlhf.planner.search.search import SearchResult, find_plan
from prefect_rlhf.planner.text import (
    algorithm_graph,
    dataflow_mermaid,
    dataflow_table,
    draw_bars,
    steady_bars,
)
from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    ConfigError,
    RunConfig,
    load_config,
    read_assignments,
)
from prefect_rlhf.rlhf_tasks.config.settings import MOST_SECONDS
from prefect_rlhf.rlhf_tasks.spec import CallNode, ExecutionPlan

COMPUTED = "computed-profiles.json"  # in the output folder, outside its folder of measured profiles
COMPILING = "the first time, compilation adds about a minute"
LIMITING = 6  # most nodes of the critical cycle that are named

STYLES = {
    "generate": "black on bright_blue",
    "inference": "black on cyan",
    "train_step": "black on yellow",
    "fetch": "black on white",
    "transfer": "black on green",
    "reallocate": "black on magenta",
    "release": "black on bright_magenta",
    "onload": "black on bright_cyan",
    "offload": "black on bright_red",
    "save": "black on bright_yellow",
    "save_samples": "white on red",
    "sync": "black on bright_white",
    "evaluate": "black on bright_green",
}
"""Kind of node -> style of its bars, in a terminal with colours."""

console = Console()


def plan(
    *overrides: str,
    config: Path,
    cluster: Path | None = None,
    profile: Path | None = None,
    mode: Literal["search", "mcmc", "heuristic", "symmetric", "hybrid", "disjoint", "colocated"] = "search",
    evaluate: Path | None = None,
    time_limit: float | None = None,
    seed: str | None = None,
    iterations: str | None = None,
    json_file: Annotated[Path | None, Parameter("--json")] = None,
    out: Path | None = None,
    comparison: Annotated[bool, Parameter("--compare")] = True,
) -> None:
    """Plan a run without running it: prefect-rlhf plan --config FILE [key.sub=value ...].

    Needs no GPU, no cluster and no weights: models may be folders or inline Hugging Face configurations.

    Parameters
    ----------
    overrides
        `key.sub=value`, the value being YAML.
    config
        The run's configuration, a YAML file.
    cluster
        A YAML file with n_hosts, devices_per_host and device; default: as in the configuration.
    profile
        A file of `prefect-rlhf profile --out FILE`: profiles that were computed, or measured on another cluster like
        this one; default: the measured ones in <output_dir>/profiles/.
    mode
        How to find the plan: by the search, by Metropolis sampling as in ReaL (mcmc), or by a rule: Megatron's advice
        (heuristic), all calls alike (symmetric), DeepSpeed-Chat's hybrid engine (hybrid), every model on its own
        devices as in OpenRLHF (disjoint), HybridFlow's mapping (colocated).
    evaluate
        A YAML file with a plan to price instead of a search, with lines such as `actor_train: 0-3 d2 t2 m4`.
    time_limit
        Seconds that a search may take; default: planning.time_limit_s. Plans made by a rule get a second under any
        limit, since otherwise there may be no plan. The comparison takes extra time; --no-compare leaves it out.
    seed
        Seed of the search, a whole number from 0; default: the configuration's.
    iterations
        Number of iterations for which to print the hours; default: the configuration's.
    json_file
        File to write all figures to.
    out
        File to write the plan to, as YAML that `plan:` in a run's configuration accepts.
    comparison
        Whether to also find the plans of the other modes, and why each call is not placed elsewhere.
    """
    hours = "the number of iterations is a whole number, at least one"
    counted = None if iterations is None else whole("--iterations", iterations, 1, hours)
    stated_seed = None if seed is None else whole_seed(seed)
    check_writable(json_file, out)
    if time_limit is not None:
        seconds = f"a search takes more than 0 and at most {MOST_SECONDS:g} seconds"
        check_range("--time-limit", time_limit, 0.0, MOST_SECONDS, seconds)
    settings = fetched(load_config(config, overrides), weights=False).config
    if cluster is None and evaluate is None and mode == "search":
        choices = rank_choices(settings, profile=profile)
    else:
        settings = decided(settings)
        hardware = hardware_of(settings, cluster)
        choices = [Ranks(settings, hardware, problem_of(settings, hardware, profile))]
    show_warnings((*choices[0].hardware.warnings, *choices[0].problem.warnings))
    limit_s = settings.planning.time_limit_s if time_limit is None else time_limit
    used_seed = settings.seed if stated_seed is None else stated_seed
    chosen, result, reason = fastest(
        choices,
        lambda ranks: _found(ranks.problem, mode, evaluate, limit_s, used_seed),
        lambda searched: searched.plan,
    )
    problem = chosen.problem
    if reason is not None:
        tell(reason)
    if json_file is not None:
        write_output(json_file, json.dumps(result_document(result), indent=2) + "\n")
    if out is not None:
        document = plan_document(result.plan)
        write_output(out, yaml.safe_dump(document, sort_keys=False, default_flow_style=None))
    _show(result, problem)
    if comparison:
        _compare(result, problem, limit_s, used_seed, counted or getattr(settings, "total_iterations", 1))


def _found(problem: Problem, mode: str, evaluate: Path | None, limit_s: float, seed: int) -> SearchResult:
    """The plan in the file to evaluate, else the one that a mode finds. Ctrl-C ends the search with the best plan."""
    if evaluate is not None:
        return _evaluated(problem, evaluate, limit_s, seed)
    if mode in limits_of(mode, limit_s):
        _show_first_answer(problem, limit_s / 10)
    searching = f"{mode}, up to {limit_s:g} s; {COMPILING}"
    with console.status(f"{searching if mode in limits_of(mode, limit_s) else mode} ..."):
        return run_in_thread(
            lambda off: find_plan(problem, mode, limit_s, seed, called_off=off),
            ending=lambda: warnings.print(
                "ending with the best plan found so far; Ctrl-C again ends without a plan"
            ),
        )


def _show_first_answer(problem: Problem, limit_s: float) -> None:
    """Print the time of the heuristic's plan, if it is found within the limit. It comes long before the search
    ends."""
    with suppress(PlanError):  # it does not fit: a search may find one that does
        first = heuristic_plan(problem, Deadline(monotonic() + limit_s))
        seconds = first.price.iteration_time_s
        tell(f"first answer: the heuristic's plan takes {seconds:.4g} s per iteration")


def _evaluated(problem: Problem, path: Path, limit_s: float, seed: int) -> SearchResult:
    """The plan in a file, with its price. If it does not fit, shows what it needs and raises ConfigError."""
    manual = read_assignments(path, problem.cluster.devices_per_host)
    priced = priced_plan(problem.graph, problem.model, manual)
    missing = shortfall(priced.price, problem.model)
    if missing is not None:
        show_calls(console, priced.plan, priced.price, problem.model)
        raise ConfigError(f"{path} does not fit. {missing}")
    return run_in_thread(lambda _: find_plan(problem, "manual", limit_s, seed, manual))


def _show(result: SearchResult, problem: Problem) -> None:
    """Print a plan, where its figures come from, its timeline and its proof."""
    plan, price, model = result.plan, result.price, problem.model
    stretched = extrapolation(plan, model)
    if stretched is not None:
        show_warnings([stretched])
    show_calls(console, plan, price, model)
    tell(f"Priced by: {figures_source(model)}.\n")
    factors = ", ".join(
        f"{call} + {by.added_s:.3g} s" if by.added_s else f"{call} x {by.seconds:.3g}"
        for call, by in corrections(problem).items()
    )
    if factors:
        tell(f"The profiles were corrected with measured figures of earlier runs: {factors}.\n")
    _show_timeline(plan, price)
    console.print(f"[bold]{proof_sentence(result)}[/]", highlight=False, soft_wrap=True)
    tell(f"The bound holds for: {result.proof_class}\n")


def _compare(result: SearchResult, problem: Problem, limit_s: float, seed: int, iterations: int) -> None:
    """Print why each call of a plan is not placed elsewhere, and the plans of the other modes."""
    with console.status(f"alternatives; {COMPILING} ..."):
        rejected = run_in_thread(lambda _: rejected_alternatives(result))
    show_alternatives(console, rejected)
    limits_s = limits_of(result.mode, limit_s)
    with console.status(f"the other modes, {told_limits(limits_s)}; {COMPILING} ..."):
        found = run_in_thread(lambda _: compare(problem, result, limits_s, seed))
    show_comparison(console, found, limits_s, iterations)


def show_calls(console: Console, plan: ExecutionPlan, price: PlanPrice, model: CostModel) -> None:
    """Show a row per call: devices, strategy, seconds, and memory of its fullest device. Names are never cut."""
    several = len(model.classes.profiles) > 1
    whole = (Column(head, no_wrap=True) for head in ("call", "devices"))
    table = Table(*whole, *(["class"] if several else []), box=None, pad_edge=False)
    rows = call_rows(plan, price, model)
    divides, shards = any(row.cp > 1 for row in rows), any(row.sharded for row in rows)
    for head in (
        "dp",
        "tp",
        "pp",
        *(["cp"] if divides else []),
        *(["sharded"] if shards else []),
        "micro-\nbatches",
        "offload",
        "seconds",
        "memory\nGB",
    ):
        table.add_column(head, justify="right")
    for row in rows:
        memory = f"{row.memory_bytes / 1e9:.3g}" + (" [red]too much[/]" if row.missing_bytes else "")
        where = (row.call, row.devices, *([row.device_class] if several else []))
        axes = (row.dp, row.tp, row.pp, *([row.cp] if divides else []))
        of_shares = ["yes" if row.sharded else ""] if shards else []
        how = (*map(str, axes), *of_shares, str(row.micro_batches))
        table.add_row(*where, *how, "yes" if row.offload else "", f"{row.time_s:.3g}", memory)
    console.print(f"[bold]Calls[/] on {model.classes}; memory: peak of the fullest device")
    console.print(table)
    for sentence in [*reserve_sentences(model.classes), *host_sentences(price, model)]:
        console.print(sentence, highlight=False, soft_wrap=True)
    moves = {name: price.duration_s[name] for name in price.moved_bytes}
    console.print(
        f"{len(moves)} transfers and reallocations move {sum(price.moved_bytes.values()) / 1e9:.3g} GB in "
        f"{sum(moves.values()):.3g} s per iteration.\n",
        highlight=False,
    )


def _show_timeline(plan: ExecutionPlan, price: PlanPrice) -> None:
    """Show one iteration of the steady state: a row of bars for each group of devices."""
    console.print("[bold]One iteration of the steady state[/], by devices")
    width = max(40, min(console.width, 160) - 30)
    for line in draw_bars(steady_bars(plan, price), price.iteration_time_s, width):
        text = Text(no_wrap=True, overflow="crop")
        for piece, kind in line:
            text.append(piece, STYLES.get(kind, ""))
        console.print(text)
    tell(f"Limited by: {limiting(plan, price)}\n")


def limiting(plan: ExecutionPlan, price: PlanPrice) -> str:
    """The critical cycle in one phrase: its calls in their order, then its other nodes; at most LIMITING names."""
    cycle = price.steady.cycle
    calls = [name for name in cycle if isinstance(plan.node(name), CallNode)]
    others = [name for name in cycle if name not in calls]
    named = [" → ".join(calls[:LIMITING]), *others[: max(0, LIMITING - len(calls))]]
    names, more = ", ".join(filter(None, named)), len(cycle) - LIMITING
    return f"{names} and {more} more" if more > 0 else names


def show_alternatives(console: Console, rejected: Sequence[Alternative]) -> None:
    """Show for each call the best plan with that call elsewhere. Below, say why that plan is worse, or that it is
    not."""
    if not rejected:
        return
    console.print(f"[bold]Rejected alternatives[/]: {ALTERNATIVES}", soft_wrap=True)
    rows = alternative_rows(rejected)
    lines = [("call", "devices", "dp", "tp", "pp", "s per iteration")]
    lines += [
        (row.call, row.devices, f"{row.dp}", f"{row.tp}", f"{row.pp}", f"{row.time_s:.4g}") for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells, why in zip(lines, ["", *(row.beside_the_plan for row in rows)], strict=True):
        aligned = (
            cell.rjust(width) if n > 1 else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        console.print(Text("  ".join(aligned), "" if why else "bold"), soft_wrap=True)
        if why:
            console.print(Padding(Text(why), (0, 0, 0, 4), expand=False))
    best = min((other for other in rejected if other.is_better), key=lambda other: other.time_s, default=None)
    if best is not None:
        sentence = f"The plan is not the best: one with {best.call} elsewhere takes {best.time_s:.4g} s."
        console.print(sentence, highlight=False, soft_wrap=True)
    console.print()


def show_comparison(
    console: Console, found: Mapping[str, SearchResult | str], limits_s: Mapping[str, float], iterations: int
) -> None:
    """Show the hours that `iterations` iterations take under each mode's plan.

    limits_s  mode -> seconds that it had for its search
    """
    console.print(f"[bold]{iterations} iterations[/] under the plan of each mode; {told_limits(limits_s)}")
    table = Table("mode", "s per iteration", "hours", "against the best of these", box=None, pad_edge=False)
    for row in mode_rows(found, iterations):
        if row.time_s is None or row.hours is None:
            table.add_row(row.mode, "-", "-", row.remark)
        else:
            table.add_row(row.mode, f"{row.time_s:.4g}", f"{row.hours:.3g}", row.remark)
    console.print(table)


def profile(
    *overrides: str,
    config: Path,
    analytic: Annotated[bool, Parameter(negative="")] = False,
    out: Annotated[Path | None, Parameter("--out")] = None,
) -> None:
    """Time layers and collectives on the run's cluster: prefect-rlhf profile --config FILE [key.sub=value ...].

    Takes minutes. Writes the profiles to <output_dir>/profiles/. Plans for the same models, devices and cluster use
    them from there. On this machine's CPUs it measures every number of ranks that a run may have (fewer ranks have
    more threads each); the run then takes the fastest.

    With --analytic nothing is measured: times of the same layers and collectives are computed from the device's
    figures and written in the same format. That takes a second, needs no cluster, GPU or weights, and works for
    inline models too. A plan uses computed profiles only where plan --profile FILE names them, and says so.

    Parameters
    ----------
    overrides
        `key.sub=value`, the value being YAML.
    config
        The run's configuration, a YAML file.
    analytic
        Compute the profiles from the figures of planning.device, a preset or a file.
    out
        A JSON file to which the profiles are also written. Computed ones are written only there; default:
        <output_dir>/computed-profiles.json.
    """
    if out is not None:
        check_writable(out)
    settings = fetched(load_config(config, overrides), weights=False).config
    refuse_unwritable(Path(settings.output_dir), "output_dir")
    if analytic:
        _compute(decided(settings), out)
        return
    hardware = hardware_of(decided(settings))
    only_device(hardware)
    show_warnings(problem_of(decided(settings), hardware).warnings)
    measured_folders(settings)
    # Prefect takes seconds to import, so a faulty configuration is refused before that.
    from prefect_rlhf.flows.commands.local_run import profile_here

    profile_here(settings, out)


def _compute(settings: RunConfig, out: Path | None) -> None:
    """Write computed profiles, and print how to use them."""
    show_warnings(hardware_of(settings).warnings)
    profiles = computed_profiles(settings)
    file = out or Path(settings.output_dir) / COMPUTED
    file.parent.mkdir(parents=True, exist_ok=True)
    write_profiles(profiles, file)
    tell(f"{profiles[0].title}: {file}. To plan by it: prefect-rlhf plan --profile {file}")


def graph(
    algorithm: str, /, *, form: Annotated[Literal["table", "mermaid"], Parameter("--as")] = "table"
) -> None:
    """Draw an algorithm's dataflow graph.

    Parameters
    ----------
    algorithm
        ppo, grpo, dpo, sft, reward_model, rollout, or another algorithm (docs/algorithms.md).
    form
        `table` for the terminal, `mermaid` for documents.
    """
    drawn = algorithm_graph(algorithm.replace("-", "_"))
    print(dataflow_table(drawn) if form == "table" else dataflow_mermaid(drawn))
