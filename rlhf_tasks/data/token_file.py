"""A data set as token ids: one Arrow file, mapped into memory, from which ranks read their samples. Torch-free.

Every value of a row is a list of numbers: token ids are int32, masks and UTF-8 text are uint8, other numbers float64.
Batches of the file hold BATCH rows each and are checked when they are first read. The last batch has no rows; its
metadata says what the file holds.

Several sources make one stream of samples. The first n samples hold floor(n * w_0 / (w_0 + w_1 + ...)) samples of
source 0; the others share what is left in the same way. So every stretch of the stream has the weights' shares, to
within a few samples, and a sample's source and place in it are a function of its number alone. Each source is passed
through in epochs of its own.
"""

import json
import os
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from fractions import Fraction
from functools import cache
from itertools import accumulate, chain, islice
from math import ceil, floor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from prefect_rlhf.rlhf_tasks.data.dataset import HASH_BYTES, step_between
from prefect_rlhf.rlhf_tasks.data.rows import DatasetValue
from prefect_rlhf.rlhf_tasks.system.counter_random import permutation
from prefect_rlhf.rlhf_tasks.system.durable import replace_file, sync
from prefect_rlhf.rlhf_tasks.system.reading import DataError, one_line, reading

StoredNumbers = NDArray[Any]

ROWS = "rows.arrow"  # in a run folder
SKIPPED = "skipped-rows.jsonl"  # beside it: the rows that were left out, and why
BATCH = 128  # rows of a batch of the file: a random row costs the check of so many
SAMPLED = 1000  # rows at most whose lengths are told
_FACTS = b"prefect_rlhf.rows"
_OWN = ("#file", "#line", "#longest")  # columns beside the keys, int32
_HASH = "#hash"  # and one of HASH_BYTES
_DAMAGED = "Remove it; the next attempt makes it anew."


class TokenRow(NamedTuple):
    """A row as it is stored.

    file, line  its place; the file by its number
    columns     the names of the row's columns
    lengths     tokens of each of its lists of ids
    values      by the keys of the data set
    hash        of the row's content (`row_hash`)
    """

    file: int
    line: int
    columns: tuple[str, ...]
    lengths: tuple[int, ...]
    values: Mapping[str, DatasetValue]
    hash: bytes = bytes(HASH_BYTES)


