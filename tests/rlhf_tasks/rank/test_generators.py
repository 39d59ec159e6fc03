"""What draws responses: our engine, vLLM in a process of its own, or one of a user's, behind one protocol."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prefect_rlhf.flows.cluster.engines_beside import check_generation
from prefect_rlhf.flows.demo import MODEL, byte_tokenizer, write_model_folder
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.algorithms.functions import fetch
from prefect_rlhf.rlhf_tasks.algorithms.shared.generation import sampling_params
from prefect_rlhf.rlhf_tasks.config.generation import default_python
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleStore
from prefect_rlhf.rlhf_tasks.parallel.generate.beside import GenerationFault
from prefect_rlhf.rlhf_tasks.parallel.generate.completions import Completions
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import generate
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from tests.loopback import served
from tests.rlhf_tasks.algorithms.one_rank import OneRank
from tests.rlhf_tasks.algorithms.test_one_rank import changed, document, folder, weights, world
from tests.rlhf_tasks.parallel.generate.completion_server import KEY, CompletionServer
from tests.rlhf_tasks.rank.engines_of_others import LENGTH, MODE, FakeVllm, Uniform

__all__ = ["folder", "world"]  # fixtures

BUILT_IN = "prefect_rlhf.rlhf_tasks.parallel.generate.generator:BuiltIn"
VLLM_PYTHON = os.environ.get("PREFECT_RLHF_TEST_VLLM", default_python())
VOCABULARY = len(byte_tokenizer().get_vocab())
needs_vllm = pytest.mark.skipif(not Path(VLLM_PYTHON).is_file(), reason="no environment with vLLM")


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Any]:
    runs: list[OneRank] = []

    def make(engine: str, kind: str = "grpo", **changes: Any) -> OneRank:
        groups = {"num_generations": 2} if kind == "grpo" else {}
        generation = {"engine": engine, **changes.pop("generation", {})}
        settings = {**groups, **changes, "generation": generation}
        runs.append(OneRank(make_config(document(kind, folder, **settings)), tmp_path))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_third_engine_draws_for_whole_iterations(start: Any, kind: str):
    run = start(f"{Uniform.__module__}:Uniform", kind)
    before = weights(run, "actor")
    assert isinstance(run.generator, Uniform)
    for iteration in range(2):
        metrics, store = run.iterate(iteration)
        run.engines["actor"].version += 1
        batch = store.get(list(range(8 * iteration, 8 * iteration + 8)), ["response_mask", "old_logprobs"])
        assert int(batch["response_mask"].values.sum()) == 8 * LENGTH
        assert metrics["completions/mean_length"] == LENGTH
        assert "importance/mean" in metrics, "what another engine has drawn is weighted"
    assert run.generator.log == [("take", 0), ("draw", 0), ("take", 1), ("draw", 1)]
    assert changed(run, "actor", before)


def test_what_another_engine_draws_is_weighted_by_the_trainers_own_probabilities(start: Any):
    """The train_step takes two optimizer steps, so a pass before it computes the actor's log-probabilities."""
    run = start(f"{Uniform.__module__}:Uniform")
    assert "actor_inference" in [call.name for call in run.calls]
    metrics, store = run.iterate(0)
    batch = store.get(list(range(8)), ["proximal_logprobs", "old_logprobs", "response_mask"])
    change = (batch["proximal_logprobs"].values - batch["old_logprobs"].values).double()
    weight = change.exp().clamp(max=2.0)[batch["response_mask"].values].mean()
    assert metrics["importance/mean"] == pytest.approx(float(weight), rel=1e-5)


