"""An examination finds what is right and what is wrong, under splits of every axis."""

import os
import re
import signal
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from prefect_rlhf.rlhf_tasks.doctor import (
    TOLERANCES,
    Case,
    Finding,
    difference,
    examine,
    run_ranks,
    worst,
    write_answers,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.tiny_models import SIZES, in_mxfp4, tiny_config, tiny_model, tokens

DIVIDES = ParallelStrategy(cp=2)  # ranks that divide tokens do not generate
STRATEGIES = (ParallelStrategy(tp=2), ParallelStrategy(pp=2), ParallelStrategy(dp=2), DIVIDES)
CHECKS = ("logits", "gradients", "greedy tokens", "reallocation")


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    """A model, by default of a family with scaled embeddings, tied, and its answers. GPT-OSS is in MXFP4."""
    family = getattr(request, "param", "gemma")
    if family == "gpt_oss":
        in_mxfp4(tmp_path / "model", tiny_config(family, hidden_size=64, intermediate_size=96))
    else:
        tiny_model(tiny_config(family)).save_pretrained(tmp_path / "model")
    (tmp_path / "answers").mkdir()
    sequences = tuple(tuple(s.tolist()) for s in tokens(5, 9, 1, 7))
    return Case(str(tmp_path / "model"), str(tmp_path / "answers"), "float32", sequences, 6)


def _examine(rank: int, world: int, case: Case) -> list[Finding]:
    return examine(rank, torch.device("cpu"), case, TOLERANCES["float32"], STRATEGIES)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "changed"),
    [
        pytest.param("gemma", r"model\.layers\.3\.mlp\.down_proj\.weight", marks=pytest.mark.whole),
        ("mixtral", r"model\.layers\.3\.block_sparse_moe\.experts\.[12]\.w2\.weight"),
        pytest.param("glm4_moe", r"model\.layers\.3\.mlp\.shared_experts.*", marks=pytest.mark.whole),
        ("gemma4_text", r"model\.layers\.1\.layer_scalar"),
        pytest.param("gpt_oss", r"model\.layers\.2\.self_attn\.sinks", marks=pytest.mark.whole),
        pytest.param("gpt2", r"transformer\.h\.3\.attn\.c_attn\.weight", marks=pytest.mark.whole),
    ],
    indirect=["case"],
)
def test_a_sound_model_passes_every_check_and_a_changed_one_fails_those_that_show_it(ranks, case, changed):
    write_answers(case, torch.device("cpu"))
    findings = worst(ranks.run(2, _examine, case))
    assert {(f.strategy, f.check) for f in findings} == {
        (s, c) for s in STRATEGIES for c in CHECKS if (s, c) != (DIVIDES, "greedy tokens")
    }
    assert all(f.passed for f in findings), findings
    assert all(f.difference > 0 for f in findings if f.check in ("logits", "gradients"))

    file = Path(case.model) / "model.safetensors"
    weights = load_file(file)
    factors = {name: 1.3 if re.fullmatch(changed, name) else 1.0 for name in weights}
    assert set(factors.values()) == {1.0, 1.3}
    wrong = {name: weight * factors[name] for name, weight in weights.items() if factors[name] != 1.0}
    save_file(weights | wrong, file)
    for found in worst(ranks.run(2, _examine, case)):
        assert found.passed == (found.check == "reallocation"), found


def _examine_unknown(rank: int, world: int, case: Case) -> list[Finding]:
    # by its name, since a rank is sent copies of objects
    with patch.dict("prefect_rlhf.rlhf_tasks.parallel.layout.families.FAMILIES") as families:
        families.pop("granite")
        return _examine(rank, world, case)


@pytest.mark.dist
def test_what_a_model_does_outside_of_its_layers_is_found_where_we_do_not_know_it(ranks, tmp_path):
    config = AutoConfig.for_model("granite", **SIZES, embedding_multiplier=3.0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    case = Case(str(tmp_path), str(tmp_path), "float32", ((5, 6, 7), (8, 9)), 2)
    write_answers(case, torch.device("cpu"))
    findings = worst(ranks.run(2, _examine_unknown, case))
    failed = {found.check for found in findings if not found.passed}
    assert {"logits", "gradients"} <= failed, findings


def test_16_bits_tolerate_what_rounding_does_to_transformers(case):
    rounded = write_answers(
        Case(case.model, case.answers, "bfloat16", case.sequences, 2), torch.device("cpu")
    )
    assert 100 * TOLERANCES["float32"].logits < rounded.logits < 0.5
    assert rounded.gradients > rounded.logits


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_infinitely_far(wrong):
    one = torch.ones(3)
    assert difference(one, one) == 0
    assert difference(one * wrong, one) == float("inf")


pytestmark = pytest.mark.dist


def _sum(rank: int, device: torch.device, value: float) -> float:
    total = torch.tensor(value + rank, device=device)
    dist.all_reduce(total)
    return total.item()


def _die(rank: int, device: torch.device, sleeps_s: float) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(sleeps_s)


def _spawned() -> set[int]:
    """Processes that multiprocessing has started here; other tests' clusters may have some."""
    return {p.pid for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())}


@pytest.mark.whole
def test_results_come_in_rank_order_and_no_process_stays():
    before = _spawned()
    assert run_ranks(2, _sum, (1.0,), 100.0) == [3.0, 3.0]
    assert _spawned() <= before


@pytest.mark.whole
def test_an_error_comes_with_its_rank_and_a_death_with_its_likely_cause(monkeypatch):
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.doctor.GRACE_S", 0.5)
    with pytest.raises(RuntimeError, match=r"rank [01] of 2: (?s:.*)TypeError"):
        run_ranks(2, _sum, ("a",), 100.0)
    with pytest.raises(ConfigError, match=r"rank 1 was ended, as the kernel does when memory runs out"):
        run_ranks(2, _die, (60.0,), 100.0)
