"""What draws responses: our engine, vLLM in a process of its own, or one of a user's, behind one protocol."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from prefect_rlhf.flows.demo import MODEL, write_model_folder
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.algorithms.functions import fetch
from prefect_rlhf.rlhf_tasks.config.generation import default_python
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleStore
from prefect_rlhf.rlhf_tasks.parallel.generate.vllm_process import GenerationFault
from tests.rlhf_tasks.algorithms.one_rank import OneRank
from tests.rlhf_tasks.algorithms.test_one_rank import changed, document, folder, weights, world
from tests.rlhf_tasks.rank.engines_of_others import LENGTH, MODE, FakeVllm, Uniform

__all__ = ["folder", "world"]  # fixtures

BUILT_IN = "prefect_rlhf.rlhf_tasks.parallel.generate.generator:BuiltIn"
VLLM_PYTHON = os.environ.get("PREFECT_RLHF_TEST_VLLM", default_python())
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


def test_our_engine_behind_the_protocol_gives_the_same_bits(start: Any):
    correction = {"kind": "none"}
    one, other = start("builtin", correction=correction), start(BUILT_IN, correction=correction)
    for iteration in range(2):
        one.iterate(iteration)
        other.iterate(iteration)
    theirs = weights(other, "actor")
    assert all(torch.equal(w, theirs[name]) for name, w in weights(one, "actor").items())


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
        ("digest", "vLLM has weights of digest 0000000000000000, and was given digest"),
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"generation": {"engine": "sglang"}}, "generation.engine"),
        ({"generation": {"kv_bytes": 5}}, "kv_bytes: only engine=vllm reads it, not builtin"),
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


@needs_vllm
@pytest.mark.slow
def test_vllm_draws_with_the_probabilities_of_transformers_after_each_version(
    start: Any, folder: Path, tmp_path: Path
):
    """vLLM's attention on CPUs takes heads from 32 on, so the model is wider than those of other tests."""
    wide = {**MODEL, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    write_model_folder(folder / "wide")
    (folder / "wide" / "config.json").write_text(json.dumps({**wide, "initializer_range": 0.2}))
    drawn = OneRank(make_config(document("sft", folder, "wide", random_init=True)), tmp_path)
    drawn.save("actor", tmp_path / "actor")
    drawn.close()
    run = start(
        "vllm",
        models={"actor": str(tmp_path / "actor")},
        generation={"python": VLLM_PYTHON, "kv_bytes": 1 << 26},
        sampling={"max_completion_length": 16, "stop": ["ab"]},
        optimizer={"learning_rate": 0.02},
    )
    for iteration in range(2):
        run.save("actor", tmp_path / f"model-{iteration}")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"model-{iteration}")
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
            torch.testing.assert_close(logprobs[1:][mask[1:]], theirs[mask[1:]], atol=1e-4, rtol=0)
        assert metrics["importance/mean"] == pytest.approx(1.0, abs=1e-3)
