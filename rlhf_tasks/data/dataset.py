"""Rows of JSONL, JSON, CSV and Parquet files, in a stable order, one after another. Torch-free.

A data set is one file, a glob or a folder; several files are read in the order of their names. Rows are parsed while
the files are read, and none is kept: a data set may be larger than memory.
"""

import glob
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_tasks.config.data import DataConfig
from rlhf_tasks.config.files import how_to_download
from rlhf_tasks.data.row_files import KINDS, RowFile, row_file
from rlhf_tasks.system.reading import DataError, one_line, reading

Row = Mapping[str, Any]
BadRow = Callable[[str, DataError], None]
"""Is told of a row that cannot be used, by its place; it may raise the error."""
OF_FOLDERS = ((".jsonl", ".jsonl.gz", ".parquet"), (".csv",), (".json",))
"""Ends of the names of a folder's files that are its rows; those of a kind only where there are none of the kinds
before it: beside Parquet files there are JSON files that describe them."""
GLOB_S = 20.0  # a data set's files are in a few folders
MOST_MATCHES = 100_000
_GLOB = """
import glob, itertools, os, sys
for path in itertools.islice(glob.iglob(sys.argv[1], recursive=True), int(sys.argv[2])):
    sys.stdout.buffer.write(os.fsencode(path) + b"\\0")
"""

CONVERSATIONS = ("messages", "conversations")


def refuse(where: str, error: DataError) -> None:
    """A `BadRow` that raises the error."""
    raise error


class PlacedRow(NamedTuple):
    """A row and its place: the number of its file, from 0, and its line there, from 1 (Parquet, a JSON list: its
    number)."""

    file: int
    line: int
    where: str
    row: Row


@dataclass(frozen=True)
class DataSet:
    """The files of a data set, with their columns renamed.

    name     as the configuration has it: files, globs or folders
    sources  number of the source of each file
    """

    name: str
    files: tuple[RowFile, ...]
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

    def first(self) -> PlacedRow | None:
        """The first row that can be read, of files whose sizes were checked before; None where there is none."""
        return next(self._every(1, lambda where, error: None), None)

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
            yield PlacedRow(number, line, where, self._named(row))
        if empty:
            raise DataError(f"{self.name}: has no rows.")

    def _check_renamed(self, row: Row, where: str) -> None:
        for name, renamed in self.column_map.items():
            if name not in row:
                raise DataError(
                    f"{where}: has no column {name!r}, which data.column_map renames to {renamed!r} "
                    f"(columns: {one_line(', '.join(row))})."
                )
            if renamed != name and any(self.column_map.get(k, k) == renamed for k in row if k != name):
                raise DataError(
                    f"{where}: data.column_map renames {name!r} to {renamed!r}, but another column has that name. "
                    "Rename that one, too."
                )

    def _named(self, row: Row) -> Row:
        """A row by the names that algorithms read: those that `column_map` gives, and for Alpaca's columns others
        beside them. Alpaca's `input` stands in the line after its `instruction`."""
        named = {self.column_map.get(name, name): value for name, value in row.items()}
        if named.get("instruction") is not None and named.keys().isdisjoint(("prompt", *CONVERSATIONS)):
            named["prompt"] = named["instruction"]
            if "output" in named:
                named.setdefault("completion", named["output"])
        elif self.column_map.get("instruction") != "prompt":
            return named
        more = named.get("input")
        if isinstance(more, str) and more.strip() and isinstance(named.get("prompt"), str):
            named["prompt"] = f"{named['prompt']}\n{more}"
        return named


def step_between(rows: int, most: int) -> int:
    """The distance between rows of which at most `most` are taken, at least 1."""
    return max(1, -(-rows // most))


def data_set(data: DataConfig) -> DataSet:
    """The files of a data set; nothing of them is read yet.

    Raises DataError when nothing matches or a file's kind is not known.
    """
    files: list[RowFile] = []
    sources: list[int] = []
    for number, source in enumerate(data.sources):
        for path in _paths(source.path):
            files.append(row_file(path))
            sources.append(number)
    return DataSet(data.name, tuple(files), data.column_map, tuple(sources))


def _paths(pattern: str) -> list[Path]:
    """The files that a path, glob or folder means, in the order of their names."""
    path = Path(pattern)
    with reading(path, "no path", DataError, "Name files that this account can read."):
        if path.is_file():
            return [path]
        files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else None
    if files is not None:
        for suffixes in OF_FOLDERS:
            if found := [p for p in files if p.name.endswith(suffixes)]:
                return found
        raise DataError(f"{path}: the folder has no {', '.join(KINDS)} file.")
    found = list[Path]()
    for match in sorted(set(_matches(pattern))):  # two ** find a path twice
        with reading(match, "no path", DataError, "Let this account read it, or name fewer files."):
            found += [match] if match.is_file() else []
    if not found:
        raise DataError(
            f"{pattern}: no such file or folder, and no file matches it as a glob."
            f"{how_to_download(pattern, 'dataset')}"
        )
    return found


def _matches(pattern: str) -> list[Path]:
    """What matches a glob, found by a process of its own, since a glob that goes through a disk cannot be stopped."""
    if not glob.has_magic(pattern):
        return []
    try:
        command = [sys.executable, "-I", "-S", "-c", _GLOB, pattern, str(MOST_MATCHES + 1)]
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=GLOB_S, check=True)
    except subprocess.TimeoutExpired:
        raise DataError(
            f"{pattern}: to find its matches takes more than {GLOB_S:g} s. Name a folder further down; ** goes "
            "through all folders below it."
        ) from None
    found = [Path(os.fsdecode(path)) for path in done.stdout.split(b"\0")[:-1]]
    if len(found) > MOST_MATCHES:
        raise DataError(f"{pattern}: matches more than {MOST_MATCHES:,} paths. Name fewer files.")
    return found
