"""Rows: every format, a stable order, and a place for every fault."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_tasks.config.data import DataConfig
from rlhf_tasks.data.dataset import DataError, data_set


def lines(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_jsonl_plain_and_compressed_and_parquet_give_the_same_rows(tmp_path: Path):
    rows = [{"prompt": "a", "n": 1}, {"prompt": "ü", "n": 2}]
    (tmp_path / "rows.jsonl").write_bytes(lines(*rows))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines(*rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.jsonl.gz", "rows.parquet"):
        assert [placed.row for placed in data_set(DataConfig(train=str(tmp_path / name)))] == rows


def test_folders_and_globs_are_read_in_the_order_of_names(tmp_path: Path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines({"prompt": f"{name}1"}, {"prompt": f"{name}2"}))
    (tmp_path / "README.md").write_text("no rows")
    expected = ["a1", "a2", "b1", "b2", "c1", "c2"]
    for pattern in (tmp_path, tmp_path / "*.jsonl"):
        rows = list(data_set(DataConfig(train=str(pattern))))
        assert [placed.row["prompt"] for placed in rows] == expected
        assert rows[3].where == f"{tmp_path / 'b.jsonl'}:2"
        assert rows[3][:2] == (1, 2)


def test_byte_order_marks_and_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines({"prompt": "a"}) + b"\n  \r\n" + lines({"prompt": "b"}).rstrip())
    rows = list(data_set(DataConfig(train=str(path))))
    assert [placed.row["prompt"] for placed in rows] == ["a", "b"]
    assert rows[1].where == f"{path}:4"


def test_columns_are_renamed_and_a_missing_one_is_named(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines({"question": "a", "n": 1}))
    (placed,) = data_set(DataConfig(train=str(path), column_map={"question": "prompt"}))
    assert placed.row == {"prompt": "a", "n": 1}
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: has no column 'query', which data\.column_map renames"
    ):
        list(data_set(DataConfig(train=str(path), column_map={"query": "prompt"})))


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
        list(data_set(DataConfig(train=str(path))))
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
            list(data_set(DataConfig(train=str(tmp_path / name))))
        assert name in str(caught.value)


def test_what_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="no such file or folder"):
        data_set(DataConfig(train=str(tmp_path / "nothing.jsonl")))
    with pytest.raises(DataError, match="no file matches it as a glob"):
        data_set(DataConfig(train=str(tmp_path / "*.jsonl")))
    with pytest.raises(DataError, match=r"the folder has no \.jsonl"):
        data_set(DataConfig(train=str(tmp_path)))


def test_some_rows_stand_at_even_distances_and_the_others_are_not_parsed(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(
        b"".join(lines({"n": i}) if i % 4 == 0 else b"{broken\n" for i in range(20))
    )
    pq.write_table(pa.Table.from_pylist([{"n": i} for i in range(20, 24)]), tmp_path / "tail.parquet")
    rows = data_set(DataConfig(train=str(tmp_path)))
    assert [placed.row["n"] for placed in rows.some(6)] == [0, 4, 8, 12, 16, 20]
    assert [placed.row["n"] for placed in rows.some(3)] == [0, 8, 16]


def test_the_digest_names_the_content_and_not_the_place(tmp_path: Path):
    digests = []
    for folder, word in (("x", "a"), ("y", "a"), ("z", "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_bytes(lines({"prompt": word}))
        digests.append(data_set(DataConfig(train=str(tmp_path / folder))).digest)
    assert digests[0] == digests[1] != digests[2]
