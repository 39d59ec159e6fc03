"""The reward call: scores samples and writes some of them as JSONL."""

import json
import os
from pathlib import Path
from typing import Any

from rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from rlhf_tasks.algorithms.shared.scoring import Scored, reward_metrics, score, scores_batch
from rlhf_tasks.parallel.batch.samples import SampleBatch
from rlhf_tasks.parallel.train.engine import Engine
from rlhf_tasks.rewards.samples_folder import SAMPLES

EXAMPLES = 8
"""Samples per iteration that are written for users to look at."""


def reward_inference(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Compute `scores`, and write a few samples of the first dp rank and part. Metrics: see `reward_metrics`."""
    shown = engine.coordinate.dp == 0 and context.part.number == 0
    return score_and_write(engine, batch, context, EXAMPLES if shown else 0)


def score_and_write(engine: Engine, batch: SampleBatch, context: CallContext, written: int) -> CallOutput:
    """Compute `scores`, and write this head's first `written` samples into the run folder.

    Metrics: see `reward_metrics`.
    """
    scored = score(engine, batch, context)
    metrics = reward_metrics(engine, scored, context)
    if scored is None:
        return CallOutput(None, metrics)
    if written:
        of_part = f"-{context.part.number:04d}" if context.part.number else ""
        name = f"{context.iteration:08d}-{engine.coordinate.dp:04d}{of_part}.jsonl"
        write_samples(context.run_folder / SAMPLES / name, batch, scored, written)
    return CallOutput(scores_batch(batch, scored, engine), metrics)


def write_samples(path: Path, batch: SampleBatch, scored: Scored, count: int) -> None:
    """Write one line for each of the first `count` samples: id, prompt, completion, score, rewards, reward_model,
    logged (values that rewards logged for the sample or its batch), truncated, columns.

    The file is renamed into place, so that a repeated call leaves the same file as one call. Half of a surrogate
    pair, which UTF-8 cannot encode, is written as a JSON escape.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    answers = scored.answers
    with open(path.with_suffix(".tmp"), "w", encoding="utf-8", errors="backslashreplace") as file:
        for place, sample in enumerate(batch.ids[:count]):
            line = {
                "id": sample,
                "prompt": answers.prompts[place],
                "completion": answers.completions[place],
                "score": float(scored.scores[place]),
                "rewards": {name: values[place] for name, values in scored.rewards.items()},
                "reward_model": None if scored.reward_model is None else float(scored.reward_model[place]),
                "logged": _logged(scored, place),
                "truncated": bool(batch["truncated"].values[place]),
                "columns": {name: values[place] for name, values in answers.columns.items()},
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(path.with_suffix(".tmp"), path)


def _logged(scored: Scored, place: int) -> dict[str, Any]:
    """The values that rewards have logged for a sample, or for the batch in which it was judged."""
    n = len(scored.answers)
    return {
        f"{reward}/{name}": value[place] if isinstance(value, list) and len(value) == n else value
        for reward, told in scored.logged.items()
        for name, value in told.items()
    }
