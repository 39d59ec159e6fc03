"""Which commits are the best, by the scores of a run's evaluations. Pure, but for the journal that it reads."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_tasks.checkpoint.journals import METRICS, is_row


def keep_best(config: Mapping[str, Any]) -> int:
    """How many of the best commits a run keeps, from its configuration as a document."""
    return (config.get("evaluation") or {}).get("keep_best", 0)


Score = tuple[bool, float]
"""(whether rewards gave it, number), higher is better: numbers of rewards and of losses are not compared."""


def score_of(metrics: Mapping[str, float | None]) -> Score | None:
    """By which commits are compared: an iteration's eval/reward, or, without that, its eval/loss with the other sign.
    None where it has none that is finite. An iteration without eval/reward, since no reward judged its answers, is
    worse than any with it."""
    reward, loss = metrics.get("eval/reward"), metrics.get("eval/loss")
    score = reward if reward is not None or loss is None else -loss
    return (reward is not None, score) if score is not None and math.isfinite(score) else None


def scores_of(run_folder: Path) -> dict[int, Score]:
    """Step -> score of the evaluated iterations in a run's journal of metrics. A line that a kill has cut is none."""
    path = run_folder / METRICS
    if not path.exists():
        return {}
    with path.open("rb") as lines:
        rows = [json.loads(line) for line in lines if is_row(line)]
    return {row["iteration"] + 1: score for row in rows if (score := score_of(row)) is not None}


def best_steps(scores: Mapping[int, Score], count: int) -> list[int]:
    """The `count` steps of the highest scores, the best first; of equal ones the earlier comes first."""
    return sorted(scores, key=lambda step: (scores[step], -step), reverse=True)[:count]
