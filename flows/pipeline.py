"""Flow `rlhf-pipeline`: the stages of a configuration one after another; without one, the demo."""

import json
import time
from pathlib import Path
from typing import Any

from prefect import Flow, flow
from prefect.runtime import flow_run

from flows.demo.stages import BEFORE_PPO, demo_at, make_models, measure, settle_seed
from flows.run.interrupted import cancelled_by_signals
from flows.run.pipeline import carry_out_pipeline, show_pipeline
from flows.run.stages import CheckedStages
from rlhf_tasks.algorithms.pipelines import PipelineConfig
from rlhf_tasks.system.durable import replace_file
from rlhf_tasks.system.reading import read_json


def _run_name() -> str:
    config = flow_run.parameters.get("config")
    return f"pipeline/{Path(flow_run.parameters['folder']).name if config is None else config.name}"


@flow(name="rlhf-pipeline", flow_run_name=_run_name, persist_result=False)
async def rlhf_pipeline(
    folder: str = "runs/demo", seed: int = 0, config: PipelineConfig | None = None
) -> dict[str, Any]:
    """The stages of a pipeline, each a subflow. Stages that are finished are skipped, one that was interrupted is
    resumed. Returns the summary, which is also written to summary.json in the pipeline's folder.

    Without a configuration the demo runs: supervised fine-tuning on sloppy demonstrations, a reward model, then PPO,
    with the accuracy before and after PPO.

    Args:
        folder: Folder of the demo's results.
        seed: Seed of the demo's data, weights and sampling.
        config: The pipeline's configuration, as in a YAML file.
    """
    async with cancelled_by_signals(lambda: "between two stages"):
        return await (_demo(folder, seed) if config is None else carry_out_pipeline(config))


async def pipeline_as_flow(config: PipelineConfig, checked: CheckedStages) -> dict[str, Any]:
    """A flow run of a pipeline whose stages the caller has checked; gives the summary."""

    async def run(config: PipelineConfig) -> dict[str, Any]:
        async with cancelled_by_signals(lambda: "between two stages"):
            return await carry_out_pipeline(config, checked)

    return await Flow(run, rlhf_pipeline.name, flow_run_name=_run_name, persist_result=False)(config)


async def _demo(folder: str, seed: int) -> dict[str, Any]:
    place, started_s = Path(folder).resolve(), time.time()
    finished = place / "summary.json"
    if finished.exists():
        settle_seed(place, seed)
        return read_json(finished, remedy="Remove it: the demo's last stage writes it again.")
    with demo_at(place, seed) as demo:
        policy = await make_models(demo)
        before = await measure(demo, policy.roles()["actor"].folder, "before")
        trained = await demo.run(policy)
        after = await measure(demo, trained["model"], "after")
        stages = [*BEFORE_PPO, "accuracy-before", "ppo", "accuracy-after"]
        heading = f"Exact-match accuracy on held-out words: {before:.3f} before PPO, {after:.3f} after"
        await show_pipeline(place.name, place / "stages", stages, heading)
    summary = {
        **trained,
        "ppo_seconds": trained["seconds"],
        "seconds": round(time.time() - started_s, 1),
        "accuracy_before": before,
        "accuracy_after": after,
    }
    replace_file(finished, json.dumps(summary, indent=2) + "\n")
    return summary
