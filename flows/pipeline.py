"""Flow `rlhf-pipeline`: the demo from random weights to a better policy, stage by stage."""

import json
import time
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.demo.stages import demo_at, make_models, measure, settle_seed
from flows.ppo import rlhf_ppo
from rlhf_tasks.system.durable import replace_file
from rlhf_tasks.system.reading import read_json


def _run_name() -> str:
    return f"pipeline/{Path(flow_run.parameters['folder']).name}"


@flow(name="rlhf-pipeline", flow_run_name=_run_name, persist_result=False)
async def rlhf_pipeline(folder: str = "runs/demo", seed: int = 0) -> dict[str, Any]:
    """Supervised fine-tuning on sloppy demonstrations, a reward model, then PPO. Measures accuracy before and after
    PPO. Returns the summary, which is also written to FOLDER/summary.json.

    Args:
        folder: Folder of all results. An interrupted pipeline in it is resumed; a finished one is not run again.
        seed: Seed of data, weights and sampling.
    """
    place, started_s = Path(folder).resolve(), time.time()
    finished = place / "summary.json"
    if finished.exists():
        settle_seed(place, seed)
        return read_json(finished, remedy="Remove it: the demo's last stage writes it again.")
    with demo_at(place, seed) as demo:
        policy = await make_models(demo)
        before = await measure(demo, policy.roles()["actor"].folder, "before")
        trained = await demo.run(rlhf_ppo, policy)
        after = await measure(demo, trained["model"], "after")
    summary = {
        **trained,
        "ppo_seconds": trained["seconds"],
        "seconds": round(time.time() - started_s, 1),
        "accuracy_before": before,
        "accuracy_after": after,
    }
    replace_file(finished, json.dumps(summary, indent=2) + "\n")
    return summary
