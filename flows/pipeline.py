"""Flow `rlhf-pipeline`: the stages of a configuration one after another; without one, the demo.

A stage is a subflow. It runs once, and continues where it was interrupted. The demo's stages are a pipeline
(deployments/demo/pipeline.yaml), with two steps between them that are not runs and exist only in the demo: one makes
preference pairs from scored samples, the other normalises the reward model's scores for PPO.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Self

import yaml
from prefect import Flow, flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from prefect_rlhf.flows.cluster.cluster import DaskCluster, local_cluster
from prefect_rlhf.flows.cluster.forks import begin_to_load, refuse_unguarded_script
from prefect_rlhf.flows.cluster.server import prefect_server
from prefect_rlhf.flows.cluster.shutdown import ending_in_time
from prefect_rlhf.flows.demo import (
    CALIBRATION,
    DATA,
    PAIRS,
    SIZES,
    accuracy,
    data_is_there,
    preference_pairs,
    refuse_without_task,
    score_statistics,
    write_demo_data,
    write_jsonl,
)
from prefect_rlhf.flows.run.orders import cancelled_by_signals
from prefect_rlhf.flows.run.reporting import keep_stages, leave_report
from prefect_rlhf.flows.run.run_folder import CONFIG, SUMMARY, newest_flow_run
from prefect_rlhf.flows.run.run_identity import CheckedStages, check_stages, prepare_stage, summary_of
from prefect_rlhf.flows.run.runs import run_stage
from prefect_rlhf.flows.run.training import cluster_of
from prefect_rlhf.flows.view.artifacts import Link, show_result
from prefect_rlhf.flows.view.prefect_api import PrefectApi
from prefect_rlhf.flows.view.terminal import entering, shown_metrics, tell
from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    ConfigError,
    PipelineConfig,
    RunConfig,
    folder_of,
    load_pipeline,
    make_config,
    resolve_paths,
    stages_of,
)
from prefect_rlhf.rlhf_tasks.algorithms.rollout import RolloutConfig
from prefect_rlhf.rlhf_tasks.config.cluster import STARTUP_S
from prefect_rlhf.rlhf_tasks.system.durable import replace_file
from prefect_rlhf.rlhf_tasks.system.reading import read_json, reading
from prefect_rlhf.rlhf_tasks.user_code.rewards import read_samples

EVALUATIONS = ("evaluate",)  # types of stages whose mean reward is a pipeline's result
REACHED = 2  # metrics of a stage that are shown
RANKS = 4
BEFORE_PPO = ("sft", "pairs", "reward-model", "calibration")
DEMO_STAGES = (*BEFORE_PPO, "accuracy-before", "ppo", "accuracy-after")


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
    """Run a pipeline, whose stages the caller has checked, in a flow run of its own. Returns the summary."""

    async def run(config: PipelineConfig) -> dict[str, Any]:
        async with cancelled_by_signals(lambda: "between two stages"):
            return await carry_out_pipeline(config, checked)

    return await Flow(run, rlhf_pipeline.name, flow_run_name=_run_name, persist_result=False)(config)


async def carry_out_pipeline(config: PipelineConfig, checked: CheckedStages | None = None) -> dict[str, Any]:
    """Run the unfinished stages of a pipeline. Returns the summary, which is also in the pipeline's folder.

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
        "stages": {name: stage_figures(configs[name].type, found) for name, found in summaries.items()},
    }
    models = [found["model"] for found in summaries.values() if "model" in found]
    if models:
        summary["model"] = models[-1]
    replace_file(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
    leave_report(folder)
    return summary


class PipelineStages:
    """The stages of a pipeline. A context manager: the first stage that runs starts the cluster that all share.

    configs  name -> configuration, as `stages_of` gives them
    checked  of `check_stages`: what is prepared there is not prepared again
    """

    def __init__(self, configs: Mapping[str, RunConfig], checked: CheckedStages) -> None:
        self._configs, self._checked, self._open = configs, checked, ExitStack()
        self._cluster: DaskCluster | None = None

    def __enter__(self) -> Self:
        (place,) = {config.output_dir for config in self._configs.values()}
        keep_stages(Path(place), self._configs)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    async def run(self, name: str) -> dict[str, Any]:
        """Run a stage unless it is finished. Returns its summary. Raises ConfigError as `prepare_stage` does."""
        config = self._configs[name]
        prepared = self._checked.prepared.get(name) or prepare_stage(config, self._checked.ranks)
        if (summary := summary_of(config)) is not None:
            tell(f"{name} is finished; its results are in {Path(config.output_dir, name)}")
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


async def show_pipeline(name: str, folder: Path, stages: Sequence[str], heading: str = "") -> None:
    """Show a pipeline's results in the UI: the scores of its evaluations, and a row for each stage.

    folder   of the stages' run folders
    heading  in place of the scores
    """
    rows, scores = list[dict[str, Any]](), list[str]()
    for stage in stages:
        kind, found = read_json(folder / stage / CONFIG)["type"], read_json(folder / stage / SUMMARY)
        reached = stage_figures(kind, found)
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


def stage_figures(kind: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a stage in a pipeline's summary: type, iterations, seconds, the model, and scores or last
    metrics."""
    keys = ("iterations", "seconds", "model", "model_step", "scores")
    figures = {"type": kind, **{key: summary[key] for key in keys if key in summary}}
    return figures if "scores" in summary else {**figures, "metrics": summary["metrics"]}


# --- the demo ---


async def _demo(folder: str, seed: int) -> dict[str, Any]:
    place, started_s = Path(folder).resolve(), time.time()
    finished = place / SUMMARY
    if finished.exists():
        settle_seed(place, seed)
        return read_json(finished, remedy="Remove it: the demo's last stage writes it again.")
    with demo_at(place, seed) as demo:
        keep_stages(place / "stages", DEMO_STAGES)
        policy = await make_models(demo)
        before = await measure(demo, policy.roles()["actor"].folder, "before")
        trained = await demo.run(policy)
        after = await measure(demo, trained["model"], "after")
        heading = f"Exact-match accuracy on held-out words: {before:.3f} before PPO, {after:.3f} after"
        await show_pipeline(place.name, place / "stages", DEMO_STAGES, heading)
    summary = {
        **trained,
        "ppo_seconds": trained["seconds"],
        "seconds": round(time.time() - started_s, 1),
        "accuracy_before": before,
        "accuracy_after": after,
    }
    replace_file(finished, json.dumps(summary, indent=2) + "\n")
    return summary


@dataclass(frozen=True, slots=True)
class Demo:
    """One demo: its folder (absolute), its seed, and the scheduler address of the cluster that all stages share."""

    folder: Path
    seed: int
    scheduler: str

    def config(self, stage: str, name: str, **changes: Any) -> RunConfig:
        """A stage's configuration from `deployments/demo/STAGE.yaml`, for a run called `name`."""
        document = yaml.safe_load(
            (files("prefect_rlhf.deployments") / "demo" / f"{stage}.yaml").read_text(encoding="utf-8")
        )
        document |= {"name": name, "seed": self.seed, "output_dir": "stages", **changes}
        document["cluster"] = {**document["cluster"], "address": self.scheduler}
        return resolve_paths(make_config(document), self.folder)

    async def run(self, config: RunConfig) -> dict[str, Any]:
        """The summary of a stage: run it, resume it, or read its summary if it is finished.

        Raises ConfigError when a stage that was begun has changed since.
        """
        summary, prepared = summary_of(config), prepare_stage(config)
        return summary or await run_stage(config, prepared)

    def stages(self) -> dict[str, RunConfig]:
        """The configurations of all stages, by name, from `deployments/demo/pipeline.yaml`."""
        with as_file(files("prefect_rlhf.deployments") / "demo") as folder:
            pipeline = load_pipeline(folder / "pipeline.yaml")
        cluster = pipeline.cluster.model_copy(update={"address": self.scheduler})
        place = {"seed": self.seed, "output_dir": str(self.folder), "cluster": cluster}
        return stages_of(pipeline.model_copy(update=place), self.folder)


@contextmanager
def demo_at(folder: Path, seed: int | None) -> Iterator[Demo]:
    """For a flow: the demo in a folder, with a Prefect server and a cluster of `RANKS` for all its stages.

    seed  None: that of an existing demo in the folder, else 0
    Raises ConfigError when an existing demo in the folder has another seed, since its results would be reused, and
    when its data cannot be made here.
    """
    refuse_unguarded_script()
    place = folder.resolve()
    refuse_without_task(place / DATA)
    place.mkdir(parents=True, exist_ok=True)
    seed = settle_seed(place, seed)
    begin_to_load(RANKS)
    with (
        ending_in_time(asyncio.current_task()),
        prefect_server(place),
        entering("cluster", local_cluster(RANKS, folder=place / "scratch", deadline_s=STARTUP_S)) as cluster,
    ):
        yield Demo(place, seed, cluster.scheduler_address)


def settle_seed(place: Path, seed: int | None) -> int:
    """The seed of the demo in a folder; a new demo records it there. Raises ConfigError for another seed."""
    record = place / "seed"
    with reading(record, "not the seed of a demo", remedy="Remove it, and name the demo's seed."):
        begun = int(record.read_text(encoding="utf-8")) if record.exists() else None
    if begun is not None and seed not in (None, begun):
        raise ConfigError(f"{place} holds the demo of seed {begun}. For seed {seed} name another folder.")
    settled = seed if begun is None else begun
    record.write_text(str(settled or 0))
    return settled or 0


async def make_models(demo: Demo) -> RunConfig:
    """Run the stages before PPO that are not finished yet. Returns PPO's configuration."""
    if not data_is_there(demo.folder / DATA):
        await asyncio.to_thread(write_demo_data, demo.folder / DATA, demo.seed)
    stages = demo.stages()
    for name in BEFORE_PPO:
        await demo.run(stages[name])
        if name == "pairs":
            await asyncio.to_thread(_write_pairs, demo, stages[name])
    mean, std = score_statistics(_samples(demo, "calibration", CALIBRATION))
    policy = stages["ppo"].model_dump()
    plan = str(files("prefect_rlhf.deployments") / "demo_plan.yaml")
    scoring = {**policy["reward_model"], "mean": mean, "std": std}
    return make_config({**policy, "plan": plan, "reward_model": scoring})


async def measure(demo: Demo, model: str, when: str) -> float:
    """Exact-match accuracy, from 0 to 1, of a model's greedy answers on held-out words."""
    name = f"accuracy-{when}"
    await demo.run(demo.config("evaluation", name, models={"actor": model}))
    return accuracy(_samples(demo, name, SIZES["test"]))


def _samples(demo: Demo, stage: str, count: int) -> list[dict[str, Any]]:
    samples = list(read_samples(demo.folder / "stages" / stage, count))
    assert len(samples) == count, f"stage {stage} wrote {len(samples)} samples, not {count}"
    return samples


def _write_pairs(demo: Demo, config: RunConfig) -> None:
    assert isinstance(config, RolloutConfig)
    samples = _samples(demo, "pairs", SIZES["preferences"] * config.num_generations)
    pairs = preference_pairs(samples, PAIRS, demo.seed)
    if len(pairs) < PAIRS // 2:
        raise ConfigError(
            f"the SFT model's samples gave {len(pairs)} pairs of a right and a wrong answer, too few for a reward "
            f"model. Choose another seed than {demo.seed}."
        )
    write_jsonl(demo.folder / DATA / "pairs.jsonl", pairs)
