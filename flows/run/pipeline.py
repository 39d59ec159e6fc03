"""The stages of a pipeline as subflows: each is run once, and goes on where it was interrupted."""

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from prefect.logging import get_run_logger

from flows.cluster.cluster import DaskCluster
from flows.cluster.main_guard import refuse_unguarded_script
from flows.cluster.server import prefect_server
from flows.cluster.shutdown import ending_in_time
from flows.run.run_folder import CONFIG, SUMMARY, newest_flow_run
from flows.run.runs import cluster_of, run_stage
from flows.run.stages import CheckedStages, check_stages, prepare_stage, summary_of
from flows.view.artifacts import Link, show_result
from flows.view.prefect_api import PrefectApi
from flows.view.terminal import entering, shown_metrics, tell
from rlhf_tasks.algorithms.configurations import RunConfig
from rlhf_tasks.algorithms.pipelines import PipelineConfig, folder_of, stages_of
from rlhf_tasks.system.durable import replace_file
from rlhf_tasks.system.reading import read_json

EVALUATIONS = ("evaluate",)  # types of stages whose mean reward is a pipeline's result
REACHED = 2  # metrics of a stage that are shown


class PipelineStages:
    """The stages of a pipeline. A context manager: the cluster that they share is started by the first that runs.

    configs  name -> configuration, as `stages_of` gives them
    checked  of `check_stages`: what is prepared there is not prepared again
    """

    def __init__(self, configs: Mapping[str, RunConfig], checked: CheckedStages) -> None:
        self._configs, self._checked, self._open = configs, checked, ExitStack()
        self._cluster: DaskCluster | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    async def run(self, name: str) -> dict[str, Any]:
        """The summary of a stage, which is run unless it is finished. Raises ConfigError as `prepare_stage` does."""
        config = self._configs[name]
        prepared = self._checked.prepared.get(name) or prepare_stage(config, self._checked.ranks)
        if (summary := summary_of(config)) is not None:
            tell(f"{name}: is finished; its results are taken from {Path(config.output_dir, name)}")
            return summary
        address = {"address": self._address(prepared.config)}
        place = {"cluster": prepared.config.cluster.model_copy(update=address)}
        return await run_stage(config, replace(prepared, config=prepared.config.model_copy(update=place)))

    def _address(self, config: RunConfig) -> str:
        """Of the scheduler of the cluster that all stages share."""
        if config.cluster.address is not None:
            return config.cluster.address
        if self._cluster is None:
            place = Path(config.output_dir)
            self._cluster = self._open.enter_context(entering("cluster", cluster_of(config, place)))
        return self._cluster.scheduler_address


async def carry_out_pipeline(config: PipelineConfig, checked: CheckedStages | None = None) -> dict[str, Any]:
    """Run the stages of a pipeline that are not finished; gives the summary, which its folder has too.

    checked  of `check_stages`, where the stages were checked before
    Called inside a flow. Raises ConfigError, as `stages_of` and `check_stages` do, before anything starts.
    """
    refuse_unguarded_script()
    started_s, folder, configs = time.time(), folder_of(config), stages_of(config)
    if checked is None:
        checked = await asyncio.to_thread(check_stages, configs)
    for warning in checked.warnings:
        get_run_logger().warning(warning)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        ending_in_time(asyncio.current_task()),
        prefect_server(folder),
        PipelineStages(configs, checked) as stages,
    ):
        summaries = {name: await stages.run(name) for name in configs}
        await show_pipeline(config.name, folder, list(configs))
    summary = {
        "pipeline": config.name,
        "seconds": round(time.time() - started_s, 1),
        "stages": {name: told_of(configs[name].type, found) for name, found in summaries.items()},
    }
    models = [found["model"] for found in summaries.values() if "model" in found]
    if models:
        summary["model"] = models[-1]
    replace_file(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary


async def show_pipeline(name: str, folder: Path, stages: Sequence[str], heading: str = "") -> None:
    """Show in the UI what a pipeline has come to: the scores of its evaluations, and a row for each stage.

    folder   of the stages' run folders
    heading  in place of the scores
    """
    rows, scores = list[dict[str, Any]](), list[str]()
    for stage in stages:
        kind, found = read_json(folder / stage / CONFIG)["type"], read_json(folder / stage / SUMMARY)
        reached = told_of(kind, found)
        metrics = reached.get("scores") or reached["metrics"]
        if kind in EVALUATIONS and "reward" in metrics:
            scores.append(f"{metrics['reward']:.3f} in {stage}")
        begun = newest_flow_run(folder / stage)
        rows.append(
            {
                "stage": stage if begun is None else Link(stage, f"/runs/flow-run/{begun}"),
                "type": kind,
                "iterations": reached["iterations"],
                "seconds": round(reached["seconds"], 1),
                "reached": ", ".join(f"{key} {metrics[key]:.4g}" for key in shown_metrics(metrics)[:REACHED]),
                "model": os.path.relpath(reached["model"], folder) if "model" in reached else "",
            }
        )
    told = heading or (f"Mean reward: {', '.join(scores)}" if scores else f"{name}: {len(rows)} stages")
    await PrefectApi(name).show(lambda: show_result(told, rows))


def told_of(kind: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a pipeline's summary says of a stage: type, iterations, seconds, the model, and scores or last metrics."""
    kept = ("iterations", "seconds", "model", "model_step", "scores")
    found = {"type": kind, **{key: summary[key] for key in kept if key in summary}}
    return found if "scores" in summary else {**found, "metrics": summary["metrics"]}
