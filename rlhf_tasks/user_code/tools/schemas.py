"""The schemas of a run's tools, as the flow and the ranks ask for them, and the format in which a model calls."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.data.tokenizer import template_of
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.process import Terms, UserProcess
from prefect_rlhf.rlhf_tasks.user_code.tools.formats import FORMATS, format_of

LOADING_S = 120.0  # at least, for the schemas: transformers is loaded for them


def tool_format(config: Scores) -> str:
    """The name of the format in which the model of a run with tools writes calls. Raises ConfigError where it is not
    known."""
    if config.tool_format is not None:
        return config.tool_format
    template = template_of(config.models.tokenizer)
    name = format_of(template)
    if name is None:
        raise ConfigError(
            f"tools: the chat template of {config.models.tokenizer} writes calls in no format that is known "
            f"({', '.join(FORMATS)}). Name one in tool_format, or choose a model that was trained with tools."
            if template
            else f"tools: {config.models.tokenizer} has no chat template, which would offer them. Add "
            "chat_template.jinja to its folder."
        )
    return name


def schemas_of(config: Scores) -> list[dict[str, Any]]:
    """The JSON schemas of a run's tools, as a chat template takes them; [] without tools.

    They are made in a process of its own. Raises ConfigError for what is no tool: without a docstring or types, say;
    for two of one name, and for a server that does not start.
    """
    of_all = [schema for _, schemas in offered(config) for schema in schemas]
    names = [schema["function"]["name"] for schema in of_all]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"tools: two are named {twice!r}. Rename one of them.")
    return of_all


def offered(config: Scores) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """A run's entries of `tools`, as the processes that run them take them, each with its schemas. Raises as
    `schemas_of`."""
    if not config.tools:
        return []
    entries = [tool.model_dump() for tool in config.tools]
    files = [Path(part) for tool in config.tools for part in tool.parts]
    changed = tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files)
    most_s = max(LOADING_S, config.reward_timeout_s)
    schemas = json.loads(_schemas(json.dumps(entries), changed, most_s, config.reward_memory_bytes))
    return list(zip(entries, schemas, strict=True))


@lru_cache(maxsize=16)
def _schemas(tools: str, changed: tuple[int, ...], timeout_s: float, most_bytes: int) -> str:
    terms = Terms(
        kind="prefect_rlhf.rlhf_tasks.user_code.tools.loaded:Schemas",
        what="the tools",
        who=lambda method: method,
        begin={"tools": json.loads(tools), "blocks": {}},
        timeout_s=timeout_s,
        timeout_key="reward_timeout_s",
        most_bytes=most_bytes,
    )
    process = UserProcess(terms)
    try:
        return json.dumps(process.ask({})["schemas"])
    except RewardError as error:
        raise ConfigError(str(error)) from None
    finally:
        process.close()
        process.end()
