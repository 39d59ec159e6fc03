"""What all sections of a configuration share: their base, bounds that no real run reaches, pairs that exclude each
other, and what others may see of them. Torch-free."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, model_validator

from prefect_rlhf.rlhf_tasks.spec import Frozen
from prefect_rlhf.rlhf_tasks.system.reading import shown

# Upper bounds that no real run reaches. Larger numbers are typing errors, and some would fill the memory with lists.
MOST_SEQS = 2**20  # of a batch
MOST_TOKENS = 2**24  # of a sequence
MOST_ITERATIONS = 10**9
MOST_SECONDS = 1e9  # about thirty years; functions that wait accept no larger timeout


class Settings(Frozen):
    """Base of all configuration: immutable, unknown keys are refused, numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_section_is_the_default(cls, values: Any) -> Any:
        """A section that is null, as an empty key in YAML or a closed one in a form is, takes its default."""
        if not isinstance(values, Mapping):
            return values
        return {
            key: value
            for key, value in values.items()
            if value is not None or not cls._has_default_section(key)
        }

    @classmethod
    def _has_default_section(cls, key: Any) -> bool:
        field = cls.model_fields.get(key)
        if field is None or field.is_required():
            return False
        return isinstance(field.annotation, type) and issubclass(field.annotation, Settings)


class Pair(NamedTuple):
    """Two settings that do not go together. A class of configurations declares those of its fields as `pairs`.

    first, second  their dotted names
    why            a sentence and a remedy; {first} and {second} become the names with their values
    clash          whether a configuration has both; None: where neither has the default of the class that declares
                   the pair
    """

    first: str
    second: str
    why: str
    clash: Callable[[Any], bool] | None = None

    def fault(self, config: BaseModel, declares: type[BaseModel]) -> str | None:
        """The sentence where a configuration has both; else None. declares: the class whose pair this is"""
        both = (
            all(_is_set(config, name, declares) for name in (self.first, self.second))
            if self.clash is None
            else self.clash(config)
        )
        if not both:
            return None
        return self.why.format(first=_stated(config, self.first), second=_stated(config, self.second))


def _holder(config: BaseModel, dotted: str) -> tuple[BaseModel | None, str]:
    """The section that a dotted name leads to, None where the configuration lacks it, and the name's last part."""
    *above, last = dotted.split(".")
    section: BaseModel | None = config
    for name in above:
        section = section and getattr(section, name)
    return section, last


def _is_set(config: BaseModel, dotted: str, declares: type[BaseModel]) -> bool:
    section, name = _holder(config, dotted)
    if section is None:
        return False
    fields = declares.model_fields if section is config else type(section).model_fields
    return getattr(section, name) != fields[name].default


def _stated(config: BaseModel, dotted: str) -> str:
    """`name=value` as in YAML; the name alone of a whole section."""
    section, name = _holder(config, dotted)
    value = getattr(section, name, None)
    if isinstance(value, BaseModel | Mapping):
        return dotted
    if isinstance(value, bool):
        value = str(value).lower()
    return f"{dotted}={value:g}" if isinstance(value, float) else f"{dotted}={value}"


def auto_or_a_number(value: Any, what: str, most: int) -> Any:
    """`auto`, or a whole number from 1 to `most` that may be written as text. Raises ValueError, naming `what`."""
    is_number = isinstance(value, int | str) and re.fullmatch("[0-9]{1,10}", str(value)) is not None
    if value == "auto" or (is_number and 0 < int(value) <= most):
        return value if value == "auto" else int(value)
    raise ValueError(f"give auto, or {what} from 1 to {most}, found {shown(value)}")


def form(value: Any) -> str:
    """Which form a value has that is a path or stands in the configuration itself: "path" or "inline"."""
    return "path" if isinstance(value, str) else "inline"


ARGUMENTS = ("kwargs", "headers")
"""Keys whose values a user's code or service gets. Any value may be a secret, whatever its name."""


def public_document(config: BaseModel) -> dict[str, Any]:
    """The configuration, JSON-able, without arguments of a user's code, and without logins and queries of URLs."""
    return public(config.model_dump(mode="json"))


def public(value: Any) -> Any:
    """`public_document` of a part of a configuration that was read from a file."""
    if isinstance(value, dict):
        return {key: public(item) for key, item in value.items() if key not in ARGUMENTS}
    if isinstance(value, list):
        return [public(item) for item in value]
    if isinstance(value, str) and "://" in value:
        scheme, _, rest = value.partition("://")
        address, asked, _ = rest.partition("?")
        place, slash, path = address.partition("/")
        _, at, host = place.rpartition("@")
        return f"{scheme}://{'***@' if at else ''}{host}{slash}{path}{'?***' if asked else ''}"
    return value
