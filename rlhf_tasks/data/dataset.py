"""Rows of JSONL and Parquet files, in a stable order, one after another. Torch-free.

A data set is one file, a glob or a folder; several files are read in the order of their names. Rows are parsed while
the files are read, and none is kept: a data set may be larger than memory.
"""

import codecs
import glob
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow
import pyarrow.parquet

from rlhf_tasks.config.data import DataConfig
from rlhf_tasks.config.files import how_to_download
from rlhf_tasks.system.reading import DataError, one_line, reading

Row = Mapping[str, Any]
BadRow = Callable[[str, DataError], None]
"""Is told of a row that cannot be used, by its place; it may raise the error."""
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


def refuse(where: str, error: DataError) -> None:
    """A `BadRow` that raises the error."""
    raise error


class PlacedRow(NamedTuple):
    """A row and its place: the number of its file, from 0, and its line there (Parquet: its number), from 1."""

    file: int
    line: int
    where: str
    row: Row


class _File(Protocol):
    """One file's rows. `unread` gives each with its line; `read` parses one of these; `check_size` refuses a file
    made to fill memory or time, before a row of it is parsed."""

    @property
    def path(self) -> Path: ...
    def check_size(self) -> None: ...

    def unread(self) -> Iterator[tuple[int, Any]]: ...
    def read(self, line: int, unread: Any) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _JsonLines:
    """The lines of one JSONL file. Blank lines are no rows."""

    path: Path

    def check_size(self) -> None:
        if not self.path.name.endswith(".gz"):
            return
        with reading(self.path, "cannot be read", DataError), gzip.open(self.path, "rb") as file:
            _check_growth(self.path, map(len, iter(lambda: file.read(PIECE_BYTES), b"")))

    def unread(self) -> Iterator[tuple[int, bytes]]:
        path, opened = self.path, gzip.open if self.path.name.endswith(".gz") else open
        with reading(path, "cannot be read", DataError), opened(path, "rb") as file:
            for number in count(1):
                line = file.readline(MOST_LINE_BYTES + 2)
                if not line:
                    break
                if len(line.removesuffix(b"\n")) > MOST_LINE_BYTES:
                    raise DataError(f"{path}:{number}: the line has more than {MOST_LINE_BYTES:,} bytes.")
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield number, line

    def read(self, line: int, unread: bytes) -> dict[str, Any]:
        where = f"{self.path}:{line}"
        with reading(where, "not valid JSON", DataError):
            row = json.loads(unread.decode())
            if _HALF.search(unread):
                json.dumps(row, ensure_ascii=False).encode()  # refuses a half without the other
            if unread.count(b"[") + unread.count(b"{") > MAX_DEPTH and _is_deeper(row, MAX_DEPTH):
                raise RecursionError
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}.")
        return row


@dataclass(frozen=True)
class _Parquet:
    """The rows of one Parquet file."""

    path: Path

    def check_size(self) -> None:
        _check_growth(self.path, (batch.nbytes + ROW_BYTES * batch.num_rows for batch in self._batches()))

    def unread(self) -> Iterator[tuple[int, pyarrow.RecordBatch]]:
        before = 0
        for batch in self._batches():
            for i in range(batch.num_rows):
                yield before + i + 1, batch.slice(i, 1)
            before += batch.num_rows

    def _batches(self) -> Iterator[pyarrow.RecordBatch]:
        path = self.path
        with reading(path, "cannot be read as Parquet", DataError), pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_AT_ONCE):
                batch.validate(full=True)
                yield batch

    def read(self, line: int, unread: pyarrow.RecordBatch) -> dict[str, Any]:
        with reading(f"{self.path}:{line}", "cannot be read as Parquet", DataError):
            return unread.to_pylist()[0]


@dataclass(frozen=True)
class DataSet:
    """The files of a data set, with their columns renamed.

    name     as the configuration has it: files, globs or folders
    sources  number of the source of each file
    """

    name: str
    files: tuple[_File, ...]
    column_map: Mapping[str, str]
    sources: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the files' contents in order: it names the data in manifests and model cards."""
        digest = hashlib.sha256()
        for file in self.files:
            with reading(file.path, "cannot be read", DataError), file.path.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        return digest.hexdigest()

    def __iter__(self) -> Iterator[PlacedRow]:
        """All rows. Raises DataError for a malformed one, and where there is none at all."""
        return self.rows(refuse)

    def rows(self, bad: BadRow) -> Iterator[PlacedRow]:
        """All rows, where `bad` is told of those that cannot be read. Raises DataError where there is none at all."""
        self._check_sizes()
        return self._every(1, bad)

    def some(self, most: int, bad: BadRow = refuse) -> list[PlacedRow]:
        """At most so many of the rows, at even distances. Rows between them are not parsed."""
        return list(self._every(step_between(self.count(), most), bad))

    def count(self) -> int:
        """The number of rows; none is parsed."""
        self._check_sizes()
        return sum(1 for file in self.files for _ in file.unread())

    def _check_sizes(self) -> None:
        for file in self.files:
            file.check_size()

    def _every(self, step: int, bad: BadRow) -> Iterator[PlacedRow]:
        unread = ((number, *each) for number, file in enumerate(self.files) for each in file.unread())
        empty = first = True
        for number, line, content in islice(unread, 0, None, step):
            file, empty = self.files[number], False
            where = f"{file.path}:{line}"
            try:
                row = file.read(line, content)
            except DataError as error:
                bad(where, error)
                continue
            if first:
                self._check_renamed(row, where)
            first = False
            yield PlacedRow(number, line, where, {self.column_map.get(k, k): v for k, v in row.items()})
        if empty:
            raise DataError(f"{self.name}: has no rows.")

    def _check_renamed(self, row: Row, where: str) -> None:
        for name, renamed in self.column_map.items():
            if name not in row:
                raise DataError(
                    f"{where}: has no column {name!r}, which data.column_map renames to {renamed!r} "
                    f"(columns: {one_line(', '.join(row))})."
                )


def step_between(rows: int, most: int) -> int:
    """The distance between rows of which at most `most` are taken, at least 1."""
    return max(1, -(-rows // most))


def data_set(data: DataConfig) -> DataSet:
    """The files of a data set; nothing of them is read yet.

    Raises DataError when nothing matches or a file's kind is not known.
    """
    files: list[_File] = []
    sources: list[int] = []
    for number, source in enumerate(data.sources):
        for path in _paths(source.path):
            if not path.name.endswith(SUFFIXES):
                raise DataError(f"{path}: unknown kind of file. Use one of {', '.join(SUFFIXES)}.")
            files.append(_Parquet(path) if path.name.endswith(".parquet") else _JsonLines(path))
            sources.append(number)
    return DataSet(data.name, tuple(files), data.column_map, tuple(sources))


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


def _check_growth(path: Path, sizes: Iterable[int]) -> None:
    """Raises DataError where the parts of a file's rows have more bytes together than the file may hold."""
    most = max(FREE_BYTES, MOST_GROWTH * path.stat().st_size)
    if any(held > most for held in accumulate(sizes)):
        raise DataError(
            f"{path}: its rows have more than {most:,} bytes, {MOST_GROWTH} times the file's: it is made to "
            "fill memory. Store the rows uncompressed where they are your own."
        )


def _is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects stand in one another more than `most` deep."""
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deeper(each, most - 1) for each in inner)
