"""A series run by Prefect's own schedule: a real server and worker, a person who answers in a browser."""

import asyncio
import json
import os
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun

from prefect_rlhf.flows.recurring.champions import changes_of, decision_of
from tests.deployments.deployed import PREFECT_FILE, Deployed, DeployedRun, deployed, wait_for
from tests.flows.recurring.form import answered, flow_run_page
from tests.tiny_series import series_document, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1500)]
EVERY_S = 40


def scheduled(folder: Path, document: dict) -> Path:
    """A file for `prefect deploy` with the deployment of a series, on an interval."""
    project = yaml.safe_load(PREFECT_FILE.read_text())
    (series,) = (each for each in project["deployments"] if each["name"] == "run-series")
    series |= {"name": "weekly", "parameters": {"config": document}, "schedules": [{"interval": EVERY_S}]}
    file = folder / "weekly.yaml"
    file.write_text(yaml.safe_dump({"name": project["name"], "deployments": [series]}))
    return file


def flow_runs() -> list[FlowRun]:
    """Of the schedule, the oldest first, without those to come."""

    async def read() -> list[FlowRun]:
        async with get_client() as client:
            deployment = await client.read_deployment_by_name("rlhf-series/weekly")
            of_it = DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id]))
            runs = await client.read_flow_runs(deployment_filter=of_it)
            begun = [run for run in runs if run.start_time is not None]
            return sorted(begun, key=lambda run: run.start_time)

    return asyncio.run(read())


def suspended() -> DeployedRun | None:
    """The flow run that waits for a person."""
    waiting = [run for run in flow_runs() if run.state and run.state.name == "Suspended"]
    assert len(waiting) < 2, "one form for one decision"
    return DeployedRun(waiting[0]) if waiting else None


def test_a_schedule_trains_on_what_was_added_and_a_person_decides(tmp_path: Path):
    document = series_document(tmp_path) | {"approval": "required"}
    series = tmp_path / "runs" / "weekly"
    with deployed(tmp_path) as place:
        place.prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(scheduled(tmp_path, document)))
        with place.worker():
            first = wait_for(suspended)
            wait_for(lambda: [run for run in flow_runs() if "waits for a person's word" in said_by(run)])
            assert decision_of(series, "0001") is None
            answer(place, first, "0001", "promote")
            first.wait("Completed")
            assert os.readlink(series / "models" / "champion") == "../0001/train/model"
            write_rows(tmp_path / "rows.jsonl", "a", range(16, 48))
            second = wait_for(suspended)
            assert second.id != first.id
            answer(place, second, "0002", "reject")
            second.wait("Completed")
        assert all(run.auto_scheduled for run in flow_runs())
    decided = json.loads((series / "0002" / "decision.json").read_text())
    assert (decided["decision"], decided["rows"], decided["champion"]) == ("kept", 32, "0001")
    assert decided["approval"] == "reject: looks right"
    assert len(changes_of(series)) == 1


def said_by(run: FlowRun) -> str:
    """The log lines of a flow run."""

    async def read() -> str:
        async with get_client() as client:
            logs = await client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))
            return "\n".join(log.message for log in logs)

    return asyncio.run(read())


def answer(place: Deployed, run: DeployedRun, number: str, decision: str) -> None:
    with flow_run_page(place.server, str(run.id)) as page:
        answered(page, f"Promote run {number}", decision)
