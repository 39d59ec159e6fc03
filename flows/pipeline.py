"""Flow `rlhf-pipeline`: the demo from random weights to a better policy, stage by stage."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from prefect import Flow, flow
from prefect.runtime import flow_run

from flows.cluster import local_cluster
from flows.demo_data import SIZES, preference_pairs, write_demo_data, write_jsonl
from flows.ppo import rlhf_ppo
from flows.reward_model import reward_model
from flows.rollout import rollout
from flows.server import prefect_server
from flows.sft import sft
from rlhf_tasks.algorithms.rollout import read_samples
from rlhf_tasks.config import AnyConfig, ConfigError, make_config, resolve_paths

N_PAIRS = 400
N_CALIBRATION = 512
RANKS = 4


@dataclass(frozen=True, slots=True)
class Demo:
    """One demo: its folder (absolute), its seed, and the cluster that all stages share."""

    folder: Path
    seed: int
    scheduler: str

    def config(self, stage: str, name: str, **changes: Any) -> AnyConfig:
        """A stage's configuration from `deployments/demo/STAGE.yaml`, for a run called `name`."""
        document = yaml.safe_load(
            (files("deployments") / "demo" / f"{stage}.yaml").read_text(encoding="utf-8")
        )
        document |= {"name": name, "seed": self.seed, "output_dir": "stages", **changes}
        document["cluster"] = {**document["cluster"], "address": self.scheduler}
        return resolve_paths(make_config(document), self.folder)

    async def run(self, stage_flow: Flow[..., Any], config: AnyConfig) -> dict[str, Any]:
        """Run a stage, go on with it, or take the summary that it left; so a pipeline may be run again."""
        assert config.name is not None
        folder = self.folder / "stages" / config.name
        summary = folder / "summary.json"
        if summary.exists():
            return json.loads(summary.read_text())
        begun = str(folder) if (folder / "config.json").exists() else None
        return await stage_flow(config, begun)


def _run_name() -> str:
    return f"pipeline/{Path(flow_run.parameters['folder']).name}"


@flow(name="rlhf-pipeline", flow_run_name=_run_name, persist_result=False)
async def rlhf_pipeline(folder: str = "runs/demo", seed: int = 0) -> dict[str, Any]:
    """Supervised fine-tuning on sloppy demonstrations, a reward model, then PPO; accuracy before and after.

    folder  where everything goes; a pipeline that was interrupted there goes on
    seed    of data, weights and sampling
    Returns the summary that is also written to FOLDER/summary.json.
    """
    started_s = time.time()
    place = Path(folder).resolve()
    place.mkdir(parents=True, exist_ok=True)
    with (
        prefect_server(place) as server,
        local_cluster(RANKS, server.environment, folder=place / "scratch") as cluster,
    ):
        demo = Demo(place, seed, cluster.scheduler_address)
        policy = await make_models(demo)
        before = await accuracy(demo, policy.models.actor, "before")
        trained = await demo.run(rlhf_ppo, policy)
        after = await accuracy(demo, trained["model"], "after")
    summary = {
        **trained,
        "ppo_seconds": trained["seconds"],
        "seconds": round(time.time() - started_s, 1),
        "accuracy_before": before,
        "accuracy_after": after,
    }
    (place / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


async def make_models(demo: Demo) -> Any:
    """All that comes before PPO; gives PPO's configuration."""
    if not (demo.folder / "data" / "base" / "config.json").exists():
        await asyncio.to_thread(write_demo_data, demo.folder / "data", demo.seed)
    supervised = await demo.run(sft, demo.config("sft", "sft"))
    actor = {"actor": supervised["model"]}
    pairs = demo.config("pairs", "pairs", models=actor)
    await demo.run(rollout, pairs)
    await asyncio.to_thread(_write_pairs, demo, pairs)
    scorer = await demo.run(reward_model, demo.config("reward_model", "reward-model", models=actor))
    both = {**actor, "reward": scorer["model"]}
    _take(demo, "prompts", "calibration", N_CALIBRATION)
    await demo.run(rollout, demo.config("calibration", "calibration", models=both))
    weight = demo.config("ppo", "ppo", models=both).model_dump()["reward_model"]
    statistics = _statistics(_samples(demo, "calibration", N_CALIBRATION))
    plan = str(files("deployments") / "demo_plan.yaml")
    return demo.config("ppo", "ppo", models=both, plan=plan, reward_model={**weight, **statistics})


async def accuracy(demo: Demo, model: str, when: str) -> float:
    """Exact-match accuracy of a model's greedy answers on held-out words."""
    name = f"accuracy-{when}"
    await demo.run(rollout, demo.config("evaluation", name, models={"actor": model}))
    samples = _samples(demo, name, SIZES["test"])
    return sum(sample["rewards"]["exact"] for sample in samples) / len(samples)


def _samples(demo: Demo, stage: str, count: int) -> list[dict[str, Any]]:
    samples = list(read_samples(demo.folder / "stages" / stage, count))
    assert len(samples) == count, f"stage {stage} wrote {len(samples)} samples, not {count}"
    return samples


def _write_pairs(demo: Demo, config: AnyConfig) -> None:
    assert config.type == "rollout"
    samples = _samples(demo, "pairs", SIZES["preferences"] * config.num_generations)
    pairs = preference_pairs(samples, N_PAIRS, demo.seed)
    if len(pairs) < N_PAIRS // 2:
        raise ConfigError(
            f"the SFT model's samples gave {len(pairs)} pairs of a right and a wrong answer, too few for a reward "
            f"model. Choose another seed than {demo.seed}."
        )
    write_jsonl(demo.folder / "data" / "pairs.jsonl", pairs)


def _take(demo: Demo, source: str, target: str, count: int) -> None:
    """The first rows of a data set as another one."""
    lines = (demo.folder / "data" / f"{source}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    write_jsonl(demo.folder / "data" / f"{target}.jsonl", (json.loads(line) for line in lines))


def _statistics(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean and standard deviation of the reward model's raw scores."""
    scores = [sample["reward_model"] for sample in samples]
    mean = sum(scores) / len(scores)
    return {"mean": mean, "std": (sum((s - mean) ** 2 for s in scores) / (len(scores) - 1)) ** 0.5}
