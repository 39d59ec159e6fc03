"""Rows: every format, a stable order, and a place for every fault."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_tasks.config.sections import DataConfig
from rlhf_tasks.data.dataset import DataError, load_rows


def lines(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_jsonl_plain_and_compressed_and_parquet_give_the_same_rows(tmp_path: Path):
    rows = [{"prompt": "a", "n": 1}, {"prompt": "ü", "n": 2}]
    (tmp_path / "rows.jsonl").write_bytes(lines(*rows))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines(*rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.jsonl.gz", "rows.parquet"):
        assert list(load_rows(DataConfig(train=str(tmp_path / name)))) == rows


def test_folders_and_globs_are_read_in_the_order_of_names(tmp_path: Path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines({"prompt": f"{name}1"}, {"prompt": f"{name}2"}))
    (tmp_path / "README.md").write_text("no rows")
    expected = ["a1", "a2", "b1", "b2", "c1", "c2"]
    for pattern in (tmp_path, tmp_path / "*.jsonl"):
        rows = load_rows(DataConfig(train=str(pattern)))
        assert [row["prompt"] for row in rows] == expected
        assert rows.where(3) == f"{tmp_path / 'b.jsonl'}:2"
    with pytest.raises(IndexError):
        rows[6]


def test_byte_order_marks_and_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines({"prompt": "a"}) + b"\n  \r\n" + lines({"prompt": "b"}).rstrip())
    rows = load_rows(DataConfig(train=str(path)))
    assert [row["prompt"] for row in rows] == ["a", "b"]
    assert rows.where(1) == f"{path}:4"


def test_columns_are_renamed_and_a_missing_one_is_named(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines({"question": "a", "n": 1}))
    assert load_rows(DataConfig(train=str(path), column_map={"question": "prompt"}))[0] == {
        "prompt": "a",
        "n": 1,
    }
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: has no column 'query', which data\.column_map renames"
    ):
        load_rows(DataConfig(train=str(path), column_map={"query": "prompt"}))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (lines({"prompt": "a"}) + b"{broken\n", ":2: not valid JSON"),
        (lines({"prompt": "a"}) + b'{"prompt": "\xff"}\n', ":2: not valid JSON: not UTF-8"),
        (lines({"prompt": "a"}, [1]), ":2: expected a JSON object, found list."),
        (b"", "has no rows."),
        (b"\n\n", "has no rows."),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: bytes, sentence: str):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_rows(DataConfig(train=str(path)))
    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)


def test_bad_files_are_named(tmp_path: Path):
    faults = {
        "rows.parquet": (b"PAR1 nonsense", "cannot be read as Parquet"),
        "rows.jsonl.gz": (b"no gzip", "cannot be read"),
        "cut.jsonl.gz": (gzip.compress(lines({"a": 1}))[:-9], "cannot be read"),
        "rows.csv": (b"a,b", "unknown kind of file"),
    }
    for name, (content, sentence) in faults.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=sentence) as caught:
            load_rows(DataConfig(train=str(tmp_path / name)))
        assert name in str(caught.value)


def test_what_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="no such file or folder"):
        load_rows(DataConfig(train=str(tmp_path / "nothing.jsonl")))
    with pytest.raises(DataError, match="no file matches it as a glob"):
        load_rows(DataConfig(train=str(tmp_path / "*.jsonl")))
    with pytest.raises(DataError, match=r"the folder has no \.jsonl"):
        load_rows(DataConfig(train=str(tmp_path)))


def test_each_epoch_visits_every_row_once_in_an_order_of_its_own(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(lines(*({"prompt": str(i)} for i in range(20))))
    rows = load_rows(DataConfig(train=str(tmp_path)))
    epochs = [[rows.row_of(sample, seed=1) for sample in range(e * 20, e * 20 + 20)] for e in range(4)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [rows.row_of(sample, seed=1) for sample in range(20)] == epochs[0]
    assert [rows.row_of(sample, seed=2) for sample in range(20)] != epochs[0]


def test_the_digest_names_the_content_and_not_the_place(tmp_path: Path):
    digests = []
    for folder, word in (("x", "a"), ("y", "a"), ("z", "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_bytes(lines({"prompt": word}))
        digests.append(load_rows(DataConfig(train=str(tmp_path / folder))).digest)
    assert digests[0] == digests[1] != digests[2]
