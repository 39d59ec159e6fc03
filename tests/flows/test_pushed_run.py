"""A run puts its model on a Hub at its end; where that fails, the run is complete, and it can be put there later."""

import json

import pytest
import yaml

from tests.flows.marked_command import MarkedCommand
from tests.loopback_hub import WRITER, Hub
from tests.tiny_runs import learning_config

pytestmark = [pytest.mark.whole, pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_push_that_fails_loses_nothing_and_the_command_that_is_told_repeats_it(hub: Hub, tmp_path):
    config = learning_config(tmp_path, "dpo", name="mine", push_to_hub="org/mine", total_iterations=1)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    folder, environment = tmp_path / "runs" / "mine", hub.environment(tmp_path / "home", WRITER)
    hub.next_answers("POST /api/repos/create", status=500, times=100)
    command = ("run", "dpo", "--config", str(tmp_path / "run.yaml"))
    with MarkedCommand(tmp_path / "log", *command, environment=environment) as run:
        assert run.process.wait(600) == 0, run.output
    again = f"prefect-rlhf export {folder} --push org/mine"
    assert f"To try again: {again}" in run.output
    summary = json.loads((folder / "summary.json").read_text())
    assert "answers with status 500" in summary["not_pushed"]
    assert (folder / "model" / "model.safetensors").exists()
    hub.faults.clear()
    with MarkedCommand(tmp_path / "log2", *again.split()[1:], environment=environment) as later:
        assert later.process.wait(300) == 0, later.output
    assert f"actor after 1 iterations: {hub.url}/org/mine" in later.output
    put = hub.files("org/mine")
    assert put["model.safetensors"] == (folder / "model" / "model.safetensors").read_bytes()
    of_run, of_export = ((folder / "model" / "README.md").read_bytes(), put["README.md"])
    until = b"## Configuration"  # which the run has decided further
    assert of_export.partition(until)[0] == of_run.partition(until)[0]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if WRITER.encode() in path.read_bytes()]
