"""The demo's configurations: they load, fit each other, and on one rank teach what the README says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_rlhf.flows.demo import (
    MODEL,
    PAIRS,
    accuracy,
    preference_pairs,
    score_statistics,
    write_demo_data,
    write_jsonl,
)
from prefect_rlhf.flows.pipeline import BEFORE_PPO, Demo
from prefect_rlhf.rlhf_tasks.algorithms.configurations import RunConfig, load_config
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.algorithms.rollout import RolloutConfig
from prefect_rlhf.rlhf_tasks.user_code.rewards import read_samples
from tests.rlhf_tasks.algorithms.one_rank import OneRank, world_of_one

FOLDER = Path(__file__).parents[2] / "deployments" / "demo"
SEED = 0


RUNS = sorted({*FOLDER.glob("*.yaml")} - {FOLDER / "pipeline.yaml"})


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_configuration_loads_and_fits_the_model(path: Path, tmp_path: Path):
    config = load_config(path, base=tmp_path)
    assert config.data.train.startswith(str(tmp_path / "data"))
    assert config.name == path.stem
    if isinstance(config, PPOConfig | RolloutConfig):
        longest = config.data.max_prompt_tokens + config.sampling.max_completion_length
        assert longest <= MODEL["max_position_embeddings"]


def test_the_stages_are_one_pipeline_of_these_configurations(tmp_path: Path):
    demo = Demo(tmp_path, SEED, "tls://127.0.0.1:1")
    stages = demo.stages()
    sft, reward = (str(tmp_path / "stages" / name / "model") for name in ("sft", "reward-model"))
    assert list(stages) == [*BEFORE_PPO, "ppo", "accuracy-before", "accuracy-after"]
    assert stages["sft"] == demo.config("sft", "sft")
    assert stages["pairs"] == demo.config("pairs", "pairs", models={"actor": sft})
    assert stages["reward-model"] == demo.config("reward_model", "reward-model", models={"actor": sft})
    both = {"actor": sft, "reward": reward}
    assert stages["calibration"] == demo.config("calibration", "calibration", models=both)
    assert stages["ppo"] == demo.config("ppo", "ppo", models=both)
    measured = demo.config("evaluation", "accuracy-before", models={"actor": sft})
    assert stages["accuracy-before"] == measured


def stage(name: str, base: Path, *overrides: str) -> tuple[RunConfig, OneRank, Path]:
    config = load_config(FOLDER / f"{name}.yaml", [f"seed={SEED}", "dtype=float32", *overrides], base)
    run_folder = base / "runs" / (config.name or name)
    return config, OneRank(config, run_folder), run_folder


def train(name: str, role: str, base: Path, *overrides: str) -> Path:
    """Run a training stage and save its role; the folder."""
    config, run, _ = stage(name, base, *overrides)
    for iteration in range(config.total_iterations):  # type: ignore[union-attr]
        run.iterate(iteration)
    run.close()
    run.save(role, base / name)
    return base / name


def roll_out(name: str, base: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run a rollout; its samples."""
    config, run, run_folder = stage(name, base, *overrides)
    assert isinstance(config, RolloutConfig)
    n_samples = len(run.rows) * config.num_generations
    for iteration in range(-(-n_samples // config.batch_size)):
        run.iterate(iteration)
    run.close()
    return list(read_samples(run_folder, n_samples))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_the_recipe_learns_what_supervision_on_sloppy_demonstrations_does_not(tmp_path: Path):
    torch.set_num_threads(1)
    write_demo_data(tmp_path / "data", SEED)
    with world_of_one():
        train("sft", "actor", tmp_path)
        before = accuracy(roll_out("evaluation", tmp_path, "name=before"))
        pairs = preference_pairs(roll_out("pairs", tmp_path), PAIRS, SEED)
        write_jsonl(tmp_path / "data" / "pairs.jsonl", pairs)
        train("reward_model", "reward", tmp_path)
        mean, std = score_statistics(roll_out("calibration", tmp_path))
        train("ppo", "actor", tmp_path, f"reward_model.mean={mean}", f"reward_model.std={std}")
        after = accuracy(roll_out("evaluation", tmp_path, f"models.actor={tmp_path}/ppo", "name=after"))
    print(f"greedy exact match: {before:.3f} before PPO, {after:.3f} after; {len(pairs)} pairs")
    assert 0.25 < before < 0.6
    assert after > 0.85
    assert after > before + 0.3
