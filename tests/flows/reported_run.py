"""A run folder without a run: what recorded_run.json has, or many iterations of the same."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prefect_rlhf.flows.run.run_folder import new_run_folder
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config

RECORDED = json.loads(Path(__file__).with_name("recorded_run.json").read_text(encoding="utf-8"))


def write_run(base: Path, name: str = "tiny", **changes: Any) -> Path:
    """A new run folder that has a configuration only. changes: of the configuration."""
    config = {
        "type": "ppo",
        "name": name,
        "models": {"actor": "/models/tiny", "reward": "/models/reward"},
        "data": {"train": "/data/prompts.jsonl"},
        "output_dir": str(base),
        "sampling": {"max_completion_length": 12},
        "rewards": [{"function": "rewards.py:length_reward", "kwargs": {"key": "s3cret"}}],
        "batch_size": 16,
        "total_iterations": 12,
    }
    return new_run_folder(make_config({**config, **changes}))


def recorded_run(base: Path, name: str = "tiny", **changes: Any) -> Path:
    """A finished run as recorded_run.json has it: metrics of 12 iterations, the lineage of the last three."""
    folder = write_run(base, name, **changes)
    (folder / "plan.json").write_text(json.dumps(RECORDED["plan"]))
    write_rows(folder / "metrics.jsonl", RECORDED["metrics"])
    write_rows(folder / "lineage.jsonl", map(whole_row, RECORDED["lineage"]))
    for iteration in (0, 11):
        write_samples(folder, iteration, RECORDED["samples"])
    summary = {
        "iterations": 12,
        "seconds": 30.9,
        "seconds_per_iteration": 2.57,
        "planned_and_measured": RECORDED["planned_and_measured"],
        "planned_lanes": {"0-1": [["actor_generate", "generate", 0.0, 0.095]]},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "step-00000012").mkdir()
    return folder


def write_samples(folder: Path, iteration: int, samples: Iterable[Mapping[str, Any]]) -> None:
    (folder / "samples").mkdir(exist_ok=True)
    write_rows(folder / "samples" / f"{iteration:08d}-0000.jsonl", samples)


def whole_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the lineage with the figures that a test does not care about."""
    clocks = row["clocks"].values()
    return {
        "started_s": min(start for start, _ in clocks),
        "ended_s": max(end for _, end in clocks),
        "versions": {"actor": row["iteration"]},
        "bytes_sent": 1024,
        "flops": 1e6,
        "peak_bytes": dict.fromkeys(row["clocks"], 1 << 20),
        "digest": "",
        **row,
    }


def later(row: Mapping[str, Any], iterations: int, seconds: float) -> dict[str, Any]:
    """A row of the lineage as it would be some iterations and seconds later."""
    clocks = {rank: (start + seconds, end + seconds) for rank, (start, end) in row["clocks"].items()}
    return whole_row({**row, "iteration": row["iteration"] + iterations, "clocks": clocks})


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