@pytest.mark.parametrize("engine", ["builtin", BUILT_IN])
def test_our_engine_behind_the_protocol_gives_the_bits_of_generate(start: Any, engine: str):
    """Of each version, also with what top-k kept, and groups that share a prompt."""
    run = start(engine, correction={"kind": "none"}, sampling={"max_completion_length": 8, "top_k": 5})
    params = sampling_params(run.config.sampling, run.tokenizer)
    for iteration in range(2):
        ids = range(8 * iteration, 8 * iteration + 8)
        rows = fetch(run.rows, run.config, ids)
        directly = generate(run.engines["actor"], rows, params, run.config.seed, iteration, record_kept=True)
        _, store = run.iterate(iteration)
        run.engines["actor"].version += 1
        assert directly is not None
        behind = store.get(list(ids), list(directly.data))
        for key, packed in directly.data.items():
            assert packed.lengths == behind[key].lengths
            assert torch.equal(packed.values, behind[key].values), key


def fake(start: Any, monkeypatch: pytest.MonkeyPatch, mode: str = "", **changes: Any) -> OneRank:
    monkeypatch.setenv(MODE, mode)
    return start(f"{FakeVllm.__module__}:FakeVllm", **changes)


def below() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_a_process_draws_with_the_weights_of_each_version(start: Any, monkeypatch: pytest.MonkeyPatch):
    run = fake(start, monkeypatch)
    call = next(call for call in run.calls if call.kind == "generate")

    def drawn() -> list[int]:
        store = SampleStore()
        store.put(fetch(run.rows, run.config, range(8)))
        run.call(call, 0, store, range(8))
        assert run.generator.version == run.engines["actor"].version
        return store.get(list(range(8)), ["input_ids"])["input_ids"].values.tolist()

    before = drawn()
    assert drawn() == before
    with torch.no_grad():
        next(iter(run.engines["actor"].stage.named_slices().values())).add_(0.5)
    run.engines["actor"].version += 1
    assert drawn() != before


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("hang", "vLLM has made no progress for"),
        ("idle", "vLLM has made no progress for"),
        ("end", r"the process of vLLM has ended \(draw, status 3\)"),
        ("fault", "vLLM has failed .draw.: ValueError: as asked"),
        ("version", "vLLM has weights of version -1, and was given 0"),
        ("digest", r"vLLM on rank 0 has other bits of 'model\.[\w.]+' than it was given"),
    ],
)
def test_a_process_that_hangs_ends_or_has_other_weights_is_a_fault_and_leaves_nothing(
    start: Any, monkeypatch: pytest.MonkeyPatch, mode: str, said: str
):
    before = below()
    run = fake(start, monkeypatch, mode, patience=0.05 if mode in ("hang", "idle") else 1.0)
    with pytest.raises(GenerationFault, match=said):
        run.iterate(0)
    assert below() - before or mode == "end"
    run.generator.close()
    assert not below() - before


def test_an_abort_from_another_thread_ends_a_draw_that_hangs(start: Any, monkeypatch: pytest.MonkeyPatch):
    run = fake(start, monkeypatch, "hang")
    threading.Timer(8.0, run.generator.abort).start()
    began = time.monotonic()
    with pytest.raises(GenerationFault, match="has ended"):
        run.iterate(0)
    assert time.monotonic() - began < 60


def by_server(start: Any, server: CompletionServer, tmp_path: Path, **changes: Any) -> OneRank:
    (tmp_path / "weights").mkdir(exist_ok=True)
    settings = {"url": server.url, "weights_dir": str(tmp_path / "weights"), **changes.pop("generation", {})}
    return start("openai", generation=settings, **changes)


