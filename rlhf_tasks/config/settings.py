"""What all sections of a configuration share: their base, and bounds that no real run reaches. Torch-free."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import (
    ConfigDict,
    model_validator,
)

from rlhf_tasks.spec import Frozen
from rlhf_tasks.system.reading import shown

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


def auto_or_a_number(value: Any, what: str, most: int) -> Any:
    """`auto`, or a whole number from 1 to `most` that may be written as text. Raises ValueError, naming `what`."""
    is_number = isinstance(value, int | str) and re.fullmatch("[0-9]{1,10}", str(value)) is not None
    if value == "auto" or (is_number and 0 < int(value) <= most):
        return value if value == "auto" else int(value)
    raise ValueError(f"give auto, or {what} from 1 to {most}, found {shown(value)}")


def form(value: Any) -> str:
    """Which form a value has that is a path or stands in the configuration itself: "path" or "inline"."""
    return "path" if isinstance(value, str) else "inline"
