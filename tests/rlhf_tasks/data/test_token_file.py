"""Token files: what was written is read, by any number of readers, and nothing else is."""

import random
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.rlhf_tasks.data.token_file import BATCH, ROWS, TokenFile, TokenRow, new_token_file, place_of
from prefect_rlhf.rlhf_tasks.system.reading import DataError
from tests.small_disk import small_disk

N_ROWS = 2 * BATCH + BATCH // 2


def token_row(i: int, rng: random.Random) -> TokenRow:
    ids = [rng.randrange(2**31) for _ in range(rng.randrange(5))]
    values = {"ids": ids, "mask": [rng.random() < 0.5 for _ in ids], "text": "ü" * (i % 3)}
    return TokenRow(i % 2, i, ("a", f"b{i // 100}"), (len(ids), 1), values)


@pytest.fixture
def rows() -> list[TokenRow]:
    """Rows for two batches and a half."""
    rng = random.Random(0)
    return [token_row(i, rng) for i in range(N_ROWS)]


def new_file(folder: Path, rows: Iterable[TokenRow]) -> TokenFile:
    return new_token_file(folder / "runs", "key", "digest", ["x.jsonl", "y.jsonl"], rows)


@pytest.fixture
def path(tmp_path: Path, rows: list[TokenRow]) -> Path:
    new_file(tmp_path, rows).keep(tmp_path)
    return tmp_path / ROWS


def check_content(read: TokenFile, rows: list[TokenRow]) -> None:
    assert (len(read), read.key, read.digest) == (N_ROWS, "key", "digest")
    assert read.columns == ("a", "b0", "b1", "b2", "b3")
    for i in (0, 1, BATCH - 1, BATCH, N_ROWS - 1):
        values, row = read.values(i), rows[i]
        assert values["ids"].tolist() == row.values["ids"]
        assert values["mask"].tolist() == row.values["mask"]
        assert values["mask"].dtype == np.bool_
        assert values["text"] == row.values["text"]
        assert read.where(i) == f"{'xy'[i % 2]}.jsonl:{i}"
    assert read.tokens == tuple(sum(row.lengths) for row in rows)


def test_rows_are_read_as_they_were_written_before_and_after_they_are_kept(
    tmp_path: Path, rows: list[TokenRow]
):
    made = new_file(tmp_path, rows)
    assert list(tmp_path.iterdir()) == [], "a file that no run keeps leaves nothing"
    check_content(made, rows)
    made.keep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [ROWS]
    check_content(TokenFile.open(tmp_path / ROWS), rows)
    made.keep(tmp_path)


@pytest.mark.parametrize("place", [0, BATCH, N_ROWS - 1])
def test_the_first_row_that_is_too_long_is_found(tmp_path: Path, rows: list[TokenRow], place: int):
    rows[place] = rows[place]._replace(lengths=(3, 9))
    read = new_file(tmp_path, [*rows, rows[place]])
    assert read.first_longer(8) == (place, 9)
    assert read.first_longer(9) is None


@pytest.mark.parametrize("number", [0, 2])
def test_a_flipped_bit_is_noticed_when_its_batch_is_read(path: Path, rows: list[TokenRow], number: int):
    ids = next(row.values["ids"] for row in rows[number * BATCH + 7 :] if len(row.values["ids"]) > 2)
    content = bytearray(path.read_bytes())
    content[content.index(np.array(ids, np.int32).tobytes())] ^= 1
    path.write_bytes(content)
    read = TokenFile.open(path)
    read.values(BATCH)
    with pytest.raises(DataError, match=r"rows\.arrow: is damaged\. Remove it; the next attempt"):
        read.values(number * BATCH)


@pytest.mark.parametrize("size", [0, 5, 4000])
def test_a_cut_file_is_refused(path: Path, size: int):
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"rows\.arrow: not a file of tokenised rows: .*Remove it"):
        TokenFile.open(path)


def test_values_of_a_key_are_of_one_kind(tmp_path: Path):
    mixed = [TokenRow(0, 1, (), (1,), {"k": value}) for value in ([1], "text")]
    with pytest.raises(DataError, match="values of the key 'k' are of several kinds"):
        new_file(tmp_path, mixed)


def test_an_id_beyond_32_bits_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="the key 'k': not 32-bit integers: "):
        new_file(tmp_path, [TokenRow(0, 1, (), (1,), {"k": [2**31]})])


def test_a_full_disk_is_one_sentence(tmp_path: Path, rows: list[TokenRow]):
    sentence = r"the tokenised rows cannot be written \((No space left on device|File too large)\)"
    with small_disk(tmp_path / "disk"), pytest.raises(DataError, match=sentence):
        new_file(tmp_path / "disk", rows * 50)


def test_each_epoch_visits_every_row_once_in_an_order_of_its_own(tmp_path: Path):
    rows = new_file(tmp_path, (TokenRow(0, i, (), (1,), {"k": [i]}) for i in range(20)))
    epochs = [[rows.row_of(sample, seed=1) for sample in range(e * 20, e * 20 + 20)] for e in range(4)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [rows.row_of(sample, seed=1) for sample in range(20)] == epochs[0]
    assert [rows.row_of(sample, seed=2) for sample in range(20)] != epochs[0]


WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)


@given(WEIGHTS, st.integers(0, 300))
def test_every_sample_is_the_next_of_its_source(weights: list[float], n: int):
    seen = Counter[int]()
    for sample in range(n):
        source, position = place_of(sample, weights)
        assert position == seen[source]
        seen[source] += 1


@given(WEIGHTS, st.integers(0, 10**12))
def test_the_shares_are_the_weights_in_every_stretch(weights: list[float], first: int):
    taken = Counter(place_of(sample, weights)[0] for sample in range(first, first + 100))
    for source, weight in enumerate(weights):
        share = Fraction(weight) / sum(map(Fraction, weights))
        assert abs(taken[source] - 100 * share) <= 2 + source


def test_equal_weights_take_turns():
    assert [place_of(sample, (1, 1))[0] for sample in range(6)] == [1, 0, 1, 0, 1, 0]
    assert [place_of(sample, (3.0,)) for sample in range(3)] == [(0, 0), (0, 1), (0, 2)]
