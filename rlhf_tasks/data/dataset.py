"""Rows of JSONL, JSON, CSV and Parquet files, in a stable order, one after another. Torch-free.

A data set is one file, a glob or a folder; several files are read in the order of their names. Rows are parsed while
the files are read, and none is kept: a data set, and each of its files, may be larger than memory.
"""

import codecs
import csv
import glob
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import pyarrow
import pyarrow.parquet

from prefect_rlhf.rlhf_tasks.config.data import DataConfig
from prefect_rlhf.rlhf_tasks.config.hub_names import FORM_OF_DATA, is_address
from prefect_rlhf.rlhf_tasks.config.row_objects import Rows
from prefect_rlhf.rlhf_tasks.system.reading import DataError, one_line, reading, shown

MOST_LINE_BYTES = 16 << 20  # of a row: no model reads as long a text
FREE_BYTES, MOST_GROWTH = 64 << 20, 100
"""A file may hold so many bytes of rows, or so many times its own: text shrinks to a tenth, seldom to a fiftieth;
more is a file made to fill memory."""
MAX_DEPTH = 64  # of a row's lists and objects in one another
ROW_BYTES = 8  # of a row at least: Parquet's columns of nothing have none
PIECE_BYTES = 1 << 20  # read at once
ROWS_AT_ONCE = 256  # of Parquet
HASH_BYTES = 16  # of a row

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a character beyond 16 bits, written as an escape
_SPACES, _DECODER = re.compile(r"[ \t\r\n]*"), json.JSONDecoder()


class RowFile(Protocol):
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
            for column in file.schema_arrow:
                if _has_bytes(column.type):
                    raise DataError(
                        f"{path}: column {shown(column.name)} holds images, audio or other bytes, and models read "
                        "text alone. Choose a data set of text, or write a copy without that column."
                    )
            for batch in file.iter_batches(ROWS_AT_ONCE):
                batch.validate(full=True)
                yield batch

    def read(self, line: int, unread: pyarrow.RecordBatch) -> dict[str, Any]:
        with reading(f"{self.path}:{line}", "cannot be read as Parquet", DataError):
            return unread.to_pylist()[0]


def _has_bytes(kind: pyarrow.DataType) -> bool:
    """Whether a type holds bytes, which are no text, itself or in its parts."""
    is_bytes = any(
        test(kind)
        for test in (
            pyarrow.types.is_binary,
            pyarrow.types.is_large_binary,
            pyarrow.types.is_fixed_size_binary,
            pyarrow.types.is_binary_view,
        )
    )
    parts = getattr(kind, "num_fields", 0)
    return is_bytes or any(_has_bytes(kind.field(place).type) for place in range(parts))


@dataclass(frozen=True)
class _Json:
    """The objects in the list that one JSON file holds, by their numbers; or its lines, where each is an object."""

    path: Path

    def check_size(self) -> None:
        """A text holds no more than its file."""

    def unread(self) -> Iterator[tuple[int, bytes]]:
        path = self.path
        with reading(path, "not valid JSON", DataError), path.open("rb") as file:
            is_list = _Scan(file).next() == "["
        if not is_list:
            yield from _JsonLines(path).unread()
            return
        with reading(path, "not valid JSON", DataError), path.open("rb") as file:
            scan = _Scan(file)
            scan.take()
            empty = scan.next() == "]"
            for number in count(1):
                if not empty:
                    yield number, scan.value(f"{path}:{number}")
                mark = scan.take()
                if mark == "]":
                    break
                if mark != ",":
                    raise ValueError(
                        f"after row {number} stands {shown(mark)}, neither a comma nor the list's end"
                    )
            if scan.next():
                raise ValueError("more text follows the list")

    def read(self, line: int, unread: bytes) -> dict[str, Any]:
        return _JsonLines(self.path).read(line, unread)


