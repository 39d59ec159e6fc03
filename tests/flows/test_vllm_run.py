"""A whole run that draws with vLLM: adapters, bfloat16, sampling ahead, evaluations, two replicas; and its death."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.committed import last_step
from tests.flows.marked_command import MarkedCommand, outcome
from tests.rlhf_tasks.rank.test_generators import VLLM_PYTHON, needs_vllm
from tests.tiny_runs import critic_free_config, write_model

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1200)]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of two replicas. vLLM's attention on CPUs takes heads from 32 on."""
    monkeypatch.chdir(tmp_path)
    config = critic_free_config(tmp_path, type="grpo", num_generations=4, beta=0.0)
    document = json.loads(config.model_dump_json())
    write_model(tmp_path / "wide", hidden_size=128, intermediate_size=96)
    document |= {
        "models": {"actor": str(tmp_path / "wide")},
        "dtype": "bfloat16",
        "lora": {"rank": 4, "alpha": 32},
        "generation": {"engine": "vllm", "python": VLLM_PYTHON, "kv_bytes": 1 << 26},
        "optimizer": {"learning_rate": 0.01},
        "evaluation": {"data": document["data"]["train"], "every": 2, "on_start": True},
        "total_iterations": 4,
        "snapshot_every": 1,
        "cluster": {"devices_per_host": 2},
        "plan": dict.fromkeys(("actor_generate", "reward_inference", "actor_train"), "0-1 d2"),
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "importance/kl" in line]


def test_vllm_follows_adapters_that_train_and_a_rank_that_is_killed(file: Path, tmp_path: Path):
    """Merged adapters of the version before would be 0.1 nats and more away: this learning rate moves them far."""
    status, said = outcome(tmp_path / "log", "run", "grpo", "--config", str(file), "name=whole")
    assert status == 0, said
    rows = metrics(tmp_path / "runs" / "whole")
    assert len(rows) == 4
    assert all(1e-7 < row["importance/kl"] < 0.02 for row in rows), rows
    assert ["eval/reward" in row for row in rows] == [False, True, False, True]

    killed = {"PREFECT_RLHF_FAILPOINT": "trained:kill@rank1@iter2@gen0"}
    status, said = outcome(
        tmp_path / "log2", "run", "grpo", "--config", str(file), "name=ended", "max_restarts=0", **killed
    )
    assert status == 1, said
    ended = tmp_path / "runs" / "ended"
    committed = last_step(ended)
    assert committed
    status, said = outcome(tmp_path / "log3", "run", "grpo", "--resume", str(ended))
    assert status == 0, said
    assert len(metrics(ended)) == 4
    same = [row["reward"] for row in rows[:committed]]
    assert [row["reward"] for row in metrics(ended)[:committed]] == same, (
        "vLLM drew the same before the fault"
    )


def test_vllm_draws_ahead_of_training(file: Path, tmp_path: Path):
    plan = ("plan.actor_generate=0", "plan.reward_inference=1", "plan.actor_train=1", "staleness=1")
    status, said = outcome(tmp_path / "log", "run", "grpo", "--config", str(file), "name=ahead", *plan)
    assert status == 0, said
    rows = metrics(tmp_path / "runs" / "ahead")
    assert [row["staleness/max"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert rows[0]["importance/kl"] < 0.02


@pytest.mark.parametrize(
    ("axis", "family", "changes"),
    [
        ("t2", "llama", {}),
        ("p2", "phi3", {"pad_token_id": 0}),  # its files have queries, keys and values in one tensor
        ("t2", "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    ],
)
def test_vllm_divides_the_model_over_the_ranks_of_a_replica(
    file: Path, tmp_path: Path, axis: str, family: str, changes: dict[str, Any]
):
    """Two processes of it have a part of each weight. Weights of the version before would be 0.01 nats away."""
    sizes = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32, **changes}
    model = write_model(tmp_path / "other", family=family, **sizes)
    plan = (f"plan.{call}=0-1 {axis}" for call in ("actor_generate", "reward_inference", "actor_train"))
    of_model = ("name=divided", f"models.actor={model}", "dtype=float32", "optimizer.learning_rate=0.01")
    wanted = (*plan, *of_model)
    with MarkedCommand(tmp_path / "log", "run", "grpo", "--config", str(file), *wanted) as run:
        run.wait_until(lambda: {f"VLLM::Worker_TP{rank}" for rank in range(2)} <= named())
        status = run.process.wait(400)
        run.assert_gone()
    assert status == 0, run.output
    rows = metrics(tmp_path / "runs" / "divided")
    assert len(rows) == 4
    assert all(row["importance/kl"] < 1e-6 for row in rows), rows
    assert not [name for name in named() if name.startswith("VLLM::Worker")]


def named() -> set[str]:
    """Command lines of all processes, which vLLM's name themselves by."""
    return {" ".join(process.info["cmdline"] or ()).strip() for process in psutil.process_iter(["cmdline"])}
