"""`prefect-rlhf config`: schema, show, validate."""

import json
from pathlib import Path

import yaml

from flows.commands.plans import show_warnings
from flows.prepare import prepare
from flows.run_folder import open_run
from planner.render import plan_table
from rlhf_tasks.config import CONFIG_TYPES, ConfigError, load_config


def schema(type_: str = "ppo", /) -> None:
    """Print the JSON schema of a configuration: every field with its bounds and meaning.

    Parameters
    ----------
    type_
        ppo, grpo, sft, reward_model or rollout.
    """
    name = type_.replace("-", "_")
    if name not in CONFIG_TYPES:
        raise ConfigError(f"there is no configuration type {type_!r}; there are {', '.join(CONFIG_TYPES)}.")
    print(json.dumps(CONFIG_TYPES[name].model_json_schema(), indent=2))


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


def validate(config: Path, *overrides: str) -> None:
    """Check a configuration with its models, data and plan, and print the plan; nothing is started.

    Parameters
    ----------
    config
        A YAML file.
    overrides
        `key.sub=value`, the value being YAML.
    """
    folder, settings = open_run(load_config(config, overrides))
    prepared = prepare(settings, folder)
    show_warnings(prepared.warnings)
    print(plan_table(prepared.plan))
    print(f"{config}: sound. {prepared.n_rows} rows, {prepared.iterations} iterations.")
