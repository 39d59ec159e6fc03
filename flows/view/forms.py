"""A configuration as the form of a deployment: with groups and titles, required fields first, sections closed.

Prefect draws a flow's parameters from their JSON schema. `Form` annotates a parameter with the schema that both
versions of the UI draw best. Groups that few users need are closed. The form sends their fields under a name with a
space, which no field has, and `Form` puts them where the configuration has them. Otherwise the accepted values stay
the same. A section that the user does not open is sent as null, for which configurations use the default section.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

FIRST, LAST = ("", "Batch", "Training", "Score"), ("Run", "Execution", "Fixed")
"""The groups (rlhf_tasks/config/base.py) at a form's beginning and end. An algorithm's own are between them."""
OPEN = ("", "Batch", "Training")
"""The groups that are open. Of the others those are closed that have several fields."""
OTHER = "Further"  # the group of fields that a configuration puts in none

WORDS = {
    "adam": "Adam",
    "cispo": "CISPO",
    "coef": "coefficient",
    "cliprange": "clip range",
    "dapo": "DAPO",
    "dir": "folder",
    "dpo": "DPO",
    "dtype": "type of parameters",
    "eos": "end token",
    "bytes": "(bytes)",
    "grpo": "GRPO",
    "gspo": "GSPO",
    "kl": "KL",
    "kto": "KTO",
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

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_opened, handler(source))

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


def _opened(document: Any) -> Any:
    """A configuration from a form, whose closed groups' fields are put beside the others."""
    if not isinstance(document, Mapping):
        return document
    of_groups = [fields for name, fields in document.items() if " " in name and fields is not None]
    if not all(isinstance(fields, Mapping) for fields in of_groups):
        return document
    opened = {name: value for name, value in document.items() if " " not in name}
    return opened | {name: value for fields in of_groups for name, value in fields.items()}


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
    groups: dict[str, list[str]] | None = definition.pop(
        "groups", None
    )  # only a run's configuration has them
    definition["title"] = title_of(definition["title"].removesuffix("Config"))
    if groups is None:
        ordered = [(name, "") for name in sorted(properties, key=lambda name: name not in required)]
    else:
        definition["title"] += " configuration"
        ordered = _grouped(properties, required, groups)
    for position, (name, group) in enumerate(ordered):
        properties[name] = field = _field(properties[name], name in required)
        field["title"], field["position"] = title_of(name, group), position
    if groups is not None:
        _close_groups(definition, ordered)


def _close_groups(definition: dict[str, Any], ordered: Sequence[tuple[str, str]]) -> None:
    """Put the fields of groups that few users need into sections of their own, in place.

    A configuration that does not come from the form has these fields beside the others, and is still accepted.
    """
    properties, required = definition["properties"], definition.get("required", [])
    groups: dict[str, list[str]] = {}
    for name, group in ordered:
        if group not in OPEN and name not in required:
            groups.setdefault(group, []).append(name)
    closed = {group: names for group, names in groups.items() if len(names) > 1}
    for group, names in closed.items():
        fields = {name: properties.pop(name) for name in names}
        position = fields[names[0]]["position"]
        for name, field in fields.items():
            field["title"] = title_of(name, group).partition(": ")[2]
            field["title"] = field["title"][0].upper() + field["title"][1:]
        section = {"type": "object", "title": "Change", "properties": fields, "additionalProperties": False}
        properties[f"{group} options"] = {
            "anyOf": [section, {"type": "null", "title": "Default"}],
            "default": None,
            "title": group,
            "position": position,
        }
    names = "|".join(name for names in closed.values() for name in names)
    definition["patternProperties"] = {f"^({names})$": {}}


def _grouped(
    fields: Iterable[str], required: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> list[tuple[str, str]]:
    """Every field with its group, in the order of the form. A required field in no group is asked first."""
    of = {name: heading for heading, names in groups.items() for name in names}
    places = {name: place for place, name in enumerate(of)}
    headings = [*FIRST, *(heading for heading in groups if heading not in FIRST + LAST), OTHER, *LAST]
    grouped = [(name, of.get(name, "" if name in required else OTHER)) for name in fields]
    return sorted(grouped, key=lambda one: (headings.index(one[1]), places.get(one[0], len(places))))


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
    if "items" in field:
        field["items"] = _choice(field["items"], "Nothing")
    options = field.get("anyOf", [])
    if "$ref" in field and not required:
        section = {"$ref": field.pop("$ref"), "title": "Change"}
        return field | {"anyOf": [section, {"type": "null", "title": "Default"}], "default": None}
    kinds = [option.get("type") for option in options]
    if kinds in (["string", "null"], ["integer", "null"], ["number", "null"]) and "enum" not in options[0]:
        rest = {key: value for key, value in field.items() if key not in ("anyOf", "default")}
        return rest | options[0]
    return field


def _choice(schema: dict[str, Any], none: str) -> dict[str, Any]:
    """The schema with all its alternatives in one `anyOf`, in which the null has the title `none`."""
    options = list(_options(schema))
    if len(options) < 2:
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf", "discriminator")}
    return rest | {"anyOf": [_named(option, none) for option in options]}


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
