"""The stages of a pipeline as subflows: each is run once, and goes on where it was interrupted."""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from prefect import Flow
from prefect.logging import get_run_logger

from flows.cluster.cluster import DaskCluster
from flows.cluster.server import prefect_server
from flows.cluster.shutdown import ending_in_time
from flows.run.algorithm_flow import flow_of
from flows.run.run_folder import CONFIG, SUMMARY
from flows.run.runs import cluster_of
from flows.run.stages import check_stages, result_of
from flows.view.terminal import entering, tell
from rlhf_tasks.algorithms.configurations import RunConfig
from rlhf_tasks.algorithms.pipelines import PipelineConfig, folder_of, stages_of
from rlhf_tasks.system.durable import replace_file


class Stages:
    """The stages of a pipeline. A context manager: the cluster that they share is started by the first that runs.

    configs  name -> configuration, as `stages_of` gives them
    """

    def __init__(self, configs: Mapping[str, RunConfig]) -> None:
        self._configs, self._open = configs, ExitStack()
        self._cluster: DaskCluster | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    async def run(self, name: str) -> dict[str, Any]:
        """The summary of a stage, which is run unless it is finished. Raises ConfigError as `run_stage` does."""
        config = self._configs[name]
        if found := await asyncio.to_thread(result_of, config):
            tell(f"{name}: is finished; its results are taken from {Path(config.output_dir, name)}")
            return found
        place = config.cluster.model_copy(update={"address": self._address(config)})
        return await _go_on(config.model_copy(update={"cluster": place}))

    def _address(self, config: RunConfig) -> str:
        """Of the scheduler of the cluster that all stages share."""
        if config.cluster.address is not None:
            return config.cluster.address
        if self._cluster is None:
            place = Path(config.output_dir)
            self._cluster = self._open.enter_context(entering("cluster", cluster_of(config, place)))
        return self._cluster.scheduler_address


async def run_stage(config: RunConfig, run_flow: Flow[..., Any] | None = None) -> dict[str, Any]:
    """The summary of a stage: run it, go on from its last commit, or, if it is finished, read its summary.

    config    its name is that of its run folder
    run_flow  default: the algorithm's flow
    Raises ConfigError when a stage that was begun has changed since.
    """
    return await asyncio.to_thread(result_of, config) or await _go_on(config, run_flow)


async def _go_on(config: RunConfig, run_flow: Flow[..., Any] | None = None) -> dict[str, Any]:
    """Run a stage that is not finished: from its last commit, where it has a run folder."""
    folder = Path(config.output_dir, str(config.name))
    begun = str(folder) if (folder / CONFIG).exists() else None
    return await (run_flow or flow_of(config.type))(config, begun)


async def carry_out_pipeline(config: PipelineConfig) -> dict[str, Any]:
    """Run the stages of a pipeline that are not finished; gives the summary, which its folder has too.

    Called inside a flow. Raises ConfigError, as `stages_of` and `check_stages` do, before anything starts.
    """
    started_s, folder, configs = time.time(), folder_of(config), stages_of(config)
    for warning in await asyncio.to_thread(check_stages, configs):
        get_run_logger().warning(warning)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        ending_in_time(asyncio.current_task()),
        prefect_server(folder),
        Stages(configs) as stages,
    ):
        summaries = {name: await stages.run(name) for name in configs}
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


def told_of(kind: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a pipeline's summary says of a stage: type, iterations, seconds, the model, and scores or last metrics."""
    kept = ("iterations", "seconds", "model", "model_step", "scores")
    found = {"type": kind, **{key: summary[key] for key in kept if key in summary}}
    return found if "scores" in summary else {**found, "metrics": summary["metrics"]}
