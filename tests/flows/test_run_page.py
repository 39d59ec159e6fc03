"""The page of a run whose iterations overlap: what its graph draws beside what the ranks' clocks say."""

import asyncio
import json
from datetime import datetime

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

from tests.flows.marked_command import MarkedCommand
from tests.flows.run.test_training import read_runs
from tests.tiny_runs import TWO_RANKS, ppo_config

ITERATIONS = 8
SLOW = """
import time

def slow(completions, **columns):
    time.sleep(1.0)
    return [len(completion) / 16 for completion in completions]
"""


@pytest.mark.whole
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_the_bars_of_overlapping_ppo_iterations_have_the_ranks_lengths(prefect, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(SLOW)
    config = ppo_config(
        tmp_path,
        name="drawn",
        total_iterations=ITERATIONS,
        snapshot_every="auto",
        rewards=[{"function": f"{tmp_path / 'rewards.py'}:slow"}],
        plan=TWO_RANKS,
        cluster={"devices_per_host": 2},
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    command = ("run", "ppo", "--config", "run.yaml")
    with MarkedCommand(tmp_path / "said.log", *command, environment=prefect.environment) as begun:
        assert begun.process.wait(400) == 0, begun.output

    async def drawn():
        named = FlowRunFilter(name=FlowRunFilterName(any_=["ppo/drawn"]))
        async with get_client() as client:
            (run,) = await client.read_flow_runs(flow_run_filter=named)
            graph = (await client.request("GET", f"/flow_runs/{run.id}/graph-v2")).json()
        bars = {node["id"]: node for _, node in graph["nodes"] if node["kind"] == "flow-run"}
        return bars, {name: run for name, (run, _) in (await read_runs(run.id)).items()}

    bars, runs = asyncio.run(drawn())
    lines = (tmp_path / "runs" / "drawn" / "lineage.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert sorted(runs) == [f"it-{t + 1:05d}" for t in range(ITERATIONS)]
    for t in range(ITERATIONS):
        clocks = [row for row in rows if row["iteration"] == t]
        true_s = max(row["ended_s"] for row in clocks) - min(row["started_s"] for row in clocks)
        run = runs[f"it-{t + 1:05d}"]
        bar = bars[str(run.id)]
        start, end = (datetime.fromisoformat(bar[when]) for when in ("start_time", "end_time"))
        assert (end - start).total_seconds() == pytest.approx(true_s, abs=true_s / 2)
        assert run.total_run_time.total_seconds() == pytest.approx(true_s, abs=true_s / 2)
