"""Rows: every format, a stable order, and a place for every fault."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_rlhf.rlhf_tasks.config.data import DataConfig
from prefect_rlhf.rlhf_tasks.data import dataset
from prefect_rlhf.rlhf_tasks.data.dataset import DataError, data_set


def lines(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path):
    rows = [{"prompt": "a", "n": 1}, {"prompt": "ü", "n": 2}]
    (tmp_path / "rows.jsonl").write_bytes(lines(*rows))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines(*rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "lines.json").write_bytes(lines(*rows))
    for name in ("rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows.json", "lines.json"):
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
        "rows.tsv": (b"a\tb", "unknown kind of file. Use one of .jsonl, .jsonl.gz, .parquet, .json, .csv."),
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


@pytest.mark.parametrize(
    "text",
    [
        "gsm8k",
        "hf://datasets/org/name",
        "https://huggingface.co/datasets/org/name",
        "org/x:train[:10%]",
    ],
)
def test_a_name_that_is_nearly_one_of_the_hub_is_refused_as_written_with_the_forms_that_are(text: str):
    with pytest.raises(
        DataError, match=r"named ORG/NAME, ORG/NAME:SPLIT, .*hf://datasets/ORG/NAME/GLOB"
    ) as caught:
        data_set(DataConfig(train=text))
    assert str(caught.value).startswith(f"{text}: ")


def test_a_file_that_a_glob_finds_twice_is_read_once(tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "rows.jsonl").write_bytes(lines({"prompt": "a"}))
    assert len(list(data_set(DataConfig(train=f"{tmp_path}/**/**/*.jsonl")))) == 1


def test_a_match_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(lines({"prompt": "a"}))
    (tmp_path / "b.jsonl").symlink_to("x" * 300)  # as a permission would, this also stops root
    for pattern in (tmp_path / "*.jsonl", tmp_path):
        with pytest.raises(DataError, match=r"cannot be read \(File name too long\)\. .*account"):
            data_set(DataConfig(train=str(pattern)))
    with pytest.raises(DataError, match=rf"^{tmp_path}/b\.jsonl: "):
        data_set(DataConfig(train=f"{tmp_path}/*.jsonl"))


def test_a_glob_ends_in_time_and_at_a_number_of_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_bytes(lines({"prompt": "a"}))
    monkeypatch.setattr(dataset, "MOST_MATCHES", 3)
    with pytest.raises(DataError, match=r"\*\.jsonl: matches more than 3 paths\. Name fewer files\."):
        data_set(DataConfig(train=f"{tmp_path}/*.jsonl"))
    monkeypatch.setattr(dataset, "GLOB_S", 0.001)
    with pytest.raises(
        DataError, match=r"to find its matches takes more than 0\.001 s\. Name a folder further"
    ):
        data_set(DataConfig(train="/**/**/nothing.jsonl"))


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


def test_csv_has_text_under_the_names_of_its_first_line(tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,answer\r\n"say ""a"",\nb",007\r\n\r\n\xc3\xbc,\r\n')
    rows = list(data_set(DataConfig(train=str(path))))
    assert [placed.row for placed in rows] == [
        {"prompt": 'say "a",\nb', "answer": "007"},
        {"prompt": "\u00fc", "answer": ""},
    ]
    assert [placed.line for placed in rows] == [2, 5], "the lines in which they begin"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("rows.csv", b"a,b\n1,2\n1\n", ":3: has 1 values, but the first line names 2 columns."),
        ("rows.csv", b"a,a\n1,2\n", ": its first line names the column 'a' twice."),
        ("rows.csv", b"a\n\xff\n", ":2: not valid CSV: not UTF-8"),
        ("rows.csv", b'a\n"b\n', ":2: not valid CSV: unexpected end of data"),
        ("rows.csv", b"a,b\n", ": has no rows."),
        ("rows.json", b"[]", ": has no rows."),
        ("rows.json", b'[{"a": 1}, 2]', ":2: expected a JSON object, found int."),
        ("rows.json", b'[{"a": 1} {"a": 2}]', ": not valid JSON: after row 1 stands '{'"),
        ("rows.json", b'[{"a": 1}, {"a": }]', ":2: not valid JSON: Expecting value."),
        ("rows.json", b'[{"a": 1}', ": not valid JSON: after row 1 stands ''"),
        ("rows.json", b'[{"a": 1}] {}', ": not valid JSON: more text follows the list."),
        ("rows.json", b'[{"a": "\\ud800"}]', ":1: not valid JSON: half of a surrogate pair"),
        ("rows.json", b"[" * 100_000, "nested too deeply"),
        ("rows.json", b'[{"a": "\xff"}]', ": not valid JSON: not UTF-8"),
    ],
)
def test_bad_csv_and_json_lists_are_named(tmp_path: Path, name: str, content: bytes, sentence: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(data_set(DataConfig(train=str(path))))
    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)


def test_a_json_list_is_read_in_pieces_and_a_row_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = [{"prompt": "\u00fc" * i, "n": [i]} for i in range(40)]
    (tmp_path / "rows.json").write_text(" \n" + json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    monkeypatch.setattr(dataset, "PIECE_BYTES", 7)
    monkeypatch.setattr(dataset, "MOST_LINE_BYTES", 200)
    assert [placed.row for placed in data_set(DataConfig(train=str(tmp_path / "rows.json")))] == rows
    for name, content in (("long.json", '[{"a": "' + "b" * 300), ("long.csv", "a\n" + '"\n' + "b\n" * 200)):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match="has more than 200 bytes"):
            list(data_set(DataConfig(train=str(tmp_path / name))))


def test_json_beside_a_folder_s_rows_describes_them(tmp_path: Path):
    (tmp_path / "dataset_infos.json").write_text("{}")
    for name in ("rows.csv", "rows.jsonl"):
        (tmp_path / name).write_text('"prompt"\n')
        assert [file.path.name for file in data_set(DataConfig(train=str(tmp_path))).files] == [name]


@pytest.mark.parametrize("mapped", [{}, {"instruction": "prompt", "output": "completion"}])
def test_alpaca_s_input_follows_its_instruction(tmp_path: Path, mapped: dict[str, str]):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        lines(
            {"instruction": "Add.", "input": "1 + 1", "output": "2"},
            {"instruction": "Say a.", "input": "", "output": "a"},
        )
    )
    rows = [placed.row for placed in data_set(DataConfig(train=str(path), column_map=mapped))]
    assert [(row["prompt"], row["completion"]) for row in rows] == [("Add.\n1 + 1", "2"), ("Say a.", "a")]
    kept = data_set(DataConfig(train=str(path), column_map={**mapped, "input": "topic"}))
    assert next(iter(kept)).row["prompt"] == "Add.", "a mapped input is a column of its own"


def test_two_columns_of_one_name_are_refused(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines({"question": "a", "prompt": "b"}))
    with pytest.raises(
        DataError, match=r":1: data\.column_map renames 'question' to 'prompt', but another column"
    ):
        list(data_set(DataConfig(train=str(path), column_map={"question": "prompt"})))


def test_a_column_of_images_is_refused_with_its_name(tmp_path):
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {"prompt": ["what is it?"], "pictures": pa.array([[{"bytes": b"png"}]], pa.list_(image))}
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="column 'pictures' holds images, audio or other bytes"):
        list(data_set(DataConfig(train=str(tmp_path / "rows.parquet"))))
