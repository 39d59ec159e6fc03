"""Run folders as runs leave them, written without a run. Import as `tests.flows.run_folders`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect_rlhf.flows.run.run_folder import SUMMARY, new_run_folder
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.checkpoint.changes import PLAN
from prefect_rlhf.rlhf_tasks.checkpoint.journals import METRICS
from tests.rlhf_tasks.plans import small_plan


def write_run(document: dict[str, Any], rewards: Sequence[float], finished: bool = True) -> Path:
    """The folder of a run that has committed an iteration for each reward, of 2 s each."""
    folder = new_run_folder(make_config(document))
    rows = [{"iteration": i, "reward": reward, "time/iteration": 2.0} for i, reward in enumerate(rewards)]
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / PLAN).write_text(small_plan().model_dump_json())
    if finished:
        calls = {"generate": {"median_s": 1.5}}
        summary = {"iterations": len(rows), "seconds": 5.0, "calls": calls, "metrics": rows[-1]}
        (folder / SUMMARY).write_text(json.dumps(summary))
    return folder
