"""Trackers beside a run, with their own packages and real local stores."""

import asyncio
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from prefect_rlhf.flows import trackers
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.trackers import PACKAGES, Trackers, refuse_missing
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.flows.tracked import in_event_files, in_mlflow, in_wandb, only_mlflow_run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's use of SQLAlchemy
READ = {
    "tensorboard": lambda folder: in_event_files(folder / "tensorboard"),
    "wandb": in_wandb,
    "mlflow": in_mlflow,
}
SECRET = "hunter-2"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B keeps its runs here; a starved machine takes long to start a tracker."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("MLFLOW_TRACKING_URI", "WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(trackers, "END_S", 200.0)
    monkeypatch.setattr(trackers, "RETIRE_S", 200.0)


class Run:
    """A run without ranks: a folder with a journal, whose rows are committed one after another."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder, self.said = folder / "runs" / "tiny", []
        self.folder.mkdir(parents=True)
        self.config = make_config(
            {
                "type": "ppo",
                "models": {"actor": "a"},
                "data": {"train": "d"},
                "sampling": {"max_completion_length": 4},
                "rewards": [
                    {"function": "m:f", "kwargs": {"api_key": SECRET}},
                    {"url": "https://judge.org/score", "headers": {"Authorization": SECRET}},
                ],
                "environment": {"factory": "m:h", "kwargs": {"bearer": SECRET}},
                "total_iterations": 8,
                "report_to": names,
            }
        )

    def begin(self) -> Trackers:
        return Trackers(self.config, self.folder, self.said.append)

    def write(self, *iterations: int) -> None:
        with open(self.folder / "metrics.jsonl", "a") as journal:
            for iteration in iterations:
                journal.write(json.dumps(row_of(iteration)) + "\n")


def row_of(iteration: int) -> dict[str, Any]:
    return {"iteration": iteration, "reward": iteration / 8, "kl": None, "time/actor_train": 2.0}


def points_of(*iterations: int) -> list[tuple[str, int, float]]:
    rows = [(i + 1, row_of(i)) for i in iterations]
    return sorted(
        (name, step, value) for step, row in rows for name, value in row.items() if value is not None
    )


def children() -> list[psutil.Process]:
    """This process's children, without those of multiprocessing, ranks and a server that earlier tests have begun."""
    own = (
        "resource_tracker",
        "track_resources",
        "multiprocessing.forkserver",
        "server_process",
        "rank_process",
    )
    return [
        one for one in psutil.Process().children() if not any(name in " ".join(one.cmdline()) for name in own)
    ]


