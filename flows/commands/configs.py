"""Checks before a run: `prefect-rlhf config` (schema, show, validate) of a configuration, `doctor` of a model."""

import json
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import yaml
from cyclopts import Parameter
from rich.markup import escape

from prefect_rlhf.flows.commands.options import show_warnings
from prefect_rlhf.flows.recurring.beginning import check_series
from prefect_rlhf.flows.rewards import try_environment, try_rewards
from prefect_rlhf.flows.run.downloads import local_model
from prefect_rlhf.flows.run.examination import (
    Patient,
    default_strategies,
    examined,
    keep_verdict,
    strategy_of,
)
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.run_folder import open_run
from prefect_rlhf.flows.run.run_identity import check_stages
from prefect_rlhf.flows.view.terminal import Console
from prefect_rlhf.planner.text import plan_table
from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    PIPELINE,
    ConfigError,
    PipelineConfig,
    load_config,
    load_pipeline,
    stages_of,
    type_of,
)
from prefect_rlhf.rlhf_tasks.algorithms.held_out import evaluation_of
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm, algorithm_names
from prefect_rlhf.rlhf_tasks.algorithms.series import SERIES, SeriesConfig, load_series
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.system.reading import printable

console = Console(highlight=False, soft_wrap=True)


def schema(type_: str = "ppo", /) -> None:
    """Print the JSON schema of a configuration: every field with its bounds and description.

    Parameters
    ----------
    type_
        ppo, grpo, dpo, sft, reward_model, rollout, evaluate, pipeline, series, or another algorithm
        (docs/algorithms.md).
    """
    name = type_.replace("-", "_")
    if name in (PIPELINE, SERIES):
        several = PipelineConfig if name == PIPELINE else SeriesConfig
        print(json.dumps(several.model_json_schema(), indent=2))
        return
    if name not in algorithm_names():
        raise ConfigError(
            f"there is no configuration type {type_!r}; there are {', '.join(algorithm_names())}."
        )
    print(json.dumps(algorithm(name).config.model_json_schema(), indent=2))


def show(config: Path, *overrides: str) -> None:
    """Print a configuration with all defaults filled in.

    Parameters
    ----------
    config
        A YAML file.
    overrides
        `key.sub=value`, the value being YAML.
    """
    print(yaml.safe_dump(load_config(config, overrides).model_dump(mode="json"), sort_keys=False), end="")


def validate(
    config: Path, *overrides: str, rewards: Annotated[bool, Parameter("--rewards", negative="")] = False
) -> None:
    """Check a configuration with its models, data and plan, and print the plan. Starts nothing.

    Of a model on the Hugging Face Hub it downloads configuration and tokenizer, and no weights.

    Parameters
    ----------
    config
        A YAML file.
    overrides
        `key.sub=value`, the value being YAML.
    rewards
        Also call each Python reward and the environment once, on the first row of their data, in a separate process.
    """
    if type_of(config) == SERIES:
        show_warnings(check_series(load_series(config, overrides)))
        print(f"{config}: valid.")
        return
    if type_of(config) == PIPELINE:
        stages = stages_of(load_pipeline(config, overrides))
        show_warnings(check_stages(stages, weights=False).warnings)
        print(f"{config}: valid. {len(stages)} stages: {', '.join(stages)}.")
        return
    folder, settings = open_run(load_config(config, overrides))
    prepared = prepare(settings, folder, weights=False)
    show_warnings(prepared.warnings)
    print(plan_table(prepared.plan))
    if rewards:
        _try_rewards(prepared.config)
    rows, times = len(prepared.rows), prepared.iterations
    print(f"{config}: valid. {rows} row{'s' * (rows != 1)}, {times} iteration{'s' * (times != 1)}.")


def _try_rewards(settings: RunConfig) -> None:
    """Print what each reward and the environment gave. Raises ConfigError with a sentence for each that failed."""
    own, of_evaluation = settings if isinstance(settings, Scores) else None, evaluation_of(settings)
    if own is not None and of_evaluation is not None and own.scoring_rewards == of_evaluation.rewards:
        of_evaluation = None
    scored = [part for part in (own, of_evaluation) if part is not None]
    if not scored:
        raise ConfigError(f"--rewards: a run of type {settings.type!r} has no rewards. Leave it out.")
    faults = []
    of_environment = try_environment(own) if own is not None else ()
    for tried in chain(*map(try_rewards, scored), of_environment):
        if tried.fault:
            faults.append(tried.fault)
            continue
        print(printable(f"{tried.name}: {tried.gave} for {tried.where} ({tried.seconds:.2f} s)"))
    if faults:
        raise ConfigError(" ".join(faults))


def doctor(
    *,
    model: Path,
    strategy: Annotated[list[str] | None, Parameter(consume_multiple=True, negative="")] = None,
    dtype: Literal["float32", "bfloat16", "float64"] = "float32",
) -> None:
    """Compare a model, split over ranks on this machine, with plain transformers.

    Compares logits, gradients, greedy tokens, and a reallocation to one rank and back under each strategy. Prints a
    line for each with the largest difference and the tolerance. Exit status 1 when one is out of tolerance. Needs a
    process for each rank of the largest strategy, and memory for three to four times the weights
    (docs/how-to/check-a-model.md). A model of an untested family can be trained after it has passed: the verdict is
    stored in its folder.

    Parameters
    ----------
    model
        A model on the Hugging Face Hub, ORG/NAME[@REVISION], or a folder.
    strategy
        dp,tp,pp or dp,tp,pp,cp, such as 1,2,1; several may follow. Default: one rank, and two under dp, tp and pp
        each.
    dtype
        Of weights and activations.
    """
    patient = Patient.of(Path(local_model(str(model))), dtype)
    strategies = [strategy_of(text) for text in strategy or ()] or default_strategies(patient)
    patient.check(strategies)
    console.print(f"{escape(str(model))}: {patient.described}")
    with console.status("comparing ..."):
        findings = examined(patient, strategies)
    for found in findings:
        verdict = "ok" if found.passed else "[bold red]out of tolerance[/]"
        console.print(
            f"{found.strategy!s:<16} {found.check:<14} {found.difference:9.2e} of {found.tolerance:<7.0e} {verdict}"
        )
    if told := keep_verdict(patient, strategies, findings):
        console.print(escape(told))
    if not all(found.passed for found in findings):
        raise SystemExit(1)
