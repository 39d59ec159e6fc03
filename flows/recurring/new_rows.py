"""The rows of a series that no champion has learned from, copied into the folder of the run that takes them.

A row is known by the hash of its content, wherever it stands: files may grow, be sorted or be divided. The copies let
files grow while a run trains. RUN/rows/ has a JSONL file for each source that has new rows, `hashes`, and `places`,
where each row stood; `seen` has the hashes of all rows that were new, also of those beyond `data.max_rows`. The files
of held-out rows are copied as they are, to RUN/held-out/: all models of a run answer the same rows.
"""

import glob
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from prefect_rlhf.rlhf_tasks.data.dataset import HASH_BYTES, DataError, PlacedRow, data_set, refuse, row_hash
from prefect_rlhf.rlhf_tasks.system.reading import reading

ROWS, HASHES, PLACES, SEEN = "rows", "hashes", "places", "seen"
HELD_OUT = "held-out"
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


def hashes_of(run: Path, name: str = HASHES) -> bytes:
    """The hashes of a run's rows, HASH_BYTES each, in order. Raises ConfigError where they are gone.

    name  HASHES, or SEEN: also those beyond `data.max_rows`
    """
    path = run / ROWS / name
    if not path.is_file():
        raise ConfigError(
            f"{path} is gone: it says which rows are used already. Put it back, or begin another series (name)."
        )
    return path.read_bytes()


def saw_all(before: Path, run: Path) -> bool:
    """Whether each row that a run has seen was seen by the one before it."""
    then, now = _distinct(hashes_of(before, SEEN)), _distinct(hashes_of(run, SEEN))
    return bool(pc.all(pc.is_in(now, value_set=then), min_count=0).as_py())  # pyright: ignore[reportAttributeAccessIssue]


def _distinct(hashes: bytes) -> Any:
    """An array of the different ones."""
    buffers = [None, pa.py_buffer(hashes)]
    return pc.unique(pa.FixedSizeBinaryArray.from_buffers(_HASH, len(hashes) // HASH_BYTES, buffers))  # pyright: ignore[reportAttributeAccessIssue]


def first_place(run: Path) -> str:
    """`file:line` of a run's first row, where it was copied from."""
    with (run / ROWS / PLACES).open(encoding="utf-8") as places:
        return json.loads(places.readline())[1]


def copy_new_rows(config: RunConfig, used: Sequence[Path], run: Path, named: Path) -> NewRows:
    """Copy the rows of a configuration's data that none of the runs `used` has taken into the folder `run`.

    named  the folder's later name, under which the files are read
    Memory is needed for the hashes of all used rows and for ROWS_AT_ONCE rows. Raises DataError.
    """
    known = _distinct(b"".join(map(hashes_of, used)))
    present, skips, folder = np.zeros(len(known), np.bool_), config.data.on_bad_row == "skip", run / ROWS
    bad, counts = list[str](), Counter[int]()

    def left_out(where: str, error: DataError) -> None:
        bad.append(where)

    data = data_set(config.data.model_copy(update={"column_map": {}}))
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        hashes, seen = (stack.enter_context((folder / name).open("wb")) for name in (HASHES, SEEN))
        places = stack.enter_context((folder / PLACES).open("w", encoding="utf-8"))
        files: dict[int, TextIO] = {}
        for rows in _at_once(data.rows(left_out if skips else refuse)):
            digests = [row_hash(placed.raw) for placed in rows]
            index = pc.index_in(pa.array(digests, _HASH), value_set=known)  # pyright: ignore[reportAttributeAccessIssue]
            present[np.array(index.drop_null(), np.int64)] = True
            for placed, digest, is_new in zip(rows, digests, index.is_null().to_pylist(), strict=True):
                source = data.sources[placed.file]
                if not is_new:
                    continue
                seen.write(digest)
                if counts[source] == config.data.max_rows:
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


def copy_held_out(config: RunConfig, run: Path, named: Path) -> dict[str, str]:
    """Copy the files of an evaluation's rows into the folder `run`. Returns path or glob of each source's copies ->
    the source.

    named  the folder's later name
    Raises DataError.
    """
    data, copies = data_set(config.data), dict[int, list[str]]()
    for number, (file, source) in enumerate(zip(data.files, data.sources, strict=True)):
        place = Path(HELD_OUT, str(source))
        (run / place).mkdir(parents=True, exist_ok=True)
        copied = place / f"{number:06d}-{file.path.name}"  # in their order
        with reading(file.path, "cannot be copied", DataError):
            shutil.copyfile(file.path, run / copied)
        copies.setdefault(source, []).append(str(named / copied))
    return {
        paths[0] if len(paths) == 1 else f"{glob.escape(str(Path(paths[0]).parent))}/*": stated.path
        for paths, stated in zip(copies.values(), config.data.sources, strict=True)
    }


def _at_once(rows: Iterator[PlacedRow]) -> Iterator[list[PlacedRow]]:
    while taken := list(islice(rows, ROWS_AT_ONCE)):
        yield taken
