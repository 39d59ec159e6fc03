"""The demo's stages from random weights to PPO's configuration, and the measurement of a model.

The stages are a pipeline (deployments/demo/pipeline.yaml), with two steps between them that are no runs and that only
the demo has: preference pairs are made from scored samples, and the reward model's scores are normalised for PPO.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import yaml

from flows.cluster.cluster import local_cluster
from flows.cluster.forks import begin_to_load
from flows.cluster.main_guard import refuse_unguarded_script
from flows.cluster.server import prefect_server
from flows.cluster.shutdown import ending_in_time
from flows.demo.data import (
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
from flows.run.runs import run_stage
from flows.run.stages import prepare_stage, summary_of
from flows.view.terminal import entering
from rlhf_tasks.algorithms.configurations import ConfigError, RunConfig, make_config, resolve_paths
from rlhf_tasks.algorithms.pipelines import load_pipeline, stages_of
from rlhf_tasks.algorithms.rollout.config import RolloutConfig
from rlhf_tasks.config.cluster import RuntimeConfig
from rlhf_tasks.system.reading import reading
from rlhf_tasks.user_code.rewards import read_samples

RANKS = 4
BEFORE_PPO = ("sft", "pairs", "reward-model", "calibration")
STARTUP_S = RuntimeConfig().startup_s


@dataclass(frozen=True, slots=True)
class Demo:
    """One demo: its folder (absolute), its seed, and the scheduler address of the cluster that all stages share."""

    folder: Path
    seed: int
    scheduler: str

    def config(self, stage: str, name: str, **changes: Any) -> RunConfig:
        """A stage's configuration from `deployments/demo/STAGE.yaml`, for a run called `name`."""
        document = yaml.safe_load(
            (files("deployments") / "demo" / f"{stage}.yaml").read_text(encoding="utf-8")
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
        with as_file(files("deployments") / "demo") as folder:
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
    plan = str(files("deployments") / "demo_plan.yaml")
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
