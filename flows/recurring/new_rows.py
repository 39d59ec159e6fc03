"""The rows of a series that no champion has learned from, copied into the folder of the run that takes them.

A row is known by the hash of its content, wherever it stands: files may grow, be sorted or be divided. The copies let
files grow while a run trains. RUN/rows/ has a JSONL file for each source that has new rows, `hashes`, and `places`,
where each row stood.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from prefect_rlhf.rlhf_tasks.data.dataset import HASH_BYTES, DataError, PlacedRow, data_set, refuse, row_hash

ROWS, HASHES, PLACES = "rows", "hashes", "places"
ROWS_AT_ONCE = 8192
_HASH = pa.binary(HASH_BYTES)


class NewRows(NamedTuple):
    """Rows that were copied.

    number of the rows
    train  their files, as `data.train` has them: with the sources' weights where there are several
    gone   rows that a champion has learned from and that the data no longer have
    bad    rows that cannot be read, left out as `data.on_bad_row: skip` says
    """

    number: int
    train: str | dict[str, float]
    gone: int
    bad: int


def hashes_of(run: Path) -> bytes:
    """The hashes of a run's rows, HASH_BYTES each, in order. Raises ConfigError where they are gone."""
    path = run / ROWS / HASHES
    if not path.is_file():
        raise ConfigError(
            f"{path} is gone: it says which rows are used already. Put it back, or begin another series (name)."
        )
    return path.read_bytes()


def same_rows(one: Path, other: Path) -> bool:
    """Whether two runs have the same rows, in any order."""
    pair = np.dtype([("first", "<u8"), ("second", "<u8")])
    first, second = (np.sort(np.frombuffer(hashes_of(run), pair)) for run in (one, other))
    return np.array_equal(first, second)


def first_place(run: Path) -> str:
    """`file:line` of a run's first row, where it was copied from."""
    with (run / ROWS / PLACES).open(encoding="utf-8") as places:
        return json.loads(places.readline())[1]


def copy_new_rows(config: RunConfig, used: Sequence[Path], run: Path, named: Path) -> NewRows:
    """Copy the rows of a configuration's data that none of the runs `used` has taken into the folder `run`.

    named  the folder's later name, under which the files are read
    Memory is needed for the hashes of all used rows and for ROWS_AT_ONCE rows. Raises DataError.
    """
    known = pa.FixedSizeBinaryArray.from_buffers(
        _HASH, len(joined := b"".join(map(hashes_of, used))) // HASH_BYTES, [None, pa.py_buffer(joined)]
    )
    present, skips, folder = np.zeros(len(known), np.bool_), config.data.on_bad_row == "skip", run / ROWS
    bad, counts = list[str](), Counter[int]()

    def left_out(where: str, error: DataError) -> None:
        bad.append(where)

    data = data_set(config.data.model_copy(update={"column_map": {}}))
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        hashes = stack.enter_context((folder / HASHES).open("wb"))
        places = stack.enter_context((folder / PLACES).open("w", encoding="utf-8"))
        files: dict[int, TextIO] = {}
        for rows in _at_once(data.rows(left_out if skips else refuse)):
            digests = [row_hash(placed.raw) for placed in rows]
            index = pc.index_in(pa.array(digests, _HASH), value_set=known)  # pyright: ignore[reportAttributeAccessIssue]
            present[np.array(index.drop_null(), np.int64)] = True
            for placed, digest, is_new in zip(rows, digests, index.is_null().to_pylist(), strict=True):
                source = data.sources[placed.file]
                if not is_new or counts[source] == config.data.max_rows:
                    continue
                if source not in files:
                    path = folder / f"{source}.jsonl"
                    files[source] = stack.enter_context(path.open("w", encoding="utf-8"))
                files[source].write(json.dumps(placed.raw, default=str) + "\n")
                hashes.write(digest)
                places.write(json.dumps([source, placed.where]) + "\n")
                counts[source] += 1
    weights = config.data.weights
    paths = {str(named / ROWS / f"{source}.jsonl"): weights[source] for source in sorted(counts)}
    train = next(iter(paths)) if len(paths) == 1 else paths
    return NewRows(counts.total(), train, int((~present).sum()), len(bad))


def _at_once(rows: Iterator[PlacedRow]) -> Iterator[list[PlacedRow]]:
    while taken := list(islice(rows, ROWS_AT_ONCE)):
        yield taken
