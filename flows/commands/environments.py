"""`prefect-rlhf rows`: rows for an environment of a package, whose prompts are what it says first."""

import asyncio
import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prefect_rlhf.flows.commands.options import check_writable, whole, write_output
from prefect_rlhf.flows.rewards import check_environment, secret_blocks
from prefect_rlhf.flows.view.terminal import tell
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, load_config
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.user_code.environment_kinds.starts import written
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.process import Terms, UserProcess

MOST_ROWS = 10**6


def rows(
    config: Path,
    out: Path,
    *,
    count: Annotated[str, Parameter("--count")] = "1000",
    first: Annotated[str, Parameter("--first")] = "0",
    text: Annotated[bool, Parameter("--text", negative="")] = False,
) -> None:
    """Write rows for a configuration's environment, where that is one of a package which says what is read first.

    A row has the prompt, and the column `start`, with which the environment begins again.

    Parameters
    ----------
    config
        A YAML file.
    out
        A JSONL file.
    count
        As many rows, or as the environment has.
    first
        Seed of the first row, or its place in the environment's data set. Held-out rows begin behind the others.
    text
        Prompts are text, for a model without a chat template; default: conversations.
    """
    number = whole("--count", count, 1, f"a number of rows is from 1 to {MOST_ROWS}", MOST_ROWS)
    start = whole("--first", first, 0, "a seed is a whole number from 0 to 2147483647", 2**31 - 1)
    check_writable(out)
    settings = load_config(config)
    if not isinstance(settings, Scores) or settings.environment is None or settings.environment.kind is None:
        raise ConfigError(f"{config} has no environment of a package. Rows of others are yours to write.")
    environment = settings.environment
    check_environment(environment, is_here=True)
    name = f"environment {environment.factory}"
    terms = Terms(
        kind="prefect_rlhf.rlhf_tasks.user_code.environment_kinds.starts:Rows",
        what=name,
        who=lambda called: called,
        begin={**environment.model_dump(), "blocks": asyncio.run(secret_blocks(settings))},
        timeout_s=settings.reward_timeout_s,
        timeout_key="reward_timeout_s",
        most_bytes=settings.reward_memory_bytes,
    )
    process = UserProcess(terms)
    try:
        made = process.ask({"first": start, "count": number})["rows"]
    except RewardError as error:
        raise ConfigError(str(error)) from None
    finally:
        process.close()
        process.end()
    if text:
        made = [{**row, "prompt": written(row["prompt"])} for row in made]
    write_output(out, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in made))
    tell(f"{out}: {len(made)} rows.")
