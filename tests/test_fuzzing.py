"""Fuzzers of everything that reads a user's files: a few seconds each here, `FUZZ_SECONDS` in the slow suite."""

import gzip
import hashlib
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from prefect_rlhf.planner.pricing.device_classes import read_cluster
from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    load_config,
    make_config,
    manual_assignments,
    read_assignments,
)
from prefect_rlhf.rlhf_tasks.algorithms.examples import read_examples
from prefect_rlhf.rlhf_tasks.checkpoint.changes import CHANGES, log_change, logged_changes, read_plan
from prefect_rlhf.rlhf_tasks.checkpoint.journals import EMPTY, JOURNALS
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    Manifest,
    RoleRecord,
    StoredFile,
    read_manifest,
)
from prefect_rlhf.rlhf_tasks.config.data import DataConfig
from prefect_rlhf.rlhf_tasks.data.chat_template import ChatTemplate, Source
from prefect_rlhf.rlhf_tasks.data.dataset import data_set
from prefect_rlhf.rlhf_tasks.data.rows import completion_example, pair_example, prompt_example
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import INDEX, read_shape, weight_files
from tests.flows.checked_files import LLAMA, model_folder
from tests.fuzzing import as_json, changed, damaged, fuzz, fuzz_long, survives
from tests.rlhf_tasks.algorithms.test_configurations import ppo
from tests.rlhf_tasks.plans import on, small_plan, swapped_plan

PLAN = {"a": "0-1 d2", "b": "hosts 0 t2 m2 order1"}
CONFIGS = [
    ppo(),
    ppo(plan=PLAN, cluster={"n_hosts": 1, "devices_per_host": 2}, planning={"new_tokens": {"8": 1.0}}),
    {"type": "sft", "models": {"actor": LLAMA}, "data": {"train": "d"}, "total_iterations": 2},
    {
        "type": "rollout",
        "models": {"actor": "a", "reward": "r"},
        "data": {"train": "d", "column_map": {"a": "b"}},
    },
]
LINK = {"bytes_per_s": 1e9, "latency_s": 1e-5}
CLUSTERS = [
    {"n_hosts": 2, "devices_per_host": 8, "device": "h100-sxm", "inside_host": LINK},
    {
        "n_hosts": 2,
        "devices_per_host": 8,
        "device": {"like": "h100-sxm", "memory_bytes": 40e9, "inside_host": LINK},
    },
    {
        "n_hosts": 2,
        "devices_per_host": 1,
        "device": [{"n_hosts": 1, "device": n} for n in ("h100-sxm", "cpu-slot")],
    },
]
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
ROWS = [
    {"prompt": "ab", "answer": 3},
    {"prompt": TURNS[:1], "extra": {"a": [1.5, None]}},
    {"prompt": "ab", "completion": "c"},
    {"messages": TURNS},
    {"text": "abc"},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"chosen": TURNS, "rejected": [*TURNS[:1], {"role": "assistant", "content": "no"}]},
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m['content']|trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PIECES = [
    "{{ ", " }}", "{% for i in range(", "999999999)", ") %}", "{% endfor %}", "{% if ", "{% endif %}", "{% set x = ",
    "{% macro f(a) %}", "{% endmacro %}", "{{ f(f(1)) }}", "messages", "[0]", ".content", " * ", "20000000000", "'a'",
    "|length", "|tojson", "|map('upper')", "|list", "|join", "|batch(0)", "|round(10**9)", "1//0", " ** ",
    "raise_exception('x')", "strftime_now('%Y')", "namespace()", "''.__class__", "lipsum(9)", "range(10**9)|list",
    "cycler()", "dict(a=1)", "|format(1)", "'%9999999999d'", "{# ", " #}", "{%- ", " -%}", "|sort", "|pprint",
    "|truncate(-1)", "|wordwrap(0)", "|indent(10**10)", "|center(10**10)", "{% break %}", "{% include 'x' %}", "\n",
]  # fmt: skip
LARGER = {
    **LLAMA,
    "rope_scaling": {"type": "linear", "factor": 2},
    "eos_token_id": [257],
    "tie_word_embeddings": False,
}


class Fuzzer(NamedTuple):
    """What is tried, how often in the default suite, and the readers that must survive it; folder: theirs to fill."""

    strategy: st.SearchStrategy[Any]
    examples: int
    check: Callable[[Path, Any], None]


def check_config(folder: Path, content: bytes) -> None:
    path = folder / "file.yaml"
    path.write_bytes(content)

    def run() -> None:
        manual_assignments(load_config(path))

    for read in (run, lambda: read_cluster(path), lambda: read_assignments(path, 2)):
        survives(read)


def check_value(_: Path, document: Any) -> None:
    survives(lambda: make_config(document if isinstance(document, dict) else {}))


