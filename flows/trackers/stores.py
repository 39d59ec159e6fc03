"""Where trackers keep what they are told: one class for each, used only in the process of that tracker.

A store is opened with what its process wrote down before: the tracker's own run, and how many iterations it has. So a
run that is resumed continues the same tracker run.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from rlhf_tasks.config.base import TrackerName
from rlhf_tasks.system.reading import ConfigError

PROJECT = "prefect-rlhf"
"""The default name of a project (W&B: WANDB_PROJECT) or experiment (MLflow: MLFLOW_EXPERIMENT_NAME)."""
PACKAGES: Mapping[TrackerName, tuple[str, str]] = {
    "tensorboard": ("tensorboardX", "tensorboardX"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}
"""Tracker -> the module that it needs, and the package to install for that."""


@dataclass(slots=True)
class TrackedRun:
    """What a store must know of a run.

    name    the run's
    folder  the run folder
    config  the run's configuration, JSON-able
    id      the tracker's own name of the run; "" before it has one
    done    so many iterations are in the store: their steps are 1 to `done`
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    id: str = ""
    done: int = 0


class Store(Protocol):
    """A tracker's store. Every method may take long or raise anything."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of the iteration that made `step` committed iterations."""
        ...

    def flush(self) -> None:
        """Have kept what was logged."""
        ...

    def close(self, finished: bool) -> None:
        """End; finished: the run has ended well."""
        ...


def refuse_missing(trackers: tuple[TrackerName, ...]) -> None:
    """Raises ConfigError for a tracker that is not installed."""
    for tracker in trackers:
        module, package = PACKAGES[tracker]
        if find_spec(module) is None:
            raise ConfigError(
                f"report_to: {tracker} needs the package {package}, which is not installed. "
                f"Run: pip install {package}"
            )


class TensorBoard:
    """Event files in `tensorboard` of the run folder: `tensorboard --logdir runs/NAME/tensorboard`."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.summary import text

        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        # Two files of one second would overwrite each other without a suffix.
        self._writer = EventsWriter(str(folder / "events"), f".{uuid4().hex[:8]}")
        self._event, self._summary = Event, Summary
        if run.done:  # readers then forget later steps of earlier files
            session = SessionLog(status=SessionLog.START)
            self._write(step=run.done + 1, session_log=session)
        else:
            document = json.dumps(run.config, indent=1)
            self._write(step=0, summary=text("configuration", f"```\n{document}\n```"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=self._summary(value=values))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()

    def _write(self, **event: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), **event))


class WandB:
    """Weights & Biases, configured by its own variables (WANDB_MODE, ...); files are in `wandb` of the run folder."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run.id = run.id or uuid4().hex[:12]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
        )
        run.done = max(run.done, self._run.step - 1)  # the server knows better, where there is one

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def flush(self) -> None:
        """W&B's own process has it already, and sends it when it can."""

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MLflow:
    """MLflow: MLFLOW_TRACKING_URI, by default the data base `mlflow.db` beside the run folders, and there the folder
    `mlflow` for what it keeps as files."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        told = os.environ.get("MLFLOW_TRACKING_URI")
        uri = told or f"sqlite:///{run.folder.parent / 'mlflow.db'}"
        # A server knows where its files lie; a data base alone would put them into the working directory.
        self._files = None if told else (run.folder.parent / "mlflow").absolute().as_uri()
        self._client, self._metric = MlflowClient(uri), Metric
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
            kept = self._client.get_run(run.id).data.metrics.get("iteration")
            run.done = 0 if kept is None else int(kept) + 1
        else:
            run.id = self._client.create_run(self._experiment(), run_name=run.name).info.run_id
            self._client.log_dict(run.id, dict(run.config), "config.json")
        self._id = run.id

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        return self._client.create_experiment(name, artifact_location=self._files)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(n, v, now_ms, step) for n, v in metrics.items()])

    def flush(self) -> None:
        """Each batch is kept when it is logged."""

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


STORES: Mapping[str, type[TensorBoard] | type[WandB] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}
