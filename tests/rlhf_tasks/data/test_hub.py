"""Models and data sets from a Hub on loopback, by the real client."""

import errno
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

from prefect_rlhf.rlhf_tasks.config.hub_names import hub_data, hub_model
from prefect_rlhf.rlhf_tasks.data import hub as hub_module
from prefect_rlhf.rlhf_tasks.data.hub import (
    Pin,
    Snapshot,
    _counting,
    fetch_data,
    fetch_model,
    pins_document,
    read_pins,
)
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.loopback_hub import READER, Hub
from tests.small_disk import small_disk

MODEL = {
    "config.json": "{}",
    "tokenizer.json": '{"version": 1}',
    "model.safetensors": b"w" * 300_000,
    "pytorch_model.bin": b"p" * 300_000,
    "original/params.json": "{}",
}


class Shown:
    """A `Progress` that remembers what it was told."""

    def __init__(self) -> None:
        self.totals: list[int] = []
        self.arrived = 0

    @contextmanager
    def __call__(self, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        self.totals.append(total_bytes)

        def advance(arrived: int) -> None:
            self.arrived += arrived

        yield advance


def model(text: str = "org/model", pin: Pin | None = None, shown: Shown | None = None, **options) -> Snapshot:
    name = hub_model(text)
    assert name is not None
    return fetch_model(name, pin, shown or Shown(), **options)


def data(text: str, pin: Pin | None = None) -> Snapshot:
    name = hub_data(text)
    assert name is not None
    return fetch_data(name, pin, Shown(), ("train",))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as refused:
        call()
    said = str(refused.value)
    assert "\n" not in said
    return said


def test_only_the_files_that_are_needed_are_downloaded(hub: Hub, tmp_path):
    commit, shown = hub.add("org/model", MODEL), Shown()
    with hub.used_here(tmp_path):
        snapshot = model(shown=shown)
    assert sorted(hub.downloads()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert snapshot.pin == Pin(commit=commit, files=("config.json", "tokenizer.json", "model.safetensors"))
    assert (snapshot.folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert shown.totals == [300_016]
    assert shown.arrived == 300_016
    assert not hub.leaked


def test_to_plan_the_weights_are_not_downloaded(hub: Hub, tmp_path):
    hub.add("org/model", MODEL)
    with hub.used_here(tmp_path):
        model(weights=False)
    assert sorted(hub.downloads()) == ["config.json", "tokenizer.json"]


def test_of_weights_in_parts_those_that_the_index_names_are_downloaded(hub: Hub, tmp_path):
    index = '{"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}'
    shards = {f"model-0000{number}.safetensors": b"%d" % number for number in (1, 2)}
    hub.add(
        "org/model",
        {
            "config.json": "{}",
            "model.safetensors.index.json": index,
            "consolidated.safetensors": b"c",
            **shards,
        },
    )
    with hub.used_here(tmp_path):
        model()
    assert "consolidated.safetensors" not in hub.downloads()
    assert set(shards) < set(hub.downloads())


def test_what_a_run_began_with_is_read_without_a_request_though_main_moves(hub: Hub, tmp_path):
    hub.add("org/model", MODEL)
    with hub.used_here(tmp_path):
        began = model()
        hub.add("org/model", {"config.json": '{"newer": 1}'})
        hub.requests.clear()
        assert model(pin=began.pin) == began
        assert hub.requests == []
        assert model().pin.commit != began.pin.commit
        (began.folder / "tokenizer.json").unlink()
        again = model(pin=began.pin)
    assert again == began
    assert (again.folder / "config.json").read_text() == "{}"


def test_a_commit_that_is_gone_is_named(hub: Hub, tmp_path):
    hub.add("org/model", MODEL)
    pin = Pin(commit="0" * 40, files=("config.json",))
    with hub.used_here(tmp_path):
        said = refusal(lambda: model(pin=pin))
    assert f"has no revision '{'0' * 40}'. It has main. The run began with commit {'0' * 40}." in said


def test_with_a_full_cache_nothing_is_asked_offline(hub: Hub, tmp_path):
    hub.add("org/model", MODEL)
    hub.add("org/rows", {"train.jsonl": '{"prompt": "a"}\n', "test.jsonl": "{}\n"}, "dataset")
    with hub.used_here(tmp_path):
        online, rows = model(), data("org/rows")
    hub.requests.clear()
    with hub.used_here(tmp_path, offline=True):
        assert model() == online
        assert data("org/rows") == rows
        said = refusal(lambda: model("org/other"))
        (online.folder / "model.safetensors").unlink()
        in_part = refusal(model)
    assert hub.requests == []
    assert "HF_HUB_OFFLINE is set" in said
    assert "has no model.safetensors" in in_part
    assert in_part.endswith("Only the cache was read: the Hub was not reached.")


def test_a_hub_that_is_down_is_no_fault_where_the_cache_is_full(hub: Hub, tmp_path):
    hub.add("org/model", MODEL)
    with hub.used_here(tmp_path):
        online = model()
        hub.close()
        assert model() == online
        said = refusal(lambda: model("org/other"))
    assert f"the model org/other could not be downloaded from {hub.url} (" in said
    assert "Look at the network" in said


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_name_with_a_typo_is_refused_with_what_the_hub_has(hub: Hub, tmp_path, kind):
    hub.add("org/qwen-small", MODEL, kind)
    with hub.used_here(tmp_path, READER):
        said = refusal(lambda: (model if kind == "model" else data)("org/qwen-smal"))
    assert "org/qwen-smal is no file or folder here, and" in said
    assert "It has org/qwen-small. Correct the name" in said


def test_what_only_an_account_may_read_is_refused_with_how_to_log_in(hub: Hub, tmp_path):
    hub.add("org/private", MODEL, private=True)
    hub.add("org/gated", MODEL, gated=True)
    with hub.used_here(tmp_path):
        assert "for a private one run `hf auth login` or set HF_TOKEN" in refusal(
            lambda: model("org/private")
        )
        gated = refusal(lambda: model("org/gated"))
    assert (
        f"is gated. Accept its terms at {hub.url}/org/gated, then run `hf auth login` or set HF_TOKEN."
        in gated
    )
    with hub.used_here(tmp_path, READER):
        model("org/private")
        assert "your token's account has no access. Ask for it at" in refusal(lambda: model("org/gated"))
        hub.add("org/gated", {}, members=("reader",))
        model("org/gated")
    with hub.used_here(tmp_path / "other", "hf_stale"):
        said = refusal(lambda: model("org/private"))
    assert "refuses your token" in said
    assert "hf_stale" not in said


def test_a_revision_that_there_is_not_is_refused_with_those_that_there_are(hub: Hub, tmp_path):
    commit = hub.add("org/model", MODEL)
    hub.repositories["model", "org/model"].refs["v1"] = commit
    with hub.used_here(tmp_path):
        assert model("org/model@v1").pin.commit == commit
        assert model(f"org/model@{commit}").pin.commit == commit
        assert "has no revision 'v2'. It has main, v1." in refusal(lambda: model("org/model@v2"))


def test_a_repository_that_was_renamed_is_found(hub: Hub, tmp_path):
    hub.add("org/new", MODEL)
    hub.add("org/old", {}, renamed="org/new")
    with hub.used_here(tmp_path):
        assert (model("org/old").folder / "model.safetensors").is_file()


def test_a_broken_connection_is_resumed_where_it_broke(hub: Hub, tmp_path, monkeypatch):
    hub.add("org/model", MODEL)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 50_000)
    hub.next_answers(r"GET /cdn/.*/model.safetensors", cut=100_000)
    with hub.used_here(tmp_path):
        snapshot = model()
    assert (snapshot.folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert any(request.endswith(" bytes=100000-") for request in hub.requests)


def test_an_overloaded_hub_is_asked_again_and_then_named(hub: Hub, tmp_path):
    hub.add("org/model", MODEL)
    hub.next_answers("GET /api/models", status=429, headers={"Retry-After": "0"}, times=2)
    hub.next_answers("GET /api/models", status=503, headers={"Retry-After": "0"})
    hub.next_answers("GET /api/models/.*/tree", status=503, headers={"Retry-After": "0"})
    hub.next_answers("GET .*/tokenizer.json", status=429, headers={"Retry-After": "0"})
    with hub.used_here(tmp_path):
        model()
        hub.next_answers("GET /api/models", status=429, headers={"Retry-After": "0"}, times=99)
        assert "answers 429. It has had too many requests" in refusal(lambda: model())


def test_where_one_file_fails_the_downloads_of_the_others_end(hub: Hub, tmp_path, monkeypatch):
    hub.add("org/model", MODEL)
    ended: list[str] = []

    def download(id: str, file: str, tqdm_class, **options):
        if file == "config.json":
            raise OSError(errno.EIO, "Input/output error")
        bar = tqdm_class(total=1)
        for _ in range(3000):
            bar.update(1)
            time.sleep(0.01)
        ended.append(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with hub.used_here(tmp_path):
        assert "Input/output error" in refusal(model)
    assert ended == []


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_file_with_another_hash_is_refused_and_removed(hub: Hub, tmp_path, file):
    hub.add("org/model", MODEL)
    content = MODEL[file]
    size = len(content)
    hub.next_answers(rf"GET .*/{file}", content=b"x" * size)
    with hub.used_here(tmp_path):
        said = refusal(model)
        assert f"{file} has arrived with another content than the Hub lists" in said
        snapshot = model()
    expected = content.encode() if isinstance(content, str) else content
    assert (snapshot.folder / file).read_bytes() == expected


@pytest.mark.parametrize("with_pin", [True, False])
def test_a_file_whose_check_was_interrupted_is_checked_by_the_next_run(
    hub: Hub, tmp_path, monkeypatch, with_pin
):
    hub.add("org/model", MODEL)
    with hub.used_here(tmp_path / "other"):
        pin = model().pin if with_pin else None
    hub.next_answers("GET .*/model.safetensors", content=b"x" * 300_000)

    def killed_there(name: Any, path: Path) -> None:
        if path.name == "model.safetensors":  # the end of a smaller file's check would end its download
            raise KeyboardInterrupt

    with hub.used_here(tmp_path):
        with monkeypatch.context() as patched:
            patched.setattr(hub_module, "_verify", killed_there)
            with pytest.raises(KeyboardInterrupt):
                model(pin=pin)
        assert "model.safetensors has arrived with another content" in refusal(lambda: model(pin=pin))
        snapshot = model(pin=pin)
        hub.requests.clear()
        model(pin=snapshot.pin)
    assert (snapshot.folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert hub.requests == [], "what was checked is not asked for again"


def test_a_password_in_the_address_of_the_hub_is_in_no_sentence(hub: Hub, tmp_path, monkeypatch):
    hub.add("org/model", MODEL)
    with hub.used_here(tmp_path):
        monkeypatch.setattr(constants, "ENDPOINT", hub.url.replace("://", "://me:hunter2@"))
        missing = refusal(lambda: model("org/absent"))
        hub.is_down = True
        down = refusal(lambda: model("org/other"))
    assert hub.url in missing
    assert hub.url in down
    assert "hunter2" not in missing + down


def test_a_download_that_the_disk_has_no_room_for_does_not_begin(hub: Hub, tmp_path, monkeypatch):
    hub.add("org/model", MODEL)
    with small_disk(tmp_path / "home") as mounted, hub.used_here(tmp_path / "home"):
        if not mounted:
            pytest.skip("only an account that may mount has a small disk")
        said = refusal(model)
    assert "the download needs 300016 bytes and the disk of" in said
    assert "set HF_HOME to a folder on another disk" in said
    assert "model.safetensors" not in hub.downloads()


def test_a_disk_that_others_fill_meanwhile_is_named(hub: Hub, tmp_path, monkeypatch):
    hub.add("org/model", MODEL)

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with hub.used_here(tmp_path):
        said = refusal(model)
    assert f"the disk of {tmp_path / 'hub'} is full" in said


def test_models_without_safetensors_or_configuration_are_refused_before_a_download(hub: Hub, tmp_path):
    hub.add("org/pickled", {"config.json": "{}", "pytorch_model.bin": b"p"})
    hub.add("org/gguf", {"model.gguf": b"g"})
    with hub.used_here(tmp_path):
        assert "has no model.safetensors, but pytorch_model.bin" in refusal(lambda: model("org/pickled"))
        assert "has no config.json" in refusal(lambda: model("org/gguf"))
    assert hub.downloads() == []


def test_the_files_of_a_split_are_downloaded_and_no_others(hub: Hub, tmp_path):
    card = (
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n---\n"
    )
    files = {"README.md": card, "main/train-0.jsonl": "{}\n", "main/test-0.jsonl": "{}\n"}
    commit = hub.add("org/rows", files, "dataset")
    with hub.used_here(tmp_path):
        snapshot = data("org/rows:main")
        assert "has no split 'dev'. Its splits are train." in refusal(lambda: data("org/rows:dev"))
        by_glob = data(f"hf://datasets/org/rows@{commit}/main/*.jsonl")
    assert snapshot.pin == Pin(commit=commit, files=("main/train-0.jsonl",))
    assert [path.name for path in snapshot.paths] == ["train-0.jsonl"]
    assert by_glob.pin.files == ("main/test-0.jsonl", "main/train-0.jsonl")


def test_rows_come_from_the_files_that_were_downloaded(hub: Hub, tmp_path):
    from prefect_rlhf.rlhf_tasks.config.data import DataConfig
    from prefect_rlhf.rlhf_tasks.data.dataset import data_set

    table, written = pyarrow.table({"prompt": ["a", "b"]}), io.BytesIO()
    pyarrow.parquet.write_table(table, written)
    hub.add("org/rows", {"data/train-00000-of-00001.parquet": written.getvalue()}, "dataset")
    with hub.used_here(tmp_path):
        snapshot = data("org/rows")
    section = DataConfig(train="org/rows").located({"org/rows": snapshot.paths})
    assert [placed.row for placed in data_set(section)] == [{"prompt": "a"}, {"prompt": "b"}]
    assert section.name == "org/rows"


def test_bytes_count_once_where_the_client_counts_those_on_the_wire_too():
    arrived: list[int] = []
    bar = _counting(arrived.append, Event())
    reporter = XetDownloadProgressReporter(reconstruction_desc="x", total=10, log_level=0, tqdm_class=bar)
    report = SimpleNamespace(
        total_bytes=10,
        total_bytes_completed=10,
        total_transfer_bytes_completed=7,
        total_bytes_completion_rate=1.0,
        total_transfer_bytes_completion_rate=1.0,
    )
    reporter.update_progress(report)
    reporter.close()
    assert arrived == [10]


def test_commits_are_recorded_and_read_again(tmp_path):
    pins = {"model org/model": Pin(commit="a" * 40, files=("config.json",))}
    assert read_pins(tmp_path / "revisions.json") == {}
    Path(tmp_path / "revisions.json").write_text(pins_document(pins))
    assert read_pins(tmp_path / "revisions.json") == pins
    Path(tmp_path / "revisions.json").write_text('{"model org/model": 3}')
    assert "not a record of revisions" in refusal(lambda: read_pins(tmp_path / "revisions.json"))