def check_rows(folder: Path, stored: tuple[str, bytes]) -> None:
    suffix, content = stored
    path, model = folder / f"rows{suffix}", folder / "model"
    path.write_bytes(content)
    if not model.exists():
        model_folder(model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.from_folder(model)

    def run() -> None:
        rows = list(data_set(DataConfig(train=str(path))))
        for reader in (prompt_example, completion_example, pair_example):
            for row in rows[:3]:
                survives(lambda reader=reader, row=row: list(read_examples(reader, [row], tokenizer)))

    survives(run)


def check_template(_: Path, text: str) -> None:
    template = ChatTemplate(Source(text, Path("chat_template.jinja")), {"eos_token": "<e>"})
    survives(lambda: list(template.render([(TURNS, True)])))


def check_plans(folder: Path, content: bytes) -> None:
    (folder / "plan.json").write_bytes(content)
    survives(lambda: read_plan(folder / "plan.json", "Put it back."))
    if not (folder / CHANGES).exists():
        log_change(folder, 4, swapped_plan())
    (folder / "plan-2.json").write_bytes(content)
    survives(lambda: logged_changes(folder))
    lines = folder / "lines"
    lines.mkdir(exist_ok=True)
    (lines / CHANGES).write_bytes(content + b"\n")
    survives(lambda: logged_changes(lines))


def check_manifest(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    (folder / CHECKSUM).write_bytes(f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode())
    survives(lambda: read_manifest(folder))


def check_model(folder: Path, stored: tuple[str, bytes]) -> None:
    name, content = stored
    sound = folder / "model"
    if not sound.exists():
        model_folder(sound)
        (sound / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE})
        )
    model = folder / "changed"
    model.mkdir(exist_ok=True)
    for path in sound.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    (model / INDEX).unlink(missing_ok=True)
    (model / name).write_bytes(content)

    def shape() -> None:
        found = read_shape(model)
        weight_files(model, parameters(found, "lm"), needs_head=True)

    survives(shape)
    survives(lambda: Tokenizer.from_folder(model).encode("hello", special_tokens=True))


def parquet(rows: list[Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def header(document: Any) -> bytes:
    text = json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


def manifest() -> dict[str, Any]:
    shape = ModelShape.from_config(LLAMA)
    record = RoleRecord(
        version=1, optimizer_step=1, state={"kl": 0.5}, shape=shape, head="lm", placement=on(0)
    )
    stored = StoredFile(role="actor", file="actor-0.safetensors", size_bytes=3, sha256="0" * 64)
    return Manifest(
        run="r", attempt=1, step=1, seed=0, cursor=8, versions={"actor": 1}, roles={"actor": record}, files=(stored,),
        journals=dict.fromkeys(JOURNALS, EMPTY), config=ppo(), plan_sha256="0" * 64,
    ).model_dump(mode="json")  # fmt: skip


def model_files(folder: Path) -> st.SearchStrategy[tuple[str, bytes]]:
    """(name of a file, its content) of a model folder."""
    sound = model_folder(folder)
    vocabulary = json.loads((sound / "tokenizer.json").read_text())
    tokens = {
        "eos_token": "</s>",
        "pad_token": {"content": "<pad>"},
        "chat_template": [{"name": "default", "template": "a"}],
    }
    tensors = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in ("a", "model.norm.weight")
    }

    def of(name: str, contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[tuple[str, bytes]]:
        return damaged(contents).map(lambda content: (name, content))

    return st.one_of(
        of("config.json", as_json(changed(lambda: [LLAMA, LARGER]))),
        of("tokenizer_config.json", as_json(changed(lambda: [tokens]))),
        of("generation_config.json", as_json(changed(lambda: [{"eos_token_id": [1, 2]}]))),
        of("tokenizer.json", as_json(changed(lambda: [vocabulary]))),
        of("model.safetensors", changed(lambda: [tensors]).map(header)),
        of("model.safetensors", st.just((sound / "model.safetensors").read_bytes())),
        of(INDEX, as_json(changed(lambda: [{"weight_map": {"a": "model.safetensors"}}]))),
    )


def row_files() -> st.SearchStrategy[tuple[str, bytes]]:
    """(suffix, content) of a file of rows."""
    lines = st.lists(as_json(changed(lambda: ROWS)), min_size=1, max_size=3).map(b"\n".join)
    return st.one_of(
        damaged(lines).map(lambda content: (".jsonl", content)),
        damaged(lines.map(gzip.compress)).map(lambda content: (".jsonl.gz", content)),
        damaged(st.sampled_from([parquet([row]) for row in ROWS])).map(lambda content: (".parquet", content)),
    )


def fuzzers(folder: Path) -> dict[str, Fuzzer]:
    texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
    mended = damaged(st.just(TEMPLATE.encode())).map(lambda content: content.decode(errors="replace"))
    plans = [json.loads(plan.model_dump_json()) for plan in (small_plan(), swapped_plan())]
    return {
        "configuration": Fuzzer(
            damaged(as_json(changed(lambda: [*CONFIGS, *CLUSTERS, PLAN]))), 60, check_config
        ),
        "values": Fuzzer(changed(lambda: CONFIGS), 100, check_value),
        "rows": Fuzzer(row_files(), 40, check_rows),
        "templates": Fuzzer(texts | mended, 8, check_template),
        "plans": Fuzzer(damaged(as_json(changed(lambda: plans))), 60, check_plans),
        "manifests": Fuzzer(damaged(as_json(changed(lambda: [manifest()]))), 60, check_manifest),
        "models": Fuzzer(model_files(folder / "sound"), 60, check_model),
    }


NAMES = ("configuration", "values", "rows", "templates", "plans", "manifests", "models")


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_takes_or_refuses_in_one_sentence(tmp_path: Path, name: str):
    found = fuzzers(tmp_path)[name]
    fuzz(found.strategy, lambda example: found.check(tmp_path, example), found.examples)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", NAMES)
def test_a_reader_takes_or_refuses_whatever_comes_for_minutes(tmp_path: Path, name: str):
    found = fuzzers(tmp_path)[name]
    fuzz_long(found.strategy, lambda example: found.check(tmp_path, example))
