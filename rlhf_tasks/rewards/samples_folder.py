"""Reads the samples that reward calls write into a run folder. Flows use it, so it is torch-free."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

SAMPLES = "samples"
"""The folder's name in the run folder; one JSONL file per iteration, dp rank and part of the reward call."""

SKIPPED_SAMPLES = "skipped-samples"
"""Of the folder in the run folder with the samples that a reward failed on (`on_reward_error: skip`)."""


def mean_scores(run_folder: Path, n_samples: int) -> dict[str, float]:
    """Means over the samples of a finished rollout: `reward`, of the scores, and `rewards/<name>/mean` of each,
    without samples that it does not judge. `samples` is their number.

    n_samples  as in `read_samples`
    """
    values: dict[str, list[float]] = {"reward": []}
    count = 0
    for sample in read_samples(run_folder, n_samples):
        count += 1
        means = {f"rewards/{name}/mean": value for name, value in sample["rewards"].items()}
        means |= {"reward": sample["score"], "rewards/reward_model/mean": sample["reward_model"]}
        for name, value in means.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {"samples": count, **{name: fmean(found) for name, found in values.items() if found}}


def read_samples(run_folder: Path, n_samples: int) -> Iterator[dict[str, Any]]:
    """The samples of a finished rollout in the order of their ids.

    n_samples  rows times num_generations. The last iteration may restart the data; those samples are left out.
    """
    samples = [
        json.loads(line)
        for path in sorted((run_folder / SAMPLES).glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").split("\n")  # texts may contain other line separators
        if line
    ]
    return (sample for sample in sorted(samples, key=lambda s: s["id"]) if sample["id"] < n_samples)