async def until(true: Any) -> None:
    limit_s = time.monotonic() + 100
    while not true():
        assert time.monotonic() < limit_s
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "name", ["tensorboard", *(pytest.param(name, marks=pytest.mark.whole) for name in ("wandb", "mlflow"))]
)
def test_a_resumed_run_continues_its_tracker_run_with_every_step_once(tmp_path: Path, name: str):
    run = Run(tmp_path, name)

    async def attempt(finished: bool, *iterations: int) -> None:
        told = run.begin()
        for iteration in iterations:
            run.write(iteration)
            told.tell(iteration + 1)
        run.write(iterations[-1] + 1)  # of a commit that fails: the next attempt overwrites it
        await told.close(finished)
        path = run.folder / "metrics.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))

    run.write(-1)  # an evaluation before the first iteration
    asyncio.run(attempt(False, 0, 1, 2))
    asyncio.run(attempt(True, 3, 4))
    assert sorted(READ[name](run.folder)) == points_of(-1, 0, 1, 2, 3, 4)
    assert run.said == []
    if name == "mlflow":
        info = only_mlflow_run(MlflowClient(f"sqlite:///{run.folder.parent / 'mlflow.db'}")).info
        assert (info.run_name, info.status) == ("tiny", "FINISHED")
        (kept,) = (run.folder.parent / "mlflow").rglob("config.json")
        assert kept.as_uri().startswith(info.artifact_uri)
    assert not any(SECRET.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.whole
@pytest.mark.parametrize("state", ["{}", "no JSON"])
def test_where_a_trackers_state_is_damaged_it_is_given_every_row_again(tmp_path: Path, state: str):
    run = Run(tmp_path, "tensorboard")
    (run.folder / "trackers").mkdir()
    (run.folder / "trackers" / "tensorboard.json").write_text(state)
    run.write(0, 1)

    async def scene() -> None:
        told = run.begin()
        told.tell(2)
        await told.close(finished=True)

    asyncio.run(scene())
    assert (sorted(READ["tensorboard"](run.folder)), run.said) == (points_of(0, 1), [])


@pytest.mark.whole
def test_a_tracker_that_is_killed_begins_again_and_lacks_nothing(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(trackers, "AGAIN_S", 0.0)
    run = Run(tmp_path, "tensorboard")
    state = run.folder / "trackers" / "tensorboard.json"

    async def scene() -> None:
        told = run.begin()
        run.write(0, 1)
        told.tell(2)
        await until(lambda: state.exists() and json.loads(state.read_text())["done"] == 2)
        (keeper,) = children()
        for process in keeper.children(recursive=True):
            os.kill(process.pid, signal.SIGKILL)
        await until(lambda: run.said)
        run.write(2, 3)
        told.tell(4)
        await told.close(finished=True)

    asyncio.run(scene())
    assert sorted(READ["tensorboard"](run.folder)) == points_of(0, 1, 2, 3)
    assert [line.partition(":")[0] for line in run.said] == ["tensorboard has failed; the run continues"]


def test_a_server_that_never_answers_holds_nothing_up_and_is_named_once(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(trackers, "END_S", 1.0)
    monkeypatch.setattr(trackers, "ANSWER_S", 0.2)
    run = Run(tmp_path, "mlflow")

    async def scene() -> float:
        told, slowest_s = run.begin(), 0.0
        for iteration in range(6):
            run.write(iteration)
            began_s = time.monotonic()
            told.tell(iteration + 1)
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            await asyncio.sleep(0.15)
        await told.close(finished=True)
        return slowest_s

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert asyncio.run(scene()) < 5
    failed, lacks = run.said
    assert failed.startswith("mlflow has failed; the run continues: no answer in 0.2 s.")
    assert lacks.startswith("mlflow lacks iterations 1 to 6 (no answer")
    assert children() == []


@pytest.mark.timeout(60)
def test_a_tracker_whose_keeper_stands_still_is_killed_at_the_end(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(trackers, "END_S", 1.0)
    monkeypatch.setattr(trackers, "RETIRE_S", 0.1)
    run = Run(tmp_path, "tensorboard")

    async def scene() -> list[psutil.Process]:
        told = run.begin()
        told.tell(0)
        await until(children)
        (keeper,) = children()
        keeper.suspend()
        await told.close(finished=False)
        return [keeper]

    (keeper,) = asyncio.run(scene())
    assert not keeper.is_running()


@pytest.mark.whole
def test_a_store_that_refuses_is_named_with_its_own_words(tmp_path: Path):
    run = Run(tmp_path, "tensorboard")
    (run.folder / "tensorboard").write_text("a file where the event files belong")

    async def scene() -> None:
        run.write(0)
        told = run.begin()
        told.tell(1)
        await until(lambda: run.said)
        await told.close(finished=False)

    asyncio.run(scene())
    assert run.said[0].startswith("tensorboard has failed; the run continues: FileExistsError: ")


def test_a_tracker_that_is_not_installed_is_refused_with_the_command(tmp_path: Path, monkeypatch: Any):
    refuse_missing(("tensorboard", "wandb", "mlflow"))
    monkeypatch.setitem(PACKAGES, "wandb", ("wandb_that_is_not_there", "wandb"))
    with pytest.raises(
        ConfigError, match=r"^report_to: wandb needs .* not installed. Run: pip install wandb$"
    ):
        prepare(Run(tmp_path, "tensorboard", "wandb").config)


def test_a_tracker_is_named_once_and_known():
    document = {"type": "sft", "models": {"actor": "a"}, "data": {"train": "d"}, "total_iterations": 1}
    for names, why in ((["wandb", "wandb"], "twice"), (["comet"], "report_to")):
        with pytest.raises(ConfigError, match=why):
            make_config({**document, "report_to": names})
