"""`train` inside a flow of the user's, in a project with a `flows` folder of its own, as a browser shows it."""

import asyncio
import json
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.sorting import FlowRunSort

from tests.browser import chromium, logged_in
from tests.flows.train.scripts import CONFIG, environment, files_in, run_script

pytestmark = [pytest.mark.whole, pytest.mark.cluster, pytest.mark.timeout(900)]

OWN = f"""
import asyncio
from prefect import flow
from prefect_rlhf import GRPOConfig, TrainResult, train

def letters(completions, **_):
    return [float(len(completion)) for completion in completions]

settings = {CONFIG}, total_iterations=1, rewards=[letters])

@flow
def weekly(name: str) -> dict:
    result = train(GRPOConfig(**settings, name=name))
    return {{"reward": result.metrics[-1]["reward"], "model": str(result.model)}}

@flow
async def nightly(name: str) -> dict:
    result = await asyncio.to_thread(train, GRPOConfig(**settings, name=name))
    return {{"reward": result.metrics[-1]["reward"], "model": str(result.model)}}
"""
SCRIPT = """
import asyncio, json
from flows.own import nightly, weekly

if __name__ == "__main__":
    print(json.dumps([weekly("one"), asyncio.run(nightly("two"))]))
"""


def project(folder: Path) -> Path:
    """A project of a user's, with flows in a folder of its own."""
    files_in(folder)
    (folder / "flows").mkdir()
    (folder / "flows" / "__init__.py").touch()
    (folder / "flows" / "own.py").write_text(OWN)
    return folder


def test_the_run_is_a_subflow_whose_state_and_result_the_page_shows(prefect, tmp_path):
    ended = run_script(project(tmp_path), SCRIPT, environment(prefect))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, second = json.loads(ended.stdout.splitlines()[-1])
    assert first["reward"] == second["reward"]
    assert first["model"] == str(tmp_path / "runs" / "one" / "model")
    parents = asyncio.run(finished())
    assert {name: state for name, _, state in parents} == {
        "weekly": "Completed", "nightly": "Completed", "grpo/one": "Completed", "grpo/two": "Completed"
    }  # fmt: skip
    places = {name: f"/runs/flow-run/{run_id}" for name, run_id, _ in parents}
    look(prefect, places)


async def finished() -> list[tuple[str, str, str]]:
    """(name of the flow or run, id, state) of the newest four flow runs."""
    async with get_client() as client:
        runs = await client.read_flow_runs(limit=200, sort=FlowRunSort.START_TIME_DESC)
        flows = {each.id: each.name for each in await client.read_flows(limit=200)}
    ours = ("weekly", "nightly", "grpo")
    return [
        (run.name if flows[run.flow_id] == "grpo" else flows[run.flow_id], str(run.id), run.state.name)
        for run in sorted(runs, key=lambda run: run.created)
        if flows[run.flow_id] in ours and run.state is not None
    ][-4:]


def look(prefect, places: dict[str, str]) -> None:
    """Look at the pages of a flow and of its subflow."""
    with chromium() as browser:
        page = logged_in(browser, prefect)
        page.goto(prefect.ui_url + places["weekly"])
        page.get_by_text("Completed").first.wait_for()
        page.get_by_role("tab", name="Subflow Runs").or_(page.get_by_text("Subflow Runs")).first.click()
        page.get_by_text("grpo/one").first.wait_for()
        page.goto(prefect.ui_url + places["grpo/one"])
        page.get_by_text("Completed").first.wait_for()
        page.get_by_text("1 iterations, which took the ranks", exact=False).first.wait_for()
