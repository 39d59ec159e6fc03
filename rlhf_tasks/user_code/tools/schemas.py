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

    They are made in a process of its own. Raises ConfigError for what is no tool: without a docstring or types, say.
    """
    if not config.tools:
        return []
    files = [Path(tool.function.rpartition(":")[0]) for tool in config.tools]
    changed = tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files)
    tools = json.dumps([[tool.function, sorted(tool.kwargs)] for tool in config.tools])
    return json.loads(
        _schemas(tools, changed, max(LOADING_S, config.reward_timeout_s), config.reward_memory_bytes)
    )


def offered(config: Scores) -> list[dict[str, Any]]:
    """A run's tools as the processes that run them take them: with schemas, which take seconds to make."""
    pairs = zip(config.tools, schemas_of(config), strict=True)
    return [{**tool.model_dump(), "schema": schema} for tool, schema in pairs]


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
