"""A data set as token ids: one Arrow file, mapped into memory, from which ranks read their samples. Torch-free.

Every value of a row is a list of numbers: token ids are int32, masks and UTF-8 text are uint8. Batches of the file
hold ROWS rows each and are checked when they are first read. The last batch has no rows; its metadata says what the
file holds.
"""

import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlhf_tasks.data.rows import DatasetValue
from rlhf_tasks.system.counter_random import permutation
from rlhf_tasks.system.reading import DataError, reading

Numbers = NDArray[Any]

ROWS = 1024  # of a batch of the file
_FACTS = b"prefect_rlhf.rows"
_OWN = ("#file", "#line", "#longest", "#tokens")  # columns beside the keys, int32
_DAMAGED = "Remove it; the next run or validate makes it anew."


class TokenRow(NamedTuple):
    """A row as it is stored.

    file, line       its place; the file by its number
    columns          the names of the row's columns
    longest, tokens  tokens of its longest list of ids, and of all
    values           by the keys of the data set
    """

    file: int
    line: int
    columns: tuple[str, ...]
    longest: int
    tokens: int
    values: Mapping[str, DatasetValue]


class TokenFile:
    """The rows of a token file.

    columns  names of all columns of the data, in the order in which they first appear
    digest   of the data: `DataSet.digest`
    """

    def __init__(self, path: Path, reader: pa.RecordBatchFileReader, facts: Mapping[str, Any]) -> None:
        self.path, self._reader = path, reader
        self.columns: tuple[str, ...] = tuple(facts["columns"])
        self.digest: str = facts["digest"]
        self._rows: int = facts["rows"]
        self._files: list[str] = facts["files"]
        self._kinds: dict[str, str] = facts["kinds"]
        self._checksums: list[int] = facts["checksums"]
        self._orders: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._checked = set[int]()

    @staticmethod
    def open(path: Path) -> "TokenFile":
        """Raises DataError for a file that is no token file."""
        with reading(path, "not a file of tokenised rows", DataError, _DAMAGED):
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            last = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
            return TokenFile(path, reader, json.loads(last.custom_metadata[_FACTS]))

    def __len__(self) -> int:
        return self._rows

    def values(self, index: int) -> dict[str, Numbers | str]:
        """The values of a row by key: int32 token ids [tokens], a bool mask [tokens], or text."""
        batch, place = self._batch(index // ROWS), index % ROWS
        found: dict[str, Numbers | str] = {}
        for key, kind in self._kinds.items():
            numbers = batch.column(key)[place].values.to_numpy()
            match kind:
                case "text":
                    found[key] = numbers.tobytes().decode()
                case "mask":
                    found[key] = numbers.astype(np.bool_)
                case _:
                    found[key] = numbers
        return found

    def where(self, index: int) -> str:
        """`file:line` of a row, for errors."""
        batch, place = self._batch(index // ROWS), index % ROWS
        return f"{self._files[batch.column('#file')[place].as_py()]}:{batch.column('#line')[place].as_py()}"

    @cached_property
    def longest(self) -> NDArray[np.int32]:
        """The tokens of each row's longest list of ids, [rows]."""
        return self._own("#longest")

    @cached_property
    def tokens(self) -> NDArray[np.int32]:
        """The tokens of all lists of ids of each row, [rows]."""
        return self._own("#tokens")

    def row_of(self, sample_id: int, seed: int) -> int:
        """The row that a global sample id means: position in the epoch's own random order of all rows."""
        epoch, position = divmod(sample_id, len(self))
        order = self._orders.get((seed, epoch))
        if order is None:
            while len(self._orders) > 1:  # an iteration touches two epochs at most where one begins
                self._orders.pop(next(iter(self._orders)))
            order = self._orders[seed, epoch] = permutation(len(self), seed, "rows", epoch)
        return int(order[position])

    def _own(self, column: str) -> NDArray[np.int32]:
        batches = range(len(self._checksums))
        return np.concatenate([self._batch(number).column(column).to_numpy() for number in batches])

    def _batch(self, number: int) -> pa.RecordBatch:
        with reading(self.path, "not a file of tokenised rows", DataError, _DAMAGED):
            batch = self._reader.get_batch(number)
            if number not in self._checked and _checksum(batch) != self._checksums[number]:
                raise DataError(f"{self.path}: is damaged. {_DAMAGED}")
        self._checked.add(number)
        return batch


def write_token_file(path: Path, digest: str, files: Sequence[str], rows: Iterable[TokenRow]) -> None:
    """Write rows to a token file; it appears whole or not at all. Memory for ROWS rows is needed, however many.

    digest, files  the data set's digest, and the names of its files
    Raises DataError where the values of a key are of several kinds or no 32-bit integers, and where the file cannot
    be written.
    """
    rows = iter(rows)
    first = list(islice(rows, ROWS))  # before a folder is made: most of what may be wrong shows here
    facts = _Facts(digest, files, first)
    with reading(path, "cannot be written", DataError, "Name another output_dir, or free some space."):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file, pa.ipc.new_file(file, facts.schema) as writer:
            for batch in facts.batches(chain(first, rows)):
                with reading(path, "cannot be written", DataError, "Free some space."):
                    writer.write_batch(batch)
            last = pa.RecordBatch.from_pylist([], facts.schema)
            writer.write_batch(last, custom_metadata=facts.metadata())
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


class _Facts:
    """What a token file's last batch says, gathered while the others are made."""

    def __init__(self, digest: str, files: Sequence[str], first: Sequence[TokenRow]) -> None:
        self.digest, self.files = digest, list(files)
        self.kinds = {key: _kind([row.values[key] for row in first]) or "ids" for key in first[0].values}
        self.columns: dict[str, None] = {}
        self.checksums: list[int] = []
        self.n_rows = 0
        types = {key: pa.int32() if kind == "ids" else pa.uint8() for key, kind in self.kinds.items()}
        keys = [pa.field(key, pa.list_(type_)) for key, type_ in types.items()]
        self.schema = pa.schema([*keys, *(pa.field(name, pa.int32()) for name in _OWN)])

    def batches(self, rows: Iterator[TokenRow]) -> Iterator[pa.RecordBatch]:
        while taken := list(islice(rows, ROWS)):
            arrays = []
            for field, (key, kind) in zip(self.schema, self.kinds.items(), strict=False):
                values = [row.values[key] for row in taken]
                if _kind(values) not in (kind, "") or " or " in kind:
                    raise DataError(f"the rows' values of the key {key!r} are of several kinds.")
                with reading(f"the rows' values of the key {key!r}", "not 32-bit integers", DataError):
                    arrays.append(_array(values, field.type))
            places = [(row.file, row.line, row.longest, row.tokens) for row in taken]
            arrays += [pa.array(column, pa.int32()) for column in zip(*places, strict=True)]
            for row in taken:
                self.columns.update(dict.fromkeys(row.columns))
            self.n_rows += len(taken)
            batch = pa.record_batch(arrays, schema=self.schema)
            self.checksums.append(_checksum(batch))
            yield batch

    def metadata(self) -> dict[bytes, bytes]:
        said = {
            "digest": self.digest,
            "files": self.files,
            "kinds": self.kinds,
            "columns": list(self.columns),
            "checksums": self.checksums,
            "rows": self.n_rows,
        }
        return {_FACTS: json.dumps(said).encode()}


def _kind(values: Sequence[DatasetValue]) -> str:
    """What values of one key are: text, a mask, or ids; several words where they differ, "" where all are empty."""
    kinds = {str: "text", bool: "mask", int: "ids"}
    types = {str if isinstance(value, str) else type(value[0]) for value in values if value or value == ""}
    return " or ".join(sorted(kinds.get(type_, type_.__name__) for type_ in types))


def _array(values: Sequence[DatasetValue], type_: pa.ListType) -> pa.ListArray:
    """[values] lists of numbers."""
    parts = [value.encode() if isinstance(value, str) else value for value in values]
    flat = np.array(list(chain.from_iterable(parts)), type_.value_type.to_pandas_dtype())
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, flat, type=type_)


def _checksum(batch: pa.RecordBatch) -> int:
    """CRC-32 of a batch's numbers."""
    checksum = 0
    for column in batch.columns:
        parts = (column.offsets, column.values) if isinstance(column, pa.ListArray) else (column,)
        for part in parts:
            checksum = zlib.crc32(part.to_numpy(), checksum)
    return checksum
