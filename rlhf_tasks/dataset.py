"""Rows of JSONL and Parquet files, in a stable order, found by global sample id. Torch-free.

A data set is one file, a glob or a folder; several files are read in the order of their names. Rows are kept
as they are stored (raw lines, Arrow columns) and parsed when asked for: each process needs little more
memory than the files have bytes.
"""

import codecs
import glob
import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from rlhf_tasks.config_parts import DataConfig
from rlhf_tasks.parallel.random import permutation

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


class DataError(ValueError):
    """A data set that cannot be used: one sentence that names `file:line` (Parquet: `file:row`)."""


class _File(Protocol):
    """One file's rows; `where` is how an error names row i."""

    def __len__(self) -> int: ...
    def row(self, i: int) -> dict[str, Any]: ...
    def where(self, i: int) -> str: ...


class _JsonLines:
    """Lines of one JSONL file, kept as bytes. Blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = _read_bytes(path).removeprefix(codecs.BOM_UTF8)
        lines = content.split(b"\n")
        self._numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
        self._lines = [lines[number - 1] for number in self._numbers]
        for i in range(len(self)):
            self.row(i)

    def __len__(self) -> int:
        return len(self._lines)

    def where(self, i: int) -> str:
        return f"{self.path}:{self._numbers[i]}"

    def row(self, i: int) -> dict[str, Any]:
        try:
            row = json.loads(self._lines[i].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(i)}: not UTF-8 ({error.reason} at byte {error.start}).") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{self.where(i)}: not valid JSON ({error}).") from None
        if not isinstance(row, dict):
            raise DataError(f"{self.where(i)}: expected a JSON object, found {type(row).__name__}.")
        return row


class _Parquet:
    """Rows of one Parquet file, kept as Arrow columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: cannot be read as Parquet ({error}).") from None

    def __len__(self) -> int:
        return self._table.num_rows

    def where(self, i: int) -> str:
        return f"{self.path}:{i + 1}"

    def row(self, i: int) -> dict[str, Any]:
        return self._table.slice(i, 1).to_pylist()[0]


@dataclass(frozen=True)
class Rows(Sequence[Row]):
    """All rows of a data set, with its columns renamed.

    digest  SHA-256 of the files' contents in order: it names the data in manifests and model cards
    """

    files: tuple[_File, ...]
    column_map: Mapping[str, str]
    digest: str

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(len(file) for file in self.files)]

    @cached_property
    def _orders(self) -> dict[tuple[int, int], NDArray[np.int64]]:
        return {}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  one row, never a slice
        file, i = self._locate(index)
        return {self.column_map.get(name, name): value for name, value in file.row(i).items()}

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        """`file:line` of a row, for errors."""
        file, i = self._locate(index)
        return file.where(i)

    def row_of(self, sample_id: int, seed: int) -> int:
        """The row that a global sample id means: position in the epoch's own random order of all rows."""
        epoch, position = divmod(sample_id, len(self))
        order = self._orders.get((seed, epoch))
        if order is None:
            while len(self._orders) > 1:  # an iteration touches two epochs at most where one begins
                self._orders.pop(next(iter(self._orders)))
            order = self._orders[seed, epoch] = permutation(len(self), seed, "rows", epoch)
        return int(order[position])

    def _locate(self, index: int) -> tuple[_File, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.files[place], index - self._starts[place]


def load_rows(data: DataConfig) -> Rows:
    """Read and check all files of a data set.

    Raises DataError when nothing matches, a file's kind is not known, a row is malformed, a renamed column is
    nowhere, or there is no row at all.
    """
    paths = _paths(data.train)
    digest = hashlib.sha256()
    files: list[_File] = []
    for path in paths:
        if not path.name.endswith(SUFFIXES):
            raise DataError(f"{path}: unknown kind of file. Use one of {', '.join(SUFFIXES)}.")
        content = hashlib.sha256(_read_bytes(path, raw=True))
        digest.update(content.digest())
        files.append(_Parquet(path) if path.name.endswith(".parquet") else _JsonLines(path))
    rows = Rows(tuple(file for file in files if len(file)), data.column_map, digest.hexdigest())
    if not len(rows):
        raise DataError(f"{data.train}: has no rows.")
    for name, renamed in data.column_map.items():
        if name not in rows.files[0].row(0):
            raise DataError(
                f"{rows.where(0)}: has no column {name!r}, which data.column_map renames to {renamed!r} "
                f"(columns: {', '.join(rows.files[0].row(0))})."
            )
    return rows


def _paths(pattern: str) -> list[Path]:
    """The files that a path, glob or folder means, in the order of their names."""
    path = Path(pattern)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.is_file() and p.name.endswith(SUFFIXES))
        if not found:
            raise DataError(f"{path}: the folder has no {', '.join(SUFFIXES)} file.")
        return found
    found = sorted(Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
    if not found:
        raise DataError(f"{pattern}: no such file or folder, and no file matches it as a glob.")
    return found


def _read_bytes(path: Path, raw: bool = False) -> bytes:
    """A file's content, decompressed unless `raw`."""
    try:
        if path.name.endswith(".gz") and not raw:
            return gzip.decompress(path.read_bytes())
        return path.read_bytes()
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from None
