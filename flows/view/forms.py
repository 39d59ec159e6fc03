"""A configuration as the form of a deployment: with groups and titles, required fields first, sections closed.

Prefect draws a flow's parameters from their JSON schema. `Form` annotates a parameter with the schema that both
versions of the UI draw best. The accepted values stay the same. A section that the user does not open is sent as
null, for which configurations use the default section.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

GROUPS = {
    "": ("models", "data", "sampling", "total_iterations", "rewards"),
    "Batch": ("batch_size", "num_generations", "num_mini_batches", "num_ppo_epochs"),
    "Training": (
        *("optimizer", "critic_optimizer", "center_rewards_coefficient", "random_init"),
        *("critic_warmup_iterations", "early_stop_ratio", "gradient_checkpointing"),
    ),
    "Score": (
        "reward_model",
        "score_clip",
        "missing_eos_penalty",
        "truncated_responses",
        "reward_timeout_s",
        "reward_memory_bytes",
    ),
    "KL": ("kl_coef", "kl_estimator", "kl_target", "kl_horizon"),
    "Advantages": ("gamma", "lam", "whiten_advantages", "normalize_values"),
    "Loss": ("cliprange", "cliprange_value", "dual_clip", "value_huber_delta"),
    "Run": ("name", "output_dir", "seed", "dtype", "resume", "snapshot_every", "keep_last"),
    "Execution": ("cluster", "plan", "replan", "planning", "runtime"),
    "Fixed": ("type",),
}
"""The fields of all configurations, in the order of the form."""
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
OTHER = "Further"  # the group of fields that are in no group above
PLACE_OF = {name: place for place, name in enumerate(GROUP_OF)}

WORDS = {
    "adam": "Adam",
    "coef": "coefficient",
    "cliprange": "clip range",
    "dir": "folder",
    "dtype": "type of parameters",
    "eos": "end token",
    "bytes": "(bytes)",
    "grpo": "GRPO",
    "huber": "Huber",
    "kl": "KL",
    "kwargs": "further arguments",
    "lam": "lambda",
    "lr": "learning-rate",
    "n": "number of",
    "num": "number of",
    "ppo": "PPO",
    "s": "(s)",
    "sft": "SFT",
}
"""Parts of names -> the words for them in titles."""


class Form:
    """Annotation of a flow's parameter that is a configuration.

    none  the form's name for the choice of no configuration
    """

    def __init__(self, none: str = "") -> None:
        self._none = none

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        waiting, seen = list(_references(schema)), set()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                definition = handler.resolve_ref_schema({"$ref": name})
                waiting += list(_references(definition))
                _arrange(definition)
        return _choice(schema, self._none)


def _references(schema: Any) -> Iterator[str]:
    """Every definition that a schema refers to."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _arrange(definition: dict[str, Any]) -> None:
    """Set titles, order and shape of an object's fields, in place."""
    properties, required = definition.get("properties", {}), definition.get("required", [])
    grouped = "type" in properties
    title = title_of(definition["title"].removesuffix("Config"))
    definition["title"] = f"{title} configuration" if grouped else title
    for name, field in properties.items():
        properties[name] = field = _field(field, name in required)
        field["title"] = title_of(name, GROUP_OF.get(name, OTHER) if grouped else "")

    def place(name: str) -> tuple[int, bool]:
        return PLACE_OF.get(name, len(PLACE_OF)) if grouped else 0, name not in required

    for position, name in enumerate(sorted(properties, key=place)):
        properties[name]["position"] = position


def title_of(name: str, group: str = "") -> str:
    """The name of a key or a class as words. Example: `kl_coef` in the group KL becomes `KL: coefficient`."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    if group and len(apart) > 1 and apart[0] == group.lower():
        del apart[0]
    words = " ".join(WORDS.get(word, word) for word in apart)
    return f"{group}: {words}" if group else words[0].upper() + words[1:]


def _field(field: dict[str, Any], required: bool) -> dict[str, Any]:
    """A field in a form that both UIs draw: no `oneOf`, an optional number as an empty box, a section closed."""
    field = _choice(field, "Default")
    options = field.get("anyOf", [])
    if "$ref" in field and not required:
        section = {"$ref": field.pop("$ref"), "title": "Change"}
        return field | {"anyOf": [section, {"type": "null", "title": "Default"}], "default": None}
    if (
        len(options) == 2
        and options[0].get("type") in ("string", "integer", "number")
        and _is_null(options[1])
    ):
        kept = {key: value for key, value in field.items() if key not in ("anyOf", "default")}
        return kept | options[0]
    return field


def _choice(schema: dict[str, Any], none: str) -> dict[str, Any]:
    """The schema with all its alternatives in one `anyOf`, in which the null has the title `none`."""
    options = list(_options(schema))
    if len(options) < 2:
        return schema
    kept = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf", "discriminator")}
    return kept | {"anyOf": [_named(option, none) for option in options]}


def _named(option: dict[str, Any], none: str) -> dict[str, Any]:
    kinds = {"string": "Text", "object": "Mapping", "array": "List", "null": none}
    return {"title": kinds[option["type"]], **option} if option.get("type") in kinds else option


def _options(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    inner = schema.get("anyOf") or schema.get("oneOf")
    if inner is None:
        yield schema
    else:
        for option in inner:
            yield from _options(option)


def _is_null(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "null"