def test_a_server_draws_with_the_weights_of_each_version(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RLHF_TEST_KEY", KEY)
    with served(CompletionServer(VOCABULARY, "key")) as server:
        run = by_server(start, server, tmp_path, generation={"api_key_env": "RLHF_TEST_KEY"})
        before = weights(run, "actor")
        for iteration in range(2):
            run.save("actor", tmp_path / f"model-{iteration}")
            whole = load_file(tmp_path / f"model-{iteration}" / "model.safetensors")
            metrics, _ = run.iterate(iteration)
            run.engines["actor"].version += 1
            (file,) = (tmp_path / "weights").glob("policy-*/model.safetensors")
            there = load_file(file)
            assert there.keys() == whole.keys()
            assert all(torch.equal(whole[name], tensor) for name, tensor in there.items())
            assert "importance/mean" in metrics
        assert len(server.bodies("/update_weights_from_disk")) == 2
    assert changed(run, "actor", before)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("vocabulary", f"has drawn token {VOCABULARY}, and the model has {VOCABULARY}: it is another model"),
        ("changed", "has weights of another run, and was given 0-.*: another user has changed them"),
        ("no ids", "returns no token ids"),
    ],
)
def test_a_server_that_draws_with_something_else_is_a_fault(start: Any, tmp_path: Path, mode: str, said: str):
    with served(CompletionServer(VOCABULARY, mode)) as server:
        run = by_server(start, server, tmp_path)
        with pytest.raises(GenerationFault, match=said):
            run.iterate(0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"generation": {"engine": "sglang"}}, "generation.engine"),
        ({"generation": {"kv_bytes": 5}}, "kv_bytes: only engine=vllm reads it, not builtin"),
        ({"generation": {"engine": "vllm", "url": "http://a"}}, "url: only engine=openai reads it, not vllm"),
        ({"generation": {"engine": "openai", "url": "http://a"}}, "engine=openai needs weights_dir. Name it"),
        ({"generation": {"engine": "openai", "url": "a:80", "weights_dir": "/w"}}, "generation.url"),
        (
            {"generation": {"engine": "vllm"}, "sampling": {"max_completion_length": 8, "segment_tokens": 4}},
            "sampling.segment_tokens=4: the caches that wait between two segments are the built-in",
        ),
        ({"generation": {"engine": "vllm"}, "dtype": "float64"}, "computes in float32 or bfloat16"),
        (
            {
                "generation": {"engine": "vllm"},
                "sampling": {"max_completion_length": 8, "temperature": 0.005},
            },
            "sampling.temperature=0.005: with generation.engine=vllm the lowest that is not 0 is 0.01",
        ),
        (
            {"generation": {"engine": "vllm"}, "sampling": {"max_completion_length": 8, "top_k": 4}},
            "top_k",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(folder: Path, changes: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        make_config(document("grpo", folder, **{"num_generations": 2, **changes}))


def wide_model(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    """A folder with weights. vLLM's attention on CPUs takes heads from 32 on, so the model is wider than those of
    other tests."""
    wide = {**MODEL, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    write_model_folder(folder / "wide")
    (folder / "wide" / "config.json").write_text(json.dumps({**wide, "initializer_range": 0.2, **changes}))
    drawn = OneRank(make_config(document("sft", folder, "wide", random_init=True)), tmp_path)
    drawn.save("actor", tmp_path / "actor")
    drawn.close()
    return tmp_path / "actor"


def assert_drawn_as_transformers_says(run: OneRank, tmp_path: Path, atol: float = 1e-4) -> None:
    """In two iterations, the second after a train_step, the log-probabilities are those of plain transformers."""
    for iteration in range(2):
        run.save("actor", tmp_path / f"model-{iteration}")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"model-{iteration}", dtype=torch.float32)
        metrics, store = run.iterate(iteration)
        run.engines["actor"].version += 1
        ids = list(range(8 * iteration, 8 * iteration + 8))
        keys = ("input_ids", "response_mask", "old_logprobs")
        batch = store.get(ids, keys)
        for tokens, mask, logprobs in zip(*(batch[key].split() for key in keys), strict=True):
            with torch.no_grad():
                logits = model(tokens[None]).logits[0, :-1]
            logits[:, run.rows.vocabulary :] = -torch.inf
            theirs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            torch.testing.assert_close(logprobs[1:][mask[1:]], theirs[mask[1:]], atol=atol, rtol=0)
        assert metrics["importance/mean"] == pytest.approx(1.0, abs=10 * atol)


SHORT = {"sampling": {"max_completion_length": 16, "stop": ["ab"]}, "optimizer": {"learning_rate": 0.02}}


@needs_vllm
@pytest.mark.slow
def test_vllm_draws_with_the_probabilities_of_transformers_after_each_version(
    start: Any, folder: Path, tmp_path: Path
):
    models = {"actor": str(wide_model(folder, tmp_path))}
    run = start("vllm", models=models, generation={"python": VLLM_PYTHON, "kv_bytes": 1 << 26}, **SHORT)
    assert_drawn_as_transformers_says(run, tmp_path)


@needs_vllm
@pytest.mark.slow
def test_vllm_draws_in_bfloat16_and_turn_by_turn(start: Any, folder: Path, tmp_path: Path):
    """In bfloat16 the two engines round unlike, which is what the weights are for; in float32 what an environment has
    answered is context for both."""
    actor, vllm = str(wide_model(folder, tmp_path)), {"python": VLLM_PYTHON, "kv_bytes": 1 << 26}
    rounded = start("vllm", models={"actor": actor}, generation=vllm, dtype="bfloat16", **SHORT)
    for iteration in range(2):
        metrics, _ = rounded.iterate(iteration)
        rounded.engines["actor"].version += 1
        assert 1e-7 < metrics["importance/kl"] < 0.01
    echo = {"factory": f"{Path(__file__).parents[2]}/tiny_environment.py:Echo", "max_turn_tokens": 4}
    room = {"sampling": {"max_completion_length": 20}, "rewards": [], "environment": echo}
    played = start("vllm", models={"actor": actor}, generation=vllm, optimizer=SHORT["optimizer"], **room)
    for iteration in range(2):
        metrics, store = played.iterate(iteration)
        played.engines["actor"].version += 1
        assert metrics["importance/kl"] < 1e-8
        ids = list(range(8 * iteration, 8 * iteration + 8))
        masks = store.get(ids, ["response_mask"])["response_mask"].split()
        assert any((mask[:-1] & ~mask[1:]).any() for mask in masks), "no response was answered"


@contextmanager
def vllm_server(model: Path) -> Iterator[str]:
    """A server of vLLM on a port of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"""-m vllm.entrypoints.openai.api_server --model {model} --served-model-name policy --host 127.0.0.1
        --port {port} --dtype float32 --enforce-eager --max-model-len 128 --kv-cache-memory-bytes {1 << 26}
        --logprobs-mode processed_logprobs --generation-config vllm --api-key {KEY}""".split()
    here = {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    quiet = {"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    log = model.parent / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [VLLM_PYTHON, *words],
            env={**os.environ, **here, **quiet},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        for _ in range(300):
            assert server.poll() is None, log.read_text()[-3000:]
            with suppress(GenerationFault):
                Completions(f"http://127.0.0.1:{port}", None, KEY, 1.0).meet()
                break
            time.sleep(1.0)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30.0)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


@needs_vllm
@pytest.mark.slow
def test_vllms_server_draws_with_the_probabilities_of_transformers_after_each_version(
    start: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RLHF_TEST_KEY", KEY)
    actor = wide_model(folder, tmp_path, tie_word_embeddings=False)
    (tmp_path / "weights").mkdir()
    with vllm_server(actor) as url:
        generation = {"url": url, "api_key_env": "RLHF_TEST_KEY", "weights_dir": str(tmp_path / "weights")}
        run = start("openai", models={"actor": str(actor)}, generation=generation, **SHORT)
        check_generation(run.config, read_shape(str(actor)))
        assert_drawn_as_transformers_says(run, tmp_path)
        run.generator.take(run.engines["actor"])
        assert Completions(url, None, KEY, 1.0).current() == run.generator._name
        with pytest.raises(
            ConfigError, match="tied to its embedding, and a vLLM server on CPUs keeps the first"
        ):
            check_generation(run.config, replace(read_shape(str(actor)), tied=True))