class TokenFile:
    """The rows of a token file.

    key          names all that the file's content depends on
    digest       of the data: `DataSet.digest`
    columns      names of all columns of the data, in the order in which they first appear
    sources      number of rows of each source; rows of one source follow one another
    vocabulary   tokens of the tokenizer, from 0
    skipped      (place, reason) of each row that was left out
    tokens       of a row's lists of ids together, of at most SAMPLED rows at even distances
    """

    def __init__(self, name: Path, source: pa.NativeFile) -> None:
        """Raises DataError for a source that is no token file. name: of the file, or of its folder if it has none."""
        self._name, self._source = name, source
        with reading(name, "not a file of tokenised rows", DataError, _DAMAGED):
            self._reader = pa.ipc.open_file(source)
            last = self._reader.get_batch_with_custom_metadata(self._reader.num_record_batches - 1)
            facts = json.loads(last.custom_metadata[_FACTS])
            self.key: str = facts["key"]
            self.digest: str = facts["digest"]
            self.columns: tuple[str, ...] = tuple(facts["columns"])
            self.tokens: tuple[int, ...] = tuple(facts["tokens"])
            self.vocabulary: int = facts["vocabulary"]
            self._rows: int = facts["rows"]
            self.sources: tuple[int, ...] = tuple(facts["sources"])
            self.skipped: tuple[tuple[str, str], ...] = tuple((w, why) for w, why in facts["skipped"])
            self._files: list[str] = facts["files"]
            self._kinds: dict[str, str] = facts["kinds"]
            self._longest: list[int] = facts["longest"]
            self._checksums: list[int] = facts["checksums"]
        self._drawn, self._first = (
            self.sources,
            dict[float, TokenFile](),
        )  # rows of each source that are drawn
        self._orders: dict[tuple[int, str, int], NDArray[np.int64]] = {}
        self._checked = set[int]()

    @staticmethod
    def open(path: Path) -> "TokenFile":
        """The file of a run. Raises DataError where it is none."""
        with reading(path, "not a file of tokenised rows", DataError, _DAMAGED):
            source = pa.memory_map(str(path))
        return TokenFile(path, source)

    def __len__(self) -> int:
        return self._rows

    def first(self, share: float) -> "TokenFile":
        """The same rows, of which only this share of each source's is drawn, from the first one on; at least one."""
        if share >= 1:
            return self
        if share not in self._first:
            self._first[share] = some = copy(self)
            some._drawn = tuple(max(1, ceil(share * rows)) for rows in self.sources)
            some._orders = {}
        return self._first[share]

    def keep(self, folder: Path, name: str = ROWS) -> None:
        """Copy the file into a run folder, unless it is there; it appears whole or not at all. Raises OSError."""
        path, part = folder / name, folder / f".{name}.part"
        if self._name == path:
            return
        self._source.seek(0)
        with part.open("wb") as file:
            while piece := self._source.read(1 << 20):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if self.skipped:
            ordered = sorted(self.skipped, key=lambda one: _place(one[0]))
            lines = (json.dumps({"row": where, "reason": why}) for where, why in ordered)
            replace_file(folder / SKIPPED, "".join(f"{line}\n" for line in lines))
        part.replace(path)
        sync(folder)
        self._name = path

    def values(self, index: int) -> dict[str, StoredNumbers | str]:
        """The values of a row by key: int32 token ids [tokens], a bool mask [tokens], float64 numbers, or text."""
        batch, place = self._batch(index // BATCH), index % BATCH
        found: dict[str, StoredNumbers | str] = {}
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
        batch, place = self._batch(index // BATCH), index % BATCH
        return f"{self._files[batch.column('#file')[place].as_py()]}:{batch.column('#line')[place].as_py()}"

    @property
    def keys(self) -> Collection[str]:
        """The keys of the data set."""
        return self._kinds.keys()

    @property
    def longest(self) -> int:
        """Tokens of the longest list of ids of all rows."""
        return max(self._longest)

    def first_longer(self, tokens: int) -> tuple[int, int] | None:
        """(index, tokens) of the first row with a longer list of ids; None where there is none."""
        for number, longest in enumerate(self._longest):
            if longest > tokens:
                lengths = self._batch(number).column("#longest").to_numpy()
                place = int(np.argmax(lengths > tokens))
                return number * BATCH + place, int(lengths[place])
        return None

    def distinct(self, key: str, most: int) -> list[Any]:
        """The different numbers that rows have under a key, no more than about `most`: reading ends with so many."""
        found: dict[Any, None] = {}
        for number in range(len(self._longest)):
            found.update(dict.fromkeys(self._batch(number).column(key).values.unique().to_pylist()))
            if len(found) >= most:
                break
        return list(found)

    def row_of(self, sample_id: int, seed: int, weights: Sequence[float] = (1.0,)) -> int:
        """The row that a global sample id means: position in the epoch's own random order of all rows of its source,
        or of those that are drawn.

        weights  of the sources
        """
        source, place = place_of(sample_id, weights)
        epoch, position = divmod(place, self._drawn[source])
        purpose = f"rows {source}" if source else "rows"
        order = self._orders.get((seed, purpose, epoch))
        if order is None:
            while len(self._orders) >= 2 * len(weights):  # an iteration touches two epochs where one begins
                self._orders.pop(next(iter(self._orders)))
            order = permutation(self._drawn[source], seed, purpose, epoch)
            self._orders[seed, purpose, epoch] = order
        return sum(self.sources[:source]) + int(order[position])

    def times(self, first: int, end: int, seed: int, weights: Sequence[float] = (1.0,)) -> NDArray[np.int64]:
        """[rows] how often the samples `first` to `end` - 1 mean each row, by `row_of`."""
        times, offset = np.zeros(len(self), np.int64), 0
        begins, ends = _places_before(first, weights), _places_before(end, weights)
        for source, (rows, begin, stop) in enumerate(zip(self._drawn, begins, ends, strict=True)):
            purpose = f"rows {source}" if source else "rows"
            for epoch in range(begin // rows, -(-stop // rows)):
                order = permutation(rows, seed, purpose, epoch)
                met = order[max(begin - epoch * rows, 0) : min(stop - epoch * rows, rows)]
                times[offset + met] += 1
            offset += self.sources[source]
        return times

    def identities(self) -> Iterator[tuple[str, str]]:
        """(`file:line`, hash of the content as hexadecimal digits) of each row, in order."""
        for number in range(len(self._longest)):
            batch = self._batch(number)
            for file, line, digest in zip(
                *(batch.column(name).to_pylist() for name in ("#file", "#line", _HASH)), strict=True
            ):
                yield f"{self._files[file]}:{line}", digest.hex()

    def _batch(self, number: int) -> pa.RecordBatch:
        with reading(self._name, "not a file of tokenised rows", DataError, _DAMAGED):
            batch = self._reader.get_batch(number)
            if number not in self._checked and _checksum(batch) != self._checksums[number]:
                raise DataError(f"{self._name}: is damaged. {_DAMAGED}")
        self._checked.add(number)
        return batch


def new_token_file(
    place: Path,
    key: str,
    digest: str,
    files: Sequence[str],
    rows: Iterable[TokenRow],
    skipped: Sequence[tuple[str, str]] = (),
    sources: Sequence[int] = (),
    vocabulary: int = 0,
) -> TokenFile:
    """A token file of rows that has no name: it goes with the process, unless a run keeps it.

    Memory for BATCH rows is needed, however many they are.

    place          a folder, which need not exist: the file lies on its disk
    key, digest    as in TokenFile
    files          the names of the data set's files
    skipped        as in TokenFile; read when the rows have been
    sources        number of the source of each file; default: they are of one
    vocabulary     as in TokenFile
    Raises DataError where the values of a key are of several kinds or no 32-bit integers, and where the disk is full.
    """
    rows = iter(rows)
    first = list(islice(rows, BATCH))
    if not first:
        raise DataError(
            "the data have no row that can be used" + (f": {' '.join(skipped[0])}" if skipped else ".")
        )
    facts = _Facts(key, digest, files, first, vocabulary)
    while not place.is_dir():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place if os.access(place, os.W_OK) else None) as file:
            with pa.ipc.new_file(pa.PythonFile(file, mode="w"), facts.schema) as writer:
                for batch in facts.batches(chain(first, rows)):
                    writer.write_batch(batch)
                last = pa.RecordBatch.from_pylist([], facts.schema)
                writer.write_batch(last, custom_metadata=facts.metadata(skipped, sources))
            file.flush()
            return TokenFile(place, pa.memory_map(f"/proc/self/fd/{file.fileno()}"))
    except OSError as error:
        why = one_line(error.strerror or str(error))
        raise DataError(f"{place}: the tokenised rows cannot be written ({why}). Free some space.") from None


class _Facts:
    """What a token file's last batch says, gathered while the others are made."""

    def __init__(
        self, key: str, digest: str, files: Sequence[str], first: Sequence[TokenRow], vocabulary: int
    ) -> None:
        self.key, self.digest, self.files, self.vocabulary = key, digest, list(files), vocabulary
        self.kinds = {key: _kind([row.values[key] for row in first]) or "ids" for key in first[0].values}
        self.columns: dict[str, None] = {}
        self.checksums, self.longest = list[int](), list[int]()
        self.tokens = array("q")  # of each row
        self.rows_of_file = Counter[int]()
        wide = {"ids": pa.int32(), "numbers": pa.float64()}
        types = {key: wide.get(kind, pa.uint8()) for key, kind in self.kinds.items()}
        keys = [pa.field(key, pa.list_(type_)) for key, type_ in types.items()]
        facts = [*(pa.field(name, pa.int32()) for name in _OWN), pa.field(_HASH, pa.binary(HASH_BYTES))]
        self.schema = pa.schema([*keys, *facts])

    def batches(self, rows: Iterator[TokenRow]) -> Iterator[pa.RecordBatch]:
        while taken := list(islice(rows, BATCH)):
            arrays = []
            for field, (key, kind) in zip(self.schema, self.kinds.items(), strict=False):
                values = [row.values[key] for row in taken]
                if _kind(values) not in (kind, "") or " or " in kind:
                    raise DataError(f"the rows' values of the key {key!r} are of several kinds.")
                with reading(f"the rows' values of the key {key!r}", "not 32-bit integers", DataError):
                    arrays.append(_array(values, field.type))
            places = [(row.file, row.line, max(row.lengths, default=0)) for row in taken]
            arrays += [pa.array(column, pa.int32()) for column in zip(*places, strict=True)]
            arrays.append(pa.array([row.hash for row in taken], pa.binary(HASH_BYTES)))
            for row in taken:
                self.columns.update(dict.fromkeys(row.columns))
            self.rows_of_file.update(row.file for row in taken)
            self.tokens.extend(sum(row.lengths) for row in taken)
            self.longest.append(max(longest for *_, longest in places))
            batch = pa.record_batch(arrays, schema=self.schema)
            self.checksums.append(_checksum(batch))
            yield batch

    def metadata(self, skipped: Sequence[tuple[str, str]], sources: Sequence[int]) -> dict[bytes, bytes]:
        of_file = sources or [0] * len(self.files)
        by_source = [0] * (1 + max(of_file))
        for file, rows in self.rows_of_file.items():
            by_source[of_file[file]] += rows
        sampled = self.tokens[:: step_between(len(self.tokens), SAMPLED)]
        said = {
            "key": self.key,
            "digest": self.digest,
            "files": self.files,
            "kinds": self.kinds,
            "columns": list(self.columns),
            "longest": self.longest,
            "checksums": self.checksums,
            "rows": len(self.tokens),
            "skipped": list(skipped),
            "sources": by_source,
            "vocabulary": self.vocabulary,
            "tokens": sampled.tolist(),
        }
        return {_FACTS: json.dumps(said).encode()}


def _place(where: str) -> tuple[str, int]:
    """File and line of `file:line`."""
    file, _, line = where.rpartition(":")
    return file, int(line)


def _kind(values: Sequence[DatasetValue]) -> str:
    """What values of one key are: text, a mask, ids or numbers; several words where they differ, "" where all are
    empty."""
    kinds = {str: "text", bool: "mask", int: "ids", float: "numbers"}
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
        if isinstance(column, pa.FixedSizeBinaryArray):
            checksum = zlib.crc32(_bytes_of(column), checksum)
            continue
        parts = (column.offsets, column.values) if isinstance(column, pa.ListArray) else (column,)
        for part in parts:
            checksum = zlib.crc32(part.to_numpy(), checksum)
    return checksum


def _bytes_of(hashes: pa.FixedSizeBinaryArray) -> bytes:
    """The hashes one after another."""
    data = hashes.buffers()[1]
    return data.slice(hashes.offset * HASH_BYTES, len(hashes) * HASH_BYTES).to_pybytes()


def place_of(sample: int, weights: Sequence[float]) -> tuple[int, int]:
    """The source of a sample, and how many samples before it are of that source.

    weights  of the sources, above 0
    """
    shares = _shares(tuple(weights))
    for source, share in enumerate(shares):
        before = floor(sample * share)
        if floor((sample + 1) * share) > before:
            return source, before
        sample -= before
    return len(shares), sample


def _places_before(sample: int, weights: Sequence[float]) -> list[int]:
    """How many of the samples before a sample are of each source."""
    counts = []
    for share in _shares(tuple(weights)):
        counts.append(floor(sample * share))
        sample -= counts[-1]
    return [*counts, sample]


@cache
def _shares(weights: tuple[float, ...]) -> list[Fraction]:
    """Of each source but the last: its part of what it and the sources after it have together."""
    exact = [Fraction(weight) for weight in weights]
    left = list(accumulate(reversed(exact)))[::-1]
    return [own / both for own, both in zip(exact[:-1], left, strict=False)]