class _Scan:
    """Reads a JSON text from a file, value by value, of which no more than one is held."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._decode = file, codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text, self._at = "", 0

    def next(self) -> str:
        """The next character that is no space; none at the end."""
        while True:
            self._at = _SPACES.match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def take(self) -> str:
        """The same, and continue after it."""
        mark = self.next()
        self._at += 1
        return mark

    def value(self, where: str) -> bytes:
        """The text of the next value, and continue after it. Raises ValueError where it is none or too long."""
        self.next()
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
                break
            except json.JSONDecodeError as fault:
                if len(self._text) - self._at > MOST_LINE_BYTES:
                    raise DataError(
                        f"{where}: the row has more than {MOST_LINE_BYTES:,} bytes, or is not valid JSON."
                    ) from None
                if not self._more():
                    raise DataError(f"{where}: not valid JSON: {fault.msg}.") from None
        text = self._text[self._at : end]
        self._at = end
        return text.encode()

    def _more(self) -> bool:
        """Read a piece more. Whether there was one."""
        piece = self._file.read(PIECE_BYTES)
        self._text, self._at = self._text[self._at :] + self._decode(piece, not piece), 0
        return bool(piece)


@dataclass(frozen=True)
class _Csv:
    """The rows of one CSV file, below a line of the columns' names. Every value is text."""

    path: Path

    def check_size(self) -> None:
        """A text holds no more than its file."""

    def unread(self) -> Iterator[tuple[int, tuple[list[str], list[str]]]]:
        csv.field_size_limit(MOST_LINE_BYTES)  # of the process: `taken` bounds a whole row
        path, taken = self.path, 0
        with reading(path, "not valid CSV", DataError) as place, path.open("rb") as file:

            def lines() -> Iterator[str]:
                nonlocal taken
                while line := file.readline(MOST_LINE_BYTES + 1):
                    taken += len(line)
                    if taken > MOST_LINE_BYTES:
                        raise DataError(
                            f"{path}:{place.line}: the row has more than {MOST_LINE_BYTES:,} bytes."
                        )
                    yield line.removeprefix(codecs.BOM_UTF8).decode()

            rows, names = csv.reader(lines(), strict=True), list[str]()
            while True:
                place.line, taken = rows.line_num + 1, 0
                cells = next(rows, None)
                if cells is None:
                    break
                if names and cells:
                    yield place.line, (names, cells)
                names = names or cells

    def read(self, line: int, unread: tuple[list[str], list[str]]) -> dict[str, Any]:
        names, cells = unread
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{self.path}: its first line names the column {shown(twice)} twice. Rename one.")
        if len(cells) != len(names):
            raise DataError(
                f"{self.path}:{line}: has {len(cells)} values, but the first line names {len(names)} columns. Set "
                "values that hold commas or line ends in quotes."
            )
        return dict(zip(names, cells, strict=True))


KINDS: dict[str, Callable[[Path], RowFile]] = {
    ".jsonl": _JsonLines,
    ".jsonl.gz": _JsonLines,
    ".parquet": _Parquet,
    ".json": _Json,
    ".csv": _Csv,
}
"""By the end of a file's name."""


def row_file(path: Path) -> RowFile:
    """Raises DataError where the file's kind is not known."""
    for suffix, kind in KINDS.items():
        if path.name.endswith(suffix):
            return kind(path)
    raise DataError(f"{path}: unknown kind of file. Use one of {', '.join(KINDS)}.")


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
SPEAKER_OF = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}
"""Who says the text of a column, where `as_messages` makes a message of it."""


def refuse(where: str, error: DataError) -> None:
    """A `BadRow` that raises the error."""
    raise error


class PlacedRow(NamedTuple):
    """A row and its place: the number of its file, from 0, and its line there, from 1 (Parquet, a JSON list: its
    number).

    row  its columns, renamed as the configuration says; raw: as the file has it
    """

    file: int
    line: int
    where: str
    row: Row
    raw: Row


@dataclass(frozen=True)
class DataSet:
    """The files of a data set, with their columns renamed.

    name         as the configuration has it: files, globs or folders
    as_messages  whether texts of `SPEAKER_OF`'s columns become messages
    sources      number of the source of each file
    """

    name: str
    files: tuple[RowFile, ...]
    column_map: Mapping[str, str]
    as_messages: bool
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
            named = self._named(row)
            yield PlacedRow(number, line, where, _spoken(named) if self.as_messages else named, row)
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


def _spoken(row: Row) -> Row:
    """The row with a message in the place of each text that somebody says. Without a prompt it stays as it is: its
    answers are whole conversations then."""
    if row.get("prompt") is None:
        return row
    return {
        name: [{"role": SPEAKER_OF[name], "content": value}]
        if name in SPEAKER_OF and isinstance(value, str)
        else value
        for name, value in row.items()
    }


def row_hash(row: Row) -> bytes:
    """HASH_BYTES that name a row's content as its file has it, whatever its place and the order of its columns."""
    text = json.dumps(row, sort_keys=True, default=str, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=HASH_BYTES).digest()


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
        for path in data.files_of(source.path) or _paths(source.path):
            files.append(row_file(path))
            sources.append(number)
    return DataSet(data.name, tuple(files), data.column_map, data.as_messages, tuple(sources))


def _paths(pattern: str) -> list[Path]:
    """The files that a path, glob or folder means, in the order of their names."""
    if is_address(pattern):
        raise DataError(f"{pattern}: neither a name of a data set nor a path.{FORM_OF_DATA}")
    if isinstance(pattern, Rows):
        raise DataError(
            f"{pattern} stand in the configuration itself, as only train(...) in Python takes them. Write them to a "
            "JSONL file, one row a line, and name that file."
        )
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
        raise DataError(f"{pattern}: no such file or folder, and no file matches it as a glob.{FORM_OF_DATA}")
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
