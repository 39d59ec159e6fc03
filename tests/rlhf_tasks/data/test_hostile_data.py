"""Rows and chat templates that are meant to break what reads them: each is refused in one sentence, in seconds."""

import gzip
import io
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_rlhf.flows.demo import write_model_folder
from prefect_rlhf.rlhf_tasks.algorithms.examples import read_examples
from prefect_rlhf.rlhf_tasks.config.data import DataConfig
from prefect_rlhf.rlhf_tasks.data import chat_template, dataset
from prefect_rlhf.rlhf_tasks.data.chat_template import ChatTemplate, Source, render_all
from prefect_rlhf.rlhf_tasks.data.dataset import MOST_LINE_BYTES, data_set
from prefect_rlhf.rlhf_tasks.data.rows import pair_example, prompt_example
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.system.child_processes import python_call
from tests.rlhf_tasks.algorithms.test_examples import read_row
from tests.rlhf_tasks.config.test_hostile_config import said

USER = {"role": "user", "content": "hi"}


def rows_of(path: Path) -> Any:
    return list(data_set(DataConfig(train=str(path))))


def grown(call: Callable[[], Any]) -> int:
    """KiB by which this process's peak grew."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


LINES = {
    "half a character": (rb'{"prompt": "a\ud83d"}', "half of a surrogate pair"),
    "half a character in a key": (rb'{"a": [{"\uDC00": 1}]}', "half of a surrogate pair"),
    "nested": (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
    "nested and closed": (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "nested too deeply"),
    "a long number": (b'{"a": ' + b"9" * 6000 + b"}", "Exceeds the limit (4300 digits)"),
    "UTF-16": ('{"a": "b"}'.encode("utf-16"), "not UTF-8 ("),
    "a NUL": (b'{"a": "\0"}', "Invalid control character"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", LINES)
def test_a_hostile_row_is_refused_with_its_line(tmp_path: Path, case: str):
    content, sentence = LINES[case]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + content + b"\n")
    found = said(rows_of, path)
    assert found.startswith(f"{path}:2: not valid JSON: ")
    assert sentence in found


def test_a_character_of_two_escapes_is_read(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(rb'{"prompt": "\ud83d\ude00"}')
    assert rows_of(path)[0].row == {"prompt": "\U0001f600"}


@pytest.mark.parametrize("at", [2, 11, 300, -12, -5])
def test_a_corrupt_gzip_is_refused(tmp_path: Path, at: int):
    path = tmp_path / "rows.jsonl.gz"
    content = bytearray(
        gzip.compress(b"".join(b'{"prompt": "%d"}\n' % os.getrandom(1)[0] for _ in range(999)))
    )
    content[at] ^= 0xFF
    path.write_bytes(content)
    assert said(rows_of, path).startswith(str(path))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("line", [b" ", b'{"prompt": "a"}\n'], ids=["one line", "many lines"])
def test_a_bomb_of_gzip_is_not_unpacked(tmp_path: Path, line: bytes):
    """1 GiB in about 1 MiB: 64 members of 16 MiB, one after another."""
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(line * ((16 << 20) // len(line))) * 64)
    sentences = []
    assert grown(lambda: sentences.append(said(rows_of, path))) < 600_000
    assert "it is made to fill memory" in sentences[0]


def test_a_line_longer_than_any_row_is_refused(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n" + b"[" * (MOST_LINE_BYTES + 1))
    assert said(rows_of, path).startswith(f"{path}:2: the line has more than 16,777,216 bytes.")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("value", ["a" * 100_000, None])
def test_a_bomb_of_parquet_is_not_unpacked(tmp_path: Path, value: str | None):
    path = tmp_path / "rows.parquet"
    same = pa.array([0] * 10_000, pa.int32())
    array = pa.DictionaryArray.from_arrays(same, [value]) if value else pa.nulls(40_000_000)
    pq.write_table(pa.table({"prompt": array}), path, store_schema=False)  # read as text, not as a dictionary
    assert path.stat().st_size < 1 << 20
    sentences = []
    assert grown(lambda: sentences.append(said(rows_of, path))) < 600_000
    assert "it is made to fill memory" in sentences[0]


def test_a_parquet_file_of_no_text_is_refused(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    pq.write_table(pa.table({"prompt": text}), path)
    assert said(rows_of, path).startswith(f"{path}: cannot be read as Parquet: ")


def test_a_long_data_set_that_shrinks_well_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dataset, "FREE_BYTES", 1 << 20)
    path = tmp_path / "rows.jsonl.gz"
    rows = [json.dumps({"prompt": f"{i} " + "lorem ipsum dolor " * 10}).encode() for i in range(3000)]
    path.write_bytes(gzip.compress(b"\n".join(rows)))
    assert path.stat().st_size * 10 < sum(map(len, rows))
    assert len(rows_of(path)) == 3000


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "a", "rejected": 1},
        {"chosen": {}, "rejected": {}},
        {"chosen": 1, "rejected": "a"},
        {"chosen": [USER], "rejected": "a"},
        {"prompt": 3, "chosen": "a", "rejected": "b"},
    ],
)
def test_a_pair_of_unlike_kinds_is_refused(plain: Tokenizer, row: dict):
    said(read_row, pair_example, row, plain)


RECURSION = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"
TEMPLATES = {
    "a syntax error": ("a\n{{ }", ":2: no valid chat template: unexpected '}'"),
    "an unknown tag": ("{% import_os %}", ":1: no valid chat template: Encountered unknown tag"),
    "division": ("{{ 1//0 }}", "integer division or modulo by zero"),
    "recursion": (RECURSION, "nested too deeply"),
    "nesting": ("{{ " + "(" * 5000 + ")" * 5000 + " }}", ""),
    "a power": ("{{ 10 ** (10 ** 9) }}", "the chat template takes more than 3 s of CPU time"),
    "a long text": ("{{ 'a' * 20000000000 }}", "it takes more memory than there is"),
    "a long text at run time": (
        "{{ messages[0].content * 20000000000 }}",
        "it takes more memory than there is",
    ),
    "a float": ("{{ 'a' * 2e10 }}", "can't multiply sequence"),
    "much text": (
        "{% for i in range(9000) %}{{ 'a' * 10000 }}{% endfor %}",
        "more than 8,388,608 characters",
    ),
    "an exception": ("{{ raise_exception('no\n\nsystem') }}", "the chat template refuses the messages: no"),
    "an attribute": ("{{ messages.x.y }}", "has no attribute 'x'"),
    "the sandbox": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template refuses"),
    "the messages": ("{{ messages.append(1) }}", "the chat template refuses"),
    "a format": ("{{ '%1000000000000d' % 1 }}", ""),
    "half a character": ("{{ '\\ud800' }}", ""),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", TEMPLATES)
def test_a_hostile_template_is_refused(plain_folder: Path, tmp_path: Path, case: str):
    template, sentence = TEMPLATES[case]
    shutil.copytree(plain_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(template)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": [USER]}))
    rows, tokenizer = rows_of(path), Tokenizer.from_folder(tmp_path)
    found = said(list, read_examples(prompt_example, rows, tokenizer))
    assert found.startswith(f"{path}:1: {tmp_path / 'chat_template.jinja'}")
    assert sentence in found


def template(text: str) -> ChatTemplate:
    return ChatTemplate(Source(text, Path("chat_template.jinja")), {"eos_token": "<e>"})


def rendered(ours: ChatTemplate, *contents: str) -> list[str]:
    return list(ours.render(([{"content": content}], True) for content in contents))


def test_a_template_that_failed_serves_the_next_conversation():
    ours = template(
        "{% if messages[0].content == 'x' %}{{ 1//0 }}{% endif %}{{ messages[0].content * 20 ** 3 }}"
    )
    assert "division" in said(rendered, ours, "y", "x", "y")
    process = ours._lines
    assert rendered(ours, "y") == ["y" * 8000]
    assert ours._lines is process


@pytest.mark.whole
def test_a_template_whose_process_was_ended_is_rendered_by_the_next():
    """The texts before the conversation that ended it are there."""
    ours = template(
        "{% for i in range(99999 if messages[0].content == 'x' else 1) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}{{ eos_token }}"
    )
    texts = ours.render(([{"content": content}], True) for content in "yyx")
    assert [next(texts), next(texts)] == ["<e>", "<e>"]
    assert "more than 3 s" in said(next, texts)
    assert rendered(ours, "y") == ["<e>"]


RENDERING = """
from pathlib import Path
from prefect_rlhf.rlhf_tasks.data.chat_template import ChatTemplate, Source
ours = ChatTemplate(Source("{{ eos_token }}", Path("chat_template.jinja")), {"eos_token": "<e>"})
print(list(ours.render([([], True)])), ours._lines.child.pid, flush=True)
input()
"""


def test_a_template_whose_process_was_stopped_ends_with_who_renders_it():
    command = python_call("builtins:exec", RENDERING)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as renders:
        assert renders.stdout is not None
        text, pid = renders.stdout.readline().split()
        assert text == "['<e>']"
        child = psutil.Process(int(pid))
        child.suspend()
        renders.kill()
    child.wait(60)


def test_answers_that_nobody_has_read_are_nobody_elses():
    ours = template("{{ messages[0].content }}")
    texts = ours.render(([{"content": content}], True) for content in "ab")
    assert next(texts) == "a"
    assert rendered(ours, "c") == ["c"]
    assert list(texts) == ["b"]


def test_many_slow_conversations_in_one_request_may_take_more_than_one(monkeypatch: pytest.MonkeyPatch):
    """Each conversation more gives its process more time, not each request."""
    limits = list[int]()
    monkeypatch.setattr(chat_template, "limit", lambda kind, most: limits.append(most))
    source = ["{{ messages }}", "t", True, {}]
    requests = [source, [["a", True]] * 200, [["a", True]] * 51]
    answers = io.BytesIO()
    render_all(io.BytesIO(b"\n".join(json.dumps(each).encode() for each in requests)), answers)
    assert len(answers.getvalue().splitlines()) == 251
    assert limits[-1] == 8


@pytest.mark.timeout(60)
def test_a_process_that_does_not_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    ours = template("a")
    rendered(ours, "x")
    monkeypatch.setattr(chat_template, "DEADLINE_S", 0.5)
    assert ours._lines is not None
    ours._lines.child.send_signal(signal.SIGSTOP)
    assert "gave no text in 0.5 s" in said(rendered, ours, "x" * 200_000)


def test_one_process_serves_all_conversations_and_ends_with_its_tokenizer():
    ours = template("{{ messages[0].content }}")
    texts = [text for i in range(50) for text in rendered(ours, str(i), "x")]
    assert texts == [text for i in range(50) for text in (str(i), "x")]
    assert ours._lines is not None
    child = ours._lines.child
    del ours
    assert child.returncode is not None


def test_a_template_sees_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    ours = template("a")
    rendered(ours, "x")
    assert ours._lines is not None
    assert b"SECRET_OF_THE_RUN" not in Path(f"/proc/{ours._lines.child.pid}/environ").read_bytes()


def test_a_template_s_process_ends_when_its_parent_is_gone(tmp_path: Path):
    ours = template("a")
    rendered(ours, "x")
    assert ours._lines is not None
    child = ours._lines.child
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60) == 0
    child.stdin = open(os.devnull, "wb")  # noqa: SIM115  for the finalizer


TOKENS = {
    "a list as end token": (
        "tokenizer_config.json",
        {"eos_token": ["</s>"]},
        "eos_token=['</s>'] is no text",
    ),
    "a number as content": ("tokenizer_config.json", {"eos_token": {"content": 3}}, "is no text"),
    "text as an id": ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id='2' is neither"),
    "truth as an id": ("generation_config.json", {"eos_token_id": [True]}, "eos_token_id=[True] is neither"),
    "a list in a list": ("generation_config.json", {"eos_token_id": [[2]]}, "eos_token_id=[[2]] is neither"),
    "a template of numbers": ("tokenizer_config.json", {"chat_template": 7}, "chat_template=7 is no text"),
    "a named template": (
        "tokenizer_config.json",
        {"chat_template": [3, {"name": {}}, {"name": "default", "template": []}]},
        "chat_template=[] is no text",
    ),
    "a list": ("tokenizer_config.json", [], "expected a JSON object, found list"),
}


@pytest.mark.parametrize("case", TOKENS)
def test_hostile_tokens_are_refused(tmp_path: Path, case: str):
    name, content, sentence = TOKENS[case]
    write_model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / name).write_text(json.dumps(content))
    found = said(Tokenizer.from_folder, tmp_path)
    assert found.startswith(str(tmp_path / name))
    assert sentence in found


@pytest.mark.timeout(60)
def test_a_text_without_tokens_is_refused(tmp_path: Path):
    write_model_folder(tmp_path)
    stated = json.loads((tmp_path / "tokenizer.json").read_text())
    stated["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stated))
    assert "tokenizer.json: it does not take the text: " in said(
        Tokenizer.from_folder(tmp_path).encode, "zebra"
    )


def replaced(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def nested(innermost: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        innermost = {"type": "Sequence", "normalizers": [innermost]}
    return innermost


HOSTILE = {
    "nesting": ({"normalizer": nested(replaced("a", "b" * 40_000_000), 60)}, "bytes of memory"),
    "multiplication": (
        {"normalizer": {"type": "Sequence", "normalizers": [replaced("a", "a" * 1000)] * 3}},
        "to read it and to try it on 65,536 characters takes more than 1,07",
    ),
    "some of it": (
        {"normalizer": replaced("a", "a" * 1000)},
        "it makes 133,394 tokens of 527 bytes of text.",
    ),
    "a decoder": ({"decoder": replaced("a", "a" * 9999)}, "characters of 527 tokens."),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tokenizer_is_refused_before_our_process_reads_it(tmp_path: Path, case: str):
    stated, sentence = HOSTILE[case]
    write_model_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **stated}))
    sentences = []
    assert grown(lambda: sentences.append(said(Tokenizer.from_folder, tmp_path))) < 300_000
    assert sentences[0].startswith(f"{path}: cannot be read as a tokenizer: ")
    assert sentence in sentences[0]


@pytest.mark.parametrize(
    ("stated", "sentence"),
    [
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "YWJj"}},
            "Cannot parse precompiled_charsmap",
        ),
        (
            {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
            "it fails on a text: chunk size must be non-zero.",
        ),
    ],
)
def test_where_rust_panics_over_a_tokenizer_only_our_sentence_is_seen(tmp_path, capfd, stated, sentence):
    write_model_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **stated}))
    found = said(Tokenizer.from_folder, tmp_path)
    assert found.startswith(f"{path}: cannot be read as a tokenizer: ")
    assert sentence in found
    assert capfd.readouterr() == ("", "")


@pytest.mark.timeout(60)
def test_a_tokenizer_that_searches_for_ever_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.data.tokenizer.CPU_S", 0.5)
    write_model_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    slow = {"normalizer": {"type": "Sequence", "normalizers": [replaced(" ", "a"), *SLOW]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **slow}))
    assert "takes more than 1 s of CPU time" in said(Tokenizer.from_folder, tmp_path)


SLOW = [{"type": "Replace", "pattern": {"Regex": "a+b|a+c|a+d|.*x.*y.*z.*\\b\\B"}, "content": ""}] * 20
