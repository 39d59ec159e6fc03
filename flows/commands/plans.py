"""`prefect-rlhf plan`: where each call of an algorithm should run, what that costs, and how far the best can be."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Annotated, Literal

import yaml
from cyclopts import Parameter
from rich.markup import escape

from flows.cluster.shutdown import run_in_thread
from flows.commands.numbers import check_range, whole, whole_seed
from flows.run.planning import compare, hardware_of, limits_of, plan_for, price_manual, problem_of
from flows.run.ranks import Ranks, decided, fastest, rank_choices
from flows.view.plan_view import (
    show_alternatives,
    show_calls,
    show_comparison,
    show_corrections,
    show_proof,
    show_source,
    show_timeline,
)
from flows.view.terminal import Console
from planner.deadline import Deadline
from planner.plan.build import PlanError
from planner.pricing.plans import shortfall
from planner.pricing.problem import Problem
from planner.pricing.provenance import extrapolation
from planner.report.alternatives import rejected_alternatives
from planner.report.report import plan_document, result_document, told_limits
from planner.search.baselines import heuristic_plan
from planner.search.search import SearchResult
from rlhf_tasks.algorithms.configurations import ConfigError, load_config, read_assignments
from rlhf_tasks.config.settings import MOST_SECONDS

COMPILING = "the first time, compilation adds about a minute"

console = Console()
warnings = Console(stderr=True, highlight=False)


def plan(
    *overrides: str,
    config: Path,
    cluster: Path | None = None,
    profile: Path | None = None,
    mode: Literal["search", "mcmc", "heuristic", "symmetric", "disjoint"] = "search",
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
        How to find the plan.
    evaluate
        A YAML file with a plan to price instead of a search: {call: {devices or hosts, dp, tp, pp, micro_batches}}.
    time_limit
        Seconds that a search may take; default: planning.time_limit_s. The plans by rule, without which there may
        be none, have a second under any limit. The comparison comes on top: --no-compare leaves it out.
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
    settings = load_config(config, overrides)
    if cluster is None and evaluate is None and mode == "search":
        choices = rank_choices(settings, profile=profile)
    else:
        settings = decided(settings)
        hardware = hardware_of(settings, cluster)
        choices = [Ranks(settings, hardware, problem_of(settings, hardware, profile))]
    show_warnings((*choices[0].hardware.warnings, *choices[0].problem.warnings))
    limit_s = settings.planning.time_limit_s if time_limit is None else time_limit
    used_seed = settings.seed if stated_seed is None else stated_seed
    chosen, result, told = fastest(
        choices,
        lambda ranks: _found(ranks.problem, mode, evaluate, limit_s, used_seed),
        lambda found: found.plan,
    )
    problem = chosen.problem
    if told is not None:
        console.print(told, highlight=False, soft_wrap=True)
    _write(result, json_file, out)
    _show(result, problem)
    if comparison:
        _compare(result, problem, limit_s, used_seed, counted or getattr(settings, "total_iterations", 1))


def show_warnings(found: Iterable[str]) -> None:
    """Print warnings to standard error, one a line."""
    for warning in found:
        warnings.print(f"[bold yellow]warning:[/] {escape(warning)}", soft_wrap=True)


def _found(problem: Problem, mode: str, evaluate: Path | None, limit_s: float, seed: int) -> SearchResult:
    """The plan in the file to evaluate, else the one that a mode finds. Ctrl-C ends the search with the best plan."""
    if evaluate is not None:
        return _evaluated(problem, evaluate, limit_s, seed)
    if mode in limits_of(mode, limit_s):
        _show_first_answer(problem, limit_s / 10)
    searching = f"{mode}, up to {limit_s:g} s; {COMPILING}"
    with console.status(f"{searching if mode in limits_of(mode, limit_s) else mode} ..."):
        return run_in_thread(
            lambda off: plan_for(problem, mode, limit_s, seed, called_off=off),
            ending=lambda: warnings.print(
                "ending with the best plan found so far; Ctrl-C again ends without a plan"
            ),
        )


def _show_first_answer(problem: Problem, limit_s: float) -> None:
    """Print what the heuristic's plan takes, if it is found within the limit: long before a search has ended."""
    with suppress(PlanError):  # it does not fit: a search may find one that does
        first = heuristic_plan(problem.graph, problem.model, Deadline(monotonic() + limit_s))
        seconds = first.price.iteration_time_s
        console.print(
            f"first answer: the heuristic's plan takes {seconds:.4g} s per iteration", highlight=False
        )


def _evaluated(problem: Problem, path: Path, limit_s: float, seed: int) -> SearchResult:
    """The plan in a file, with its price. If it does not fit, shows what it needs and raises ConfigError."""
    manual = read_assignments(path, problem.cluster.devices_per_host)
    priced = price_manual(problem, manual)
    missing = shortfall(priced.price, problem.model)
    if missing is not None:
        show_calls(console, priced.plan, priced.price, problem.model)
        raise ConfigError(f"{path} does not fit. {missing}")
    return run_in_thread(lambda _: plan_for(problem, "manual", limit_s, seed, manual))


def _show(result: SearchResult, problem: Problem) -> None:
    """Print a plan, where its figures come from, its timeline and its proof."""
    stretched = extrapolation(result.plan, problem.model)
    if stretched is not None:
        show_warnings([stretched])
    show_calls(console, result.plan, result.price, problem.model)
    show_source(console, problem.model)
    show_corrections(console, problem)
    show_timeline(console, result.plan, result.price)
    show_proof(console, result)


def _compare(result: SearchResult, problem: Problem, limit_s: float, seed: int, iterations: int) -> None:
    """Print why each call of a plan is not placed elsewhere, and what the other modes find."""
    with console.status(f"alternatives; {COMPILING} ..."):
        rejected = run_in_thread(lambda _: rejected_alternatives(result))
    show_alternatives(console, rejected)
    limits_s = limits_of(result.mode, limit_s)
    with console.status(f"the other modes, {told_limits(limits_s)}; {COMPILING} ..."):
        found = run_in_thread(lambda _: compare(problem, result, limits_s, seed))
    show_comparison(console, found, limits_s, iterations)


def check_writable(*paths: Path | None) -> None:
    """Raises ConfigError for a file that cannot be written, and for two that are the same file.

    This is checked before minutes of work.
    """
    files: dict[Path, Path] = {}
    for path in paths:
        if path is not None and path.resolve() in files:
            raise ConfigError(
                f"{path} and {files[path.resolve()]} are the same file, and one output would overwrite the other. "
                "Name two files."
            )
        if path is not None:
            files[path.resolve()] = path
        if path is not None and (
            path.is_dir()
            or not path.parent.is_dir()
            or not os.access(path if path.exists() else path.parent, os.W_OK)
        ):
            raise ConfigError(f"{path} cannot be written. Name a writable file in an existing folder.")


def _write(result: SearchResult, json_file: Path | None, out: Path | None) -> None:
    """Write the figures and the plan to their files, if given. Raises ConfigError naming the file."""
    texts = {
        json_file: lambda: json.dumps(result_document(result), indent=2) + "\n",
        out: lambda: yaml.safe_dump(plan_document(result.plan), sort_keys=False, default_flow_style=None),
    }
    for path, text in texts.items():
        if path is not None:
            try:
                path.write_text(text(), encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{path} cannot be written ({error.strerror}).") from None
