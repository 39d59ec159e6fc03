"""YAML files and what is wrong with them: every fault of a user's file becomes one sentence."""

import difflib
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

MAX_ALIASES = 24  # of YAML: at most 3 ** 8 copies of a value


class ConfigError(ValueError):
    """A configuration that cannot be used: one sentence naming the field, the value and what to change."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses a key that stands twice in one mapping, and aliases by the dozen: a few
    lines of aliases of aliases stand for more values than any memory holds."""

    aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MAX_ALIASES:
                raise yaml.MarkedYAMLError(
                    problem=f"more than {MAX_ALIASES} aliases", problem_mark=self.peek_event().start_mark
                )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} stands twice", problem_mark=key_node.start_mark
                )
            seen.append(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 80e9, without a point and a sign, for text
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """The value that a YAML text has. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's mapping. Raises ConfigError naming file and line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a UTF-8 text file ({error}).") from None
    try:
        document = parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}.") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found {type(document).__name__}.")
    return document


def first_fault(error: ValidationError, model: type[BaseModel] | None = None, kind: str = "") -> str:
    """One sentence for the first of pydantic's errors.

    model  what was validated, to suggest keys; kind: its tag, where it is a member of a discriminated union
    """
    fault = error.errors()[0]
    path = [str(part) for part in fault["loc"] if part not in (kind, "inline", "path")]
    field = ".".join(path)
    message = fault["msg"].removeprefix("Value error, ").rstrip(".")
    match fault["type"]:
        case "extra_forbidden":
            return f"{field}: unknown key{_suggestion(path, model)}"
        case "missing":
            return f"{field}: required, but not given."
        case "value_error":
            return f"{field}: {message}." if field else f"{message}."
    return f"{field}: {message[0].lower()}{message[1:]}, found {fault['input']!r}."


def _suggestion(path: Sequence[str], model: type[BaseModel] | None) -> str:
    """Ends the sentence about an unknown key: the key that is spelt alike, or else those there are."""
    for key in path[:-1]:
        field = model.model_fields.get(key) if model else None
        model = _submodel(field.annotation) if field else model if key.isdecimal() else None
    if model is None:
        return "."
    near = difflib.get_close_matches(path[-1], model.model_fields, n=1)
    return f", did you mean {near[0]!r}?" if near else f" (known here: {', '.join(model.model_fields)})."


def _submodel(annotation: Any) -> type[BaseModel] | None:
    """The model inside `Model`, `Model | None` or `tuple[Model, ...]`."""
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
