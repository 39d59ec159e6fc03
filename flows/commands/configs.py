"""`prefect-rlhf config`: schema, show, validate."""

import json
from pathlib import Path
from typing import Annotated

import yaml
from cyclopts import Parameter

from flows.commands.plans import show_warnings
from flows.rewards.trial import try_rewards
from flows.run.prepare import prepare
from flows.run.run_folder import open_run
from planner.report.text import plan_table
from rlhf_tasks.algorithms.configurations import ConfigError, load_config
from rlhf_tasks.algorithms.registry import algorithm, algorithm_names
from rlhf_tasks.config.base import RunConfig, Scores


def schema(type_: str = "ppo", /) -> None:
    """Print the JSON schema of a configuration: every field with its bounds and description.

    Parameters
    ----------
    type_
        ppo, grpo, dpo, sft, reward_model, rollout, or another algorithm (docs/algorithms.md).
    """
    name = type_.replace("-", "_")
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

    Parameters
    ----------
    config
        A YAML file.
    overrides
        `key.sub=value`, the value being YAML.
    rewards
        Also call each Python reward once, on the first row of the data, in a separate process.
    """
    folder, settings = open_run(load_config(config, overrides))
    prepared = prepare(settings, folder)
    show_warnings(prepared.warnings)
    print(plan_table(prepared.plan))
    if rewards:
        _try_rewards(settings)
    print(f"{config}: valid. {len(prepared.rows)} rows, {prepared.iterations} iterations.")


def _try_rewards(settings: RunConfig) -> None:
    """Print each reward's value. Raises ConfigError with a sentence for each that failed."""
    if not isinstance(settings, Scores):
        raise ConfigError(f"--rewards: a run of type {settings.type!r} has no rewards. Leave it out.")
    faults = []
    for tried in try_rewards(settings):
        if tried.fault:
            faults.append(tried.fault)
            continue
        gave = "no verdict" if tried.value is None else f"{tried.value:g}"
        print(f"reward {tried.name}: {gave} for {tried.where} ({tried.seconds:.2f} s)")
    if faults:
        raise ConfigError(" ".join(faults))
