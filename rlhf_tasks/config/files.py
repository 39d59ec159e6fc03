"""Reads YAML and JSON files. Every fault in them becomes an error of one sentence."""

import re
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rlhf_tasks.config.key_names import example, suggestion
from rlhf_tasks.system.reading import ConfigError, Place, one_line, read_bytes, reading, shown

T = TypeVar("T")

MAX_ALIASES = 24  # in a YAML file: aliases of aliases then make at most 3 ** 8 copies of a value
MAX_DEPTH = 64  # nesting of lists and mappings in a YAML file
MAX_KEYS = 20_000  # of one YAML mapping: a measured distribution of lengths has a key for each length
MOST_YAML_BYTES = 1 << 20  # takes about 10 s to parse
MOST_PLAN_BYTES = 8 << 20  # of a plan in YAML: with 100,000 devices, each call lists them all
MOST_KEPT_BYTES = 1 << 30  # of JSON files that we wrote: a plan of 100,000 devices takes 50 MB
MOST_FAULTS = 12  # of a file that are told at once

_TYPES = ("null", "bool", "int", "float", "str", "seq", "map")
"""The YAML types that are known: those of JSON. A date stays text, because no setting is a date."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with limits: it also refuses duplicate keys, deep nesting and many aliases.

    A few lines of aliases of aliases can expand to more values than any memory holds.
    """

    def __init__(self, text: str, place: Place) -> None:
        super().__init__(text)
        self._place, self._aliases, self._depth = place, 0, 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._place.line = self.peek_event().start_mark.line + 1
        self._aliases += self.check_event(yaml.AliasEvent)
        if self._aliases > MAX_ALIASES:
            raise yaml.YAMLError(f"more than {MAX_ALIASES} aliases")
        if isinstance(parent, yaml.MappingNode) and len(parent.value) == MAX_KEYS:
            raise yaml.YAMLError(f"more than {MAX_KEYS} keys in one mapping")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and node.end_mark is None:
            raise yaml.YAMLError("an alias refers to a value that contains it")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        self._place.line = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode):
            node.value.encode()  # raises for an escaped lone surrogate
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set[Hashable]()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            self._place.line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise yaml.YAMLError("a key is a list or mapping")
            if key == "<<":
                raise yaml.YAMLError("no key may be '<<': write out what it would merge")
            if key in seen:
                raise yaml.YAMLError(f"key {shown(key)} stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


_TAGS = [f"tag:yaml.org,2002:{name}" for name in _TYPES]
_Loader.yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in [*_TAGS, None]}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1 reads 80e9, which has no decimal point and no sign in the exponent, as text
_Loader.add_implicit_resolver(
    _TAGS[3], re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, place: Place) -> Any:
    """The value of a YAML text. Call it inside `reading`; `place` is set to the line being parsed."""
    loader = _Loader(text, place)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def read_yaml(path: Path, most_bytes: int = MOST_YAML_BYTES) -> dict[str, Any]:
    """The mapping in a YAML file of at most `most_bytes` bytes. Raises ConfigError naming file and line."""
    with reading(path, "not valid YAML") as place:
        document = parse_yaml(read_bytes(path, most_bytes).decode("utf-8-sig"), place)
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found {type(document).__name__}.")
    return document


def read_document(
    path: Path,
    kind: TypeAdapter[T],
    predicate: str,
    error: type[ValueError] = ConfigError,
    remedy: str = "",
) -> T:
    """The value in a JSON file that we wrote. Raises `error` with one sentence that names file, field and fault."""
    with reading(path, predicate, error, remedy):
        content = read_bytes(path, MOST_KEPT_BYTES)
        try:
            return kind.validate_json(content)
        except ValidationError as fault:
            raise error(f"{path}: {predicate}: {first_fault(fault)} {remedy}".rstrip()) from None


def first_fault(error: ValidationError) -> str:
    """One sentence for the first of pydantic's errors, in a file that we wrote."""
    return _sentence(error.errors(include_url=False)[0], None, ())


def faults_of(error: ValidationError, model: type[BaseModel] | None = None, *kinds: str) -> str:
    """A line for each of pydantic's errors in what a user wrote, with one sentence.

    model  what was validated; its keys are suggested for an unknown one
    kinds  the model's tag, where it is a member of a discriminated union, and those of such members of it
    """
    faults = error.errors(include_url=False)
    above = {fault["loc"][:end] for fault in faults for end in range(len(fault["loc"]))}
    # What is wrong above another fault only follows from it, such as a list without its refused item.
    own = [fault for fault in faults if fault["loc"] not in above] or faults
    found = dict.fromkeys(_sentence(fault, model, kinds) for fault in own)
    lines = list(found)[:MOST_FAULTS]
    return "\n".join(
        [*lines, *([f"There are {len(found) - len(lines)} more."] if len(found) > len(lines) else [])]
    )


def _sentence(fault: ErrorDetails, model: type[BaseModel] | None, kinds: Sequence[str]) -> str:
    *above, last = ("", *fault["loc"])
    tags = (*kinds, "path", "inline", "several")
    keyed = fault["type"] in (
        "extra_forbidden",
        "missing",
    )  # the last part is then a key, even if it is named like a tag
    path = [str(part) for part in above[1:] if part not in tags]
    path += [str(last)] if keyed or last not in tags else []
    field = one_line(".".join(path))
    message = one_line(fault["msg"].removeprefix("Value error, "), most=2000)
    match fault["type"]:
        case "extra_forbidden":
            return f"{field or repr('')}: unknown key{suggestion(path, model)}"
        case "missing":
            return f"{field}: required, but not given.{example(path, model)}"
        case "value_error":
            return f"{field}: {message}." if field else f"{message}."
    return f"{field}: {message[0].lower()}{message[1:]}, found {shown(fault['input'])}."


_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def how_to_download(path: str, kind: str = "model") -> str:
    """How to download what a missing path names, if it looks like a name on the Hugging Face Hub; else "".

    kind  model or dataset
    """
    given = Path(path)
    with suppress(ValueError):
        given = given.relative_to(Path.cwd())
    if not _HUB_ID.fullmatch(str(given)) or given.suffix in (".jsonl", ".gz", ".parquet", ".json"):
        return ""
    what = "" if kind == "model" else f"--repo-type {kind} "
    return (
        f" Nothing is downloaded automatically: if {given} is a {kind} on the Hugging Face Hub, download it with "
        f"`hf download {what}{given} --local-dir FOLDER` and name FOLDER."
    )
