"""Rows that stand in a configuration as objects of Python's, until a run folder has them as a file. Torch-free."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, shown


class Rows(str):
    """Rows, with words for them, such as `64 rows of a Dataset`."""

    rows: Iterable[Mapping[str, Any]]

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # other processes read the file


def rows_or(value: Any, validate: Callable[[Any], Any]) -> Any:
    """Rows, or what else a field may have, as its validator `validate` makes it."""
    if isinstance(value, Rows):
        return value
    rows = _as_rows(value)
    return validate(value) if rows is None else rows


def _as_rows(value: Any) -> Rows | None:
    """A list of dicts, or a `datasets.Dataset` (whatever has `column_names` and a length), as Rows; None for anything
    else. Raises ConfigError for a data set in splits, and for one without an end."""
    is_data_set = hasattr(value, "column_names")
    if is_data_set and isinstance(value, Mapping):
        splits = ", ".join(map(str, value))
        raise ConfigError(f"a data set in splits ({splits}): give the rows of one, such as dataset['train'].")
    if is_data_set and not hasattr(value, "__len__"):
        raise ConfigError(
            f"a {type(value).__name__} has no end: give a data set that is loaded as a whole, such as "
            "Dataset.from_list(list(streamed.take(1000)))."
        )
    of_dicts = isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value)
    if of_dicts and all({"path"} <= row.keys() <= {"path", "weight"} for row in value):
        return None  # sources in a form that other systems have: the field's own sentence refuses them
    if not is_data_set and not of_dicts:
        return None
    rows = Rows(f"{len(value)} rows of a {type(value).__name__}")
    rows.rows = value
    return rows


def write_rows(rows: Rows, folder: Path) -> Path:
    """The JSONL file of rows in a run folder, whose name has their digest. Raises ConfigError for a row that JSON
    cannot hold, and OSError."""
    fresh, digest = folder / f".rows.{uuid4().hex}", hashlib.sha256()
    try:
        with fresh.open("wb") as file:
            for number, row in enumerate(rows.rows):
                line = _line(number, row)
                digest.update(line)
                file.write(line)
        return fresh.rename(folder / f"rows-{digest.hexdigest()[:16]}.jsonl")
    finally:
        fresh.unlink(missing_ok=True)


def _line(number: int, row: Mapping[str, Any]) -> bytes:
    for column, value in row.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"row {number}, column {column!r}: {shown(value)} is no text, number, list or dict. Leave the column "
                "out, or convert it."
            ) from None
    return json.dumps(dict(row), ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
