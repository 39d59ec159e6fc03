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
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from rlhf_tasks.config.files import how_to_download
from rlhf_tasks.config.sections import DataConfig
from rlhf_tasks.system.counter_random import permutation
from rlhf_tasks.system.reading import DataError, one_line, reading

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")

MOST_LINE_BYTES = 16 << 20  # of a row: no model reads as long a text
FREE_BYTES, MOST_GROWTH = 64 << 20, 100
"""A file may hold so many bytes of rows, or so many times its own: text shrinks to a tenth, seldom to a fiftieth;
more is a file made to fill memory."""
MAX_DEPTH = 64  # of a row's lists and objects in one another
ROW_BYTES = 8  # of a row at least: Parquet's columns of nothing have none
PIECE_BYTES = 1 << 20  # read at once
ROWS_AT_ONCE = 256  # of Parquet

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a character beyond 16 bits, written as an escape


class _File(Protocol):
    """One file's rows; `where` is how an error names row i."""

    def __len__(self) -> int: ...
    def row(self, i: int) -> dict[str, Any]: ...
    def where(self, i: int) -> str: ...


class _JsonLines:
    """Lines of one JSONL file, kept as bytes one after another. Blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self.path, self._content = path, _decompressed(path)
        self._numbers, self._starts, self._ends = array("q"), array("q"), array("q")
        start = len(codecs.BOM_UTF8) if self._content.startswith(codecs.BOM_UTF8) else 0
        for number in count(1):
            if start >= len(self._content):
                break
            end = self._content.find(b"\n", start)
            end = len(self._content) if end < 0 else end
            if end - start > MOST_LINE_BYTES:
                raise DataError(f"{path}:{number}: the line has more than {MOST_LINE_BYTES:,} bytes.")
            if self._content[start:end].strip():
                self._numbers.append(number)
                self._starts.append(start)
                self._ends.append(end)
            start = end + 1
        for i in range(len(self)):
            self.row(i)

    def __len__(self) -> int:
        return len(self._numbers)

    def where(self, i: int) -> str:
        return f"{self.path}:{self._numbers[i]}"

    def row(self, i: int) -> dict[str, Any]:
        line = self._content[self._starts[i] : self._ends[i]]
        with reading(self.where(i), "not valid JSON", DataError):
            row = json.loads(line.decode())
            if _HALF.search(line):
                json.dumps(row, ensure_ascii=False).encode()  # refuses a half without the other
            if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _is_deeper(row, MAX_DEPTH):
                raise RecursionError
        if not isinstance(row, dict):
            raise DataError(f"{self.where(i)}: expected a JSON object, found {type(row).__name__}.")
        return row


class _Parquet:
    """Rows of one Parquet file, kept as Arrow columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        batches, held, most = list[pyarrow.RecordBatch](), 0, _most_bytes(path)
        with reading(path, "cannot be read as Parquet", DataError), pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_AT_ONCE):
                batches.append(batch)
                held += batch.nbytes + ROW_BYTES * batch.num_rows
                if held > most:
                    raise DataError(_too_much(path))
            self._table = pyarrow.Table.from_batches(batches, file.schema_arrow)
            self._table.validate(full=True)

    def __len__(self) -> int:
        return self._table.num_rows

    def where(self, i: int) -> str:
        return f"{self.path}:{i + 1}"

    def row(self, i: int) -> dict[str, Any]:
        with reading(self.where(i), "cannot be read as Parquet", DataError):
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
        with reading(path, "cannot be read", DataError), path.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
        files.append(_Parquet(path) if path.name.endswith(".parquet") else _JsonLines(path))
    rows = Rows(tuple(file for file in files if len(file)), data.column_map, digest.hexdigest())
    if not len(rows):
        raise DataError(f"{data.train}: has no rows.")
    for name, renamed in data.column_map.items():
        if name not in rows.files[0].row(0):
            raise DataError(
                f"{rows.where(0)}: has no column {name!r}, which data.column_map renames to {renamed!r} "
                f"(columns: {one_line(', '.join(rows.files[0].row(0)))})."
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
        raise DataError(
            f"{pattern}: no such file or folder, and no file matches it as a glob."
            f"{how_to_download(pattern, 'dataset')}"
        )
    return found


def _decompressed(path: Path) -> bytearray:
    """A file's content. Raises DataError for one that cannot be read, or grows too much."""
    content, most = bytearray(), _most_bytes(path)
    opened = gzip.open if path.name.endswith(".gz") else open
    with reading(path, "cannot be read", DataError), opened(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            content += piece
            if len(content) > most:
                raise DataError(_too_much(path))
    return content


def _most_bytes(path: Path) -> int:
    """How many bytes a file's rows may have."""
    return max(FREE_BYTES, MOST_GROWTH * path.stat().st_size)


def _too_much(path: Path) -> str:
    return (
        f"{path}: its rows have more than {_most_bytes(path):,} bytes, {MOST_GROWTH} times the file's: it is made to "
        "fill memory. Store the rows uncompressed where they are your own."
    )


def _is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects stand in one another more than `most` deep."""
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deeper(each, most - 1) for each in inner)
