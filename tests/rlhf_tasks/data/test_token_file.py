"""Token files: what was written is read, by any number of readers, and nothing else is."""

import random
from pathlib import Path

import numpy as np
import pytest

from rlhf_tasks.data.token_file import ROWS, TokenFile, TokenRow, write_token_file
from rlhf_tasks.system.reading import DataError


def token_row(i: int, rng: random.Random) -> TokenRow:
    ids = [rng.randrange(2**31) for _ in range(rng.randrange(5))]
    values = {"ids": ids, "mask": [rng.random() < 0.5 for _ in ids], "text": "ü" * (i % 3)}
    return TokenRow(i % 2, i, ("a", f"b{i // 1000}"), len(ids), 2 * len(ids), values)


@pytest.fixture
def rows() -> list[TokenRow]:
    """Rows for two batches and a half; the first values are empty."""
    rng = random.Random(0)
    return [token_row(i, rng) for i in range(2 * ROWS + ROWS // 2)]


@pytest.fixture
def path(tmp_path: Path, rows: list[TokenRow]) -> Path:
    path = tmp_path / "folder" / "rows.arrow"
    write_token_file(path, "digest", ["x.jsonl", "y.jsonl"], rows)
    return path


def test_rows_are_read_as_they_were_written(path: Path, rows: list[TokenRow]):
    read = TokenFile.open(path)
    assert (len(read), read.digest) == (len(rows), "digest")
    assert read.columns == ("a", "b0", "b1", "b2")
    for i in (0, 1, ROWS - 1, ROWS, len(rows) - 1):
        values, row = read.values(i), rows[i]
        assert values["ids"].tolist() == row.values["ids"]
        assert values["mask"].tolist() == row.values["mask"]
        assert values["mask"].dtype == np.bool_
        assert values["text"] == row.values["text"]
        assert read.where(i) == f"{'xy'[i % 2]}.jsonl:{i}"
    assert read.longest.tolist() == [row.longest for row in rows]
    assert read.tokens.tolist() == [row.tokens for row in rows]


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, rows: list[TokenRow]):
    def failing():
        yield from rows
        raise DataError("the last row is bad.")

    with pytest.raises(DataError, match="the last row is bad"):
        write_token_file(tmp_path / "folder" / "rows.arrow", "digest", [], failing())
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("number", [0, 2])
def test_a_flipped_bit_is_noticed_when_its_batch_is_read(path: Path, rows: list[TokenRow], number: int):
    ids = next(row.values["ids"] for row in rows[number * ROWS + 7 :] if len(row.values["ids"]) > 2)
    content = bytearray(path.read_bytes())
    content[content.index(np.array(ids, np.int32).tobytes())] ^= 1
    path.write_bytes(content)
    read = TokenFile.open(path)
    read.values(ROWS)
    with pytest.raises(DataError, match=r"rows\.arrow: is damaged\. Remove it; the next run"):
        read.values(number * ROWS)


@pytest.mark.parametrize("size", [0, 5, 4000])
def test_a_cut_file_is_refused(path: Path, size: int):
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"rows\.arrow: not a file of tokenised rows: .*Remove it"):
        TokenFile.open(path)


def test_values_of_a_key_are_of_one_kind(tmp_path: Path):
    mixed = [TokenRow(0, 1, (), 1, 1, {"k": value}) for value in ([1], "text")]
    with pytest.raises(DataError, match="values of the key 'k' are of several kinds"):
        write_token_file(tmp_path / "rows.arrow", "", [], mixed)


def test_an_id_beyond_32_bits_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="the key 'k': not 32-bit integers: "):
        write_token_file(tmp_path / "rows.arrow", "", [], [TokenRow(0, 1, (), 1, 1, {"k": [2**31]})])


def test_each_epoch_visits_every_row_once_in_an_order_of_its_own(tmp_path: Path):
    path = tmp_path / "rows.arrow"
    write_token_file(path, "", ["x"], (TokenRow(0, i, (), 1, 1, {"k": [i]}) for i in range(20)))
    rows = TokenFile.open(path)
    epochs = [[rows.row_of(sample, seed=1) for sample in range(e * 20, e * 20 + 20)] for e in range(4)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [rows.row_of(sample, seed=1) for sample in range(20)] == epochs[0]
    assert [rows.row_of(sample, seed=2) for sample in range(20)] != epochs[0]
