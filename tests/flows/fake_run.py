"""A whole run as a process: python fake_run.py FOLDER ITERATIONS [FAULT]; prints READY at each commit."""

import asyncio
import sys
from pathlib import Path

from prefect import flow

from prefect_rlhf.flows.cluster.cluster import local_cluster
from prefect_rlhf.flows.cluster.server import prefect_server
from prefect_rlhf.flows.cluster.shutdown import ending_in_time
from prefect_rlhf.flows.run.training import run_training
from prefect_rlhf.rlhf_tasks.protocol.messages import Committed, RunSpec
from tests.rlhf_tasks.plans import small_plan
from tests.rlhf_tasks.settings import STARTUP_S, limits


def main(folder: Path, iterations: int, fault: str) -> None:
    config = {"sleep_s": 0.3}
    if fault:
        config["fault"] = {"kind": fault, "node": "generate", "iteration": 1, "rank": 0, "always": True}

    def on_event(event):
        if isinstance(event, Committed):
            print("READY", flush=True)

    with (
        ending_in_time() as watch,
        prefect_server(folder),
        local_cluster(2, folder=folder / "dask", deadline_s=STARTUP_S) as cluster,
    ):

        @flow(name="rlhf-fake", persist_result=False)
        async def parent():
            watch.run, watch.to_exit = asyncio.current_task(), True
            spec = RunSpec(
                run="fake",
                plan=small_plan(),
                config=config,
                run_folder=str(folder),
                iterations=iterations,
                limits=limits(max_restarts=1),
                executor="tests.rlhf_tasks.fake_rank:make_executor",
                snapshots="tests.rlhf_tasks.fake_rank:make_snapshots",
            )
            return await run_training(spec, cluster, on_event=on_event)

        asyncio.run(parent())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
