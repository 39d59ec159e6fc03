"""A run of models and rows from a Hub, killed, and continued after `main` has moved and the Hub has gone."""

import json
from pathlib import Path

import pytest
import yaml

from prefect_rlhf.rlhf_tasks.checkpoint.commits import newest_step
from tests.flows.marked_command import MarkedCommand, outcome
from tests.loopback_hub import READER, Hub
from tests.tiny_runs import critic_free_config, write_model

pytestmark = [pytest.mark.whole, pytest.mark.cluster, pytest.mark.timeout(900)]
ITERATIONS = 6


@pytest.fixture
def file(hub: Hub, tmp_path: Path) -> Path:
    """A configuration whose model and rows only an account may read."""
    document = critic_free_config(
        tmp_path / "local",
        type="grpo",
        name="mine",
        num_generations=4,
        total_iterations=ITERATIONS,
        snapshot_every=1,
    ).model_dump(mode="json")
    hub.add_folder("org/model", tmp_path / "local" / "actor", private=True)
    rows = (tmp_path / "local" / "prompts.jsonl").read_bytes()
    hub.add("org/rows", {"train.jsonl": rows}, "dataset", private=True)
    document |= {
        "models": {"actor": "org/model"},
        "data": {"train": "org/rows"},
        "cluster": {"devices_per_host": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    return tmp_path / "run.yaml"


def test_a_killed_run_continues_with_its_commit_and_without_the_hub(hub: Hub, file: Path, tmp_path: Path):
    home, folder, log = tmp_path / "home", tmp_path / "local" / "runs" / "mine", tmp_path / "log"
    begun = hub.repositories["model", "org/model"].refs["main"]
    environment = hub.environment(home, READER)
    with MarkedCommand(log, "run", "grpo", "--config", str(file), environment=environment) as command:
        command.wait_until(lambda: folder.exists() and (newest_step(folder) or 0) >= 2)
        write_model(tmp_path / "other", seed=9)
        hub.add_folder("org/model", tmp_path / "other")
    command.assert_gone()
    hub.close()
    status, said = outcome(tmp_path / "again", "run", "grpo", "--resume", str(folder), **environment)
    assert status == 0, said
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["model_step"] == ITERATIONS
    assert json.loads((folder / "config.json").read_text())["models"]["actor"] == "org/model"
    assert json.loads((folder / "revisions.json").read_text())["model org/model"]["commit"] == begun
    assert "downloaded org/model" in log.read_text()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert folder / "prefect" / "auth" in written
    assert [path for path in written if READER.encode() in path.read_bytes()] == [], (
        "no file, log or database"
    )
