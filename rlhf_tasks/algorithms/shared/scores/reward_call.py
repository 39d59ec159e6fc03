"""The reward call: scores samples and writes some of them as JSONL."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from rlhf_tasks.algorithms.shared.scores.scoring import Scored, reward_metrics, score, scores_batch
from rlhf_tasks.config.base import Scores
from rlhf_tasks.parallel.batch.samples import SampleBatch
from rlhf_tasks.parallel.train.engine import Engine
from rlhf_tasks.user_code.rewards import SAMPLES, SKIPPED_SAMPLES, Fault

EXAMPLES = 8
"""Samples per iteration that are written for users to look at."""


def reward_inference(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Compute `scores`, and write a few samples of the first dp rank and part. Metrics: see `reward_metrics`."""
    shown = engine.coordinate.dp == 0 and context.part.number == 0
    return score_and_write(engine, batch, context, EXAMPLES if shown else 0)


def score_and_write(
    engine: Engine, batch: SampleBatch, context: CallContext, written: int, kind: str = ""
) -> CallOutput:
    """Compute `scores`, and write this head's first `written` samples into the run folder.

    kind  begins the name of the file that lists skipped samples, where an iteration scores twice
    Metrics: see `reward_metrics`.
    """
    scored = score(engine, batch, context)
    if scored is not None:
        of_part = f"part{context.part.number}-" if context.part.of > 1 else ""
        write_skipped(engine, scored.faults, context, kind + of_part)
    metrics = reward_metrics(engine, scored, context)
    if scored is None:
        return CallOutput(None, metrics)
    if written:
        of_part = f"-{context.part.number:04d}" if context.part.number else ""
        name = f"{context.iteration:08d}-{engine.coordinate.dp:04d}{of_part}.jsonl"
        write_samples(context.run_folder / SAMPLES / name, batch, scored, written)
    return CallOutput(scores_batch(batch, scored, engine), metrics)


def write_skipped(engine: Engine, faults: Mapping[int, Fault], context: CallContext, kind: str = "") -> None:
    """Write one line for each sample of this head that a reward failed on: iteration, sample, row, reward, reason.

    faults  sample id -> its fault
    kind    begins the file's name
    Each iteration and head has a file of its own, renamed into place. One that is computed again, as after a kill or
    under another plan, replaces what it left: no sample is listed twice.
    """
    config = context.config
    if not isinstance(config, Scores) or config.on_reward_error != "skip":
        return
    folder, iteration = context.run_folder / SKIPPED_SAMPLES, f"{kind}{context.iteration:08d}"
    own = engine.coordinate.dp
    for path in folder.glob(f"{iteration}-*.jsonl"):
        dp = int(path.stem.rpartition("-")[2])
        if dp == own or (own == 0 and dp >= engine.placement.strategy.dp):
            path.unlink()
    if not faults:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{iteration}-{own:04d}.jsonl"
    with open(path.with_suffix(".tmp"), "w", encoding="utf-8", errors="backslashreplace") as file:
        for sample, fault in sorted(faults.items()):
            line = {"iteration": context.iteration, "sample": sample, "row": context.where(sample)}
            file.write(json.dumps(line | fault._asdict(), ensure_ascii=False) + "\n")
    os.replace(path.with_suffix(".tmp"), path)


def write_samples(path: Path, batch: SampleBatch, scored: Scored, count: int) -> None:
    """Write one line for each of the first `count` samples: id, prompt, completion, score (null where the sample has
    left the batch), rewards, reward_model, logged (values that rewards logged for the sample or its batch),
    truncated, columns.

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
                "score": float(scored.scores[place]) if scored.stays[place] else None,
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
