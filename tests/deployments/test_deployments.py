"""The deployments as their owner uses them: Prefect's own commands, a real server, a real process worker."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from flows.server import own_server
from tests.tiny_runs import ppo_config

ROOT = Path(__file__).parents[2]
PREFECT_FILE = ROOT / "deployments" / "prefect.yaml"


def test_every_deployment_names_a_flow_that_is_there():
    import importlib

    named = {}
    for deployment in yaml.safe_load(PREFECT_FILE.read_text())["deployments"]:
        path, _, function = deployment["entrypoint"].partition(":")
        flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), function)
        named[f"{flow.name}/{deployment['name']}"] = deployment
        required = flow.parameters.required
        assert (not required) == ("parameters" in deployment), f"{flow.name} needs {required}"
        assert deployment["work_pool"] == {"name": "rlhf-local"}
        assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert set(named) == {
        "rlhf-ppo/local",
        "rlhf-pipeline/local",
        "sft/local",
        "reward-model/local",
        "plan/local",
    }


def test_no_module_of_flows_hides_one_of_the_standard_library():
    """Prefect puts an entry point's folder first on the path: flows/profile.py broke torch's import."""
    modules = {path.stem for path in (ROOT / "flows").glob("*.py")} - {"__init__"}
    assert not modules & sys.stdlib_module_names


@contextmanager
def process_worker(environment: dict[str, str]) -> Iterator[None]:
    """`prefect worker start`, ended with its children as a terminal would end it."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "rlhf-local"]
    worker = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(worker.pid, signal.SIGTERM)
        try:
            worker.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_deployed_ppo_run_is_done_by_a_process_worker(tmp_path):
    config = ppo_config(tmp_path, total_iterations=2).model_dump(mode="json")
    with own_server(tmp_path) as server:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")},
            **server.environment,
            "PREFECT_HOME": str(tmp_path / "client"),
            "PYTHONPATH": str(ROOT),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }

        def prefect(*arguments: str) -> None:
            command = [sys.executable, "-m", "prefect", *arguments]
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"

        prefect("work-pool", "create", "rlhf-local", "--type", "process")
        prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_FILE.relative_to(ROOT)))
        with process_worker(environment):
            parameter = f"config={json.dumps(config)}"
            prefect("deployment", "run", "rlhf-ppo/local", "--param", parameter, "--watch")
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("ppo-"), "a run without a name gets a fresh one"
    assert json.loads((run / "summary.json").read_text())["iterations"] == 2
    assert (run / "model" / "model.safetensors").exists()
