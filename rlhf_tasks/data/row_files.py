"""The files of a data set, a class for each kind: what gives their rows, one after another. Torch-free.

Rows are parsed while a file is read, and none is kept: a file may be larger than memory.
"""

import codecs
import csv
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow
import pyarrow.parquet

from rlhf_tasks.system.reading import DataError, reading, shown

MOST_LINE_BYTES = 16 << 20  # of a row: no model reads as long a text
FREE_BYTES, MOST_GROWTH = 64 << 20, 100
"""A file may hold so many bytes of rows, or so many times its own: text shrinks to a tenth, seldom to a fiftieth;
more is a file made to fill memory."""
MAX_DEPTH = 64  # of a row's lists and objects in one another
ROW_BYTES = 8  # of a row at least: Parquet's columns of nothing have none
PIECE_BYTES = 1 << 20  # read at once
ROWS_AT_ONCE = 256  # of Parquet

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
            for batch in file.iter_batches(ROWS_AT_ONCE):
                batch.validate(full=True)
                yield batch

    def read(self, line: int, unread: pyarrow.RecordBatch) -> dict[str, Any]:
        with reading(f"{self.path}:{line}", "cannot be read as Parquet", DataError):
            return unread.to_pylist()[0]


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
                        f"behind row {number} stands {shown(mark)}, neither a comma nor the list's end"
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
        """The same, and go on behind it."""
        mark = self.next()
        self._at += 1
        return mark

    def value(self, where: str) -> bytes:
        """The text of the next value, and go on behind it. Raises ValueError where it is none or too long."""
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
