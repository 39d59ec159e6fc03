"""What tests of flows share: a cluster of Dask's own commands, and commands on files of their own."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed import Client

from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.flows.run.summary import Planned
from prefect_rlhf.planner.plan.steady_state import SteadyState
from prefect_rlhf.planner.pricing.plans import MemoryPeak, PlanPrice
from tests.flows.checked_files import model_folder
from tests.flows.dask_commands import CONTROLLER, LOOPBACK, RANK, SAFE, dask_scheduler, dask_worker
from tests.rlhf_tasks.plans import small_plan


@pytest.fixture(scope="session")
def commanded(tmp_path_factory):
    """The address of a scheduler with a controller and one rank, all started by commands."""
    folder = tmp_path_factory.mktemp("commanded")
    with (
        dask_scheduler(folder, **SAFE) as address,
        dask_worker(address, folder, *LOOPBACK, *CONTROLLER),
        dask_worker(address, folder, *LOOPBACK, *RANK),
    ):
        with Client(address, set_as_default=False, timeout=300) as client:
            client.wait_for_workers(2, timeout=300)
        yield address


@pytest.fixture
def whole_view(monkeypatch):
    """Each iteration is shown by itself, and a run waits for that, on a starved machine too."""
    for constant in ("VIEW_LAG_S", "COMPLETE_S", "GIVE_UP_S", "RETIRE_S"):
        monkeypatch.setattr(f"prefect_rlhf.flows.view.iterations.{constant}", 300.0)
    monkeypatch.setattr("prefect_rlhf.flows.view.prefect_api.ANSWER_S", 60.0)


@pytest.fixture
def expected(tmp_path):
    """What is expected of `small_plan`: a second for every node, three for an iteration."""
    plan = small_plan()
    seconds = dict.fromkeys((node.name for node in plan.nodes), 1.0)
    peaks = {device: MemoryPeak("generate", {"parameters": 10.0}) for device in (0, 1)}
    return Planned(
        PlanPrice(seconds, {}, SteadyState(3.0, (), {}), peaks, {"generate": 10.0, "actor_train": 8.0}),
        {"generate": 4.0, "actor_train": 2.0, "critic_train": 2.0},
        5,
        1e9,
        "preset of cpu-slot",
        tmp_path / "ran.json",
    )


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """A sound PPO configuration for 2 devices, with its files."""
    model_folder(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "de"}\n')
    (tmp_path / "rewards.py").write_text(
        "import a_thing_that_is_not_there\n\ndef good(prompts, completions): ...\n"
    )
    return {
        "type": "ppo",
        "models": {"actor": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "prompts.jsonl")},
        "output_dir": str(tmp_path / "runs"),
        "sampling": {"max_completion_length": 8},
        "rewards": [{"function": f"{tmp_path / 'rewards.py'}:good"}],
        "batch_size": 8,
        "num_mini_batches": 2,
        "total_iterations": 2,
        "cluster": {"devices_per_host": 2},
    }


@pytest.fixture
def call(document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run a command on the document; gives (status, standard output, standard error)."""

    def run(*command: str) -> tuple[int, str, str]:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
        status = run_command([part.replace("FILE", str(tmp_path / "run.yaml")) for part in command])
        out, err = capsys.readouterr()
        return status, out, err

    run.files = lambda: {path for path in tmp_path.rglob("*") if path.name != "run.yaml"}
    return run


@pytest.fixture
def run_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run `plan` on a document; gives (status, standard output, standard error)."""
    monkeypatch.setattr("prefect_rlhf.flows.commands.plans.console.width", 140)

    def run(document: dict[str, Any], *arguments: str) -> tuple[int, str, str]:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
        status = run_command(["plan", "--config", str(tmp_path / "run.yaml"), *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def write(tmp_path: Path):
    """Write a document as YAML; gives its path as text."""

    def make(document: Any, name: str = "file.yaml") -> str:
        (tmp_path / name).write_text(document if isinstance(document, str) else yaml.safe_dump(document))
        return str(tmp_path / name)

    return make
