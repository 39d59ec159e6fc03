"""The trackers of a run: TensorBoard, W&B, MLflow. Each has a process of its own, which may fail or be late.

Nothing waits for them. A tracker is told how many iterations are committed, and reads the rows of `metrics.jsonl`
itself: rows that it has not read yet stay there, and no queue grows. A tracker that fails or hangs is reported in one
line, ended, and started again after a while; it then logs the rows that it lacks.

The process reads messages from its standard input and writes answers to its original standard output, each one line
of JSON. The first message names the store and the run. Each later one says how many iterations are committed, the
last also whether the run has `finished`. The answer to each is how many iterations the store has, or what went wrong,
after which the process ends.

A process writes down the tracker's own run and how many iterations the store has. The next process opens the store
with that, so a resumed run continues the same tracker run.
"""

import asyncio
import json
import os
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from prefect_rlhf.rlhf_tasks.checkpoint.journals import METRICS, is_row
from prefect_rlhf.rlhf_tasks.config.base import RunConfig, TrackerName
from prefect_rlhf.rlhf_tasks.config.settings import public_document
from prefect_rlhf.rlhf_tasks.system.child_pipes import ChildOutput, Requests
from prefect_rlhf.rlhf_tasks.system.child_processes import kept_call, users_environment
from prefect_rlhf.rlhf_tasks.system.durable import replace_file
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, one_line, read_json, reading

ANSWER_S = 120.0  # that a tracker may take for its rows; its server may be slow
AGAIN_S = 60.0  # after a failure; twice as long after each further one
END_S = 30.0  # that all trackers together may take when the run has ended well
RETIRE_S = 3.0  # the same where it ends early
TRACKERS = "trackers"  # in a run folder: what each tracker has, and what it has printed
PROJECT = "prefect-rlhf"
"""The default name of a project (W&B: WANDB_PROJECT) or experiment (MLflow: MLFLOW_EXPERIMENT_NAME)."""
PACKAGES: Mapping[TrackerName, tuple[str, str]] = {
    "tensorboard": ("tensorboardX", "tensorboardX"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}
"""Tracker -> the module that it needs, and the package to install for that."""


def refuse_missing(trackers: tuple[TrackerName, ...]) -> None:
    """Raises ConfigError for a tracker that is not installed."""
    for tracker in trackers:
        module, package = PACKAGES[tracker]
        if find_spec(module) is None:
            raise ConfigError(
                f"report_to: {tracker} needs the package {package}, which is not installed. "
                f"Run: pip install {package}"
            )


class Trackers:
    """The trackers of a run. Used on its event loop.

    say  writes a line for the user
    """

    def __init__(self, config: RunConfig, folder: Path, say: Callable[[str], None]) -> None:
        document = public_document(config)
        self._all = [_Tracker(name, folder, document, say) for name in config.report_to]

    def tell(self, committed: int) -> None:
        """Tell all trackers how many iterations are committed. Waits for no tracker."""
        for tracker in self._all:
            tracker.tell(committed)

    async def close(self, finished: bool) -> None:
        """End them; finished: the run has ended well, so they have END_S to take their last rows."""
        limit_s = END_S if finished else RETIRE_S
        await asyncio.gather(*(tracker.close(finished, limit_s) for tracker in self._all))
        self._all = []


class _Tracker:
    """One tracker and its process, which begins with the first commit."""

    def __init__(self, name: TrackerName, folder: Path, config: object, say: Callable[[str], None]) -> None:
        self._name, self._folder, self._config, self._say = name, folder, config, say
        self._process: Process | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._committed = self._done = 0
        self._waits_since_s = 0.0  # since when there are rows that it has not answered for; 0: none
        self._next_try_s = 0.0
        self._pause_s = AGAIN_S
        self._fault = ""

    def tell(self, committed: int) -> None:
        self._committed = committed
        if self._process is None and self._beginning is None and time.monotonic() >= self._next_try_s:
            self._beginning = asyncio.create_task(self._begin())
        elif self._waits_since_s and time.monotonic() - self._waits_since_s > ANSWER_S:
            self.failed(f"no answer in {ANSWER_S:g} s")
        self._send({"rows": committed})

    async def close(self, finished: bool, limit_s: float) -> None:
        if finished and self._process is None and self._beginning is None and self._committed > self._done:
            self._beginning = asyncio.create_task(self._begin())
        if self._beginning is not None:
            await asyncio.wait([self._beginning])
        self._send({"rows": self._committed, "finished": finished})
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=limit_s)
        if finished and self._done < self._committed:
            why = f" ({self._fault})" if self._fault else f" (no answer in {limit_s:g} s)"
            self._say(
                f"{self._name} lacks iterations {self._done + 1} to {self._committed}{why}; they are in "
                "metrics.jsonl"
            )
        process = self._process
        self._end()
        if self._reading is None:
            return
        _, left = await asyncio.wait([self._reading], timeout=END_S)
        if left and process is not None:  # its keeper does not end what it has started
            process.kill()
            await asyncio.wait([self._reading], timeout=END_S)

    async def _begin(self) -> None:
        place = self._folder / TRACKERS
        try:
            place.mkdir(exist_ok=True)
            with ChildOutput(f"the process of {self._name}", place / f"{self._name}.log") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *kept_call("prefect_rlhf.flows.trackers:serve"),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=output,
                    env=users_environment(),
                    start_new_session=True,  # Ctrl-C is the run's to handle
                )
        except OSError as error:
            self.failed(str(error))
            return
        finally:
            self._beginning = None
        self._reading = asyncio.create_task(self._read(self._process))
        self._send({"tracker": self._name, "folder": str(self._folder), "config": self._config})
        self._send({"rows": self._committed})

    def _send(self, message: dict[str, object]) -> None:
        """Send a message, or leave it out if the tracker has not read earlier ones: a later message replaces it."""
        if self._process is None:
            return
        pipe = self._process.stdin
        assert pipe is not None
        if pipe.is_closing() or (pipe.transport.get_write_buffer_size() and "finished" not in message):
            return
        pipe.write(json.dumps(message).encode() + b"\n")
        self._waits_since_s = self._waits_since_s or time.monotonic()

    async def _read(self, process: Process) -> None:
        """Follow a process's answers until it ends."""
        assert process.stdout is not None
        fault = ""
        with suppress(ConnectionError):
            async for line in process.stdout:
                answer = json.loads(line)
                fault = answer.get("fault", "")
                self._done = answer.get("done", self._done)
                self._waits_since_s = time.monotonic()
                if self._done >= self._committed:
                    self._fault, self._pause_s, self._waits_since_s = "", AGAIN_S, 0.0
        status = await process.wait()
        if process is self._process and (fault or status):
            self.failed(fault or f"its process has ended with status {status}")
        elif process is self._process:
            self._process = None

    def failed(self, fault: str) -> None:
        """End the process, and say so once for as long as it does not work."""
        first, self._fault = not self._fault, fault
        self._next_try_s = time.monotonic() + self._pause_s
        if first:
            self._say(
                f"{self._name} has failed; the run continues: {fault}. It is tried again later; its output "
                f"is in {self._folder / TRACKERS / self._name}.log"
            )
        self._pause_s *= 2
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        self._waits_since_s = 0.0
        if process is not None:
            with suppress(ProcessLookupError):
                process.terminate()  # its keeper, which ends all that it has started


# --- a tracker's process ---


@dataclass(slots=True)
class TrackedRun:
    """What a store must know of a run.

    name    the run's
    folder  the run folder
    config  the run's configuration, JSON-able
    id      the tracker's own name of the run; "" before it has one
    done    number of iterations in the store: their steps are 1 to `done`
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
        """Return when everything logged is stored."""
        ...

    def close(self, finished: bool) -> None:
        """End; finished: the run has ended well."""
        ...


def serve() -> None:
    """Serve one store, until a message says how the run has ended."""
    messages = Requests()
    try:
        for done in _served(iter(messages)):
            messages.reply({"done": done})
    except Exception as error:  # noqa: BLE001  a tracker may raise anything
        messages.reply({"fault": f"{type(error).__name__}: {one_line(str(error))}"})


def _served(messages: Iterator[Mapping[str, Any]]) -> Iterator[int]:
    begin = next(messages)
    tracker, folder = begin["tracker"], Path(begin["folder"])
    state = folder / TRACKERS / f"{tracker}.json"
    run = TrackedRun(folder.name, folder, begin["config"])
    # None yet, or a damaged one: the store starts again.
    with suppress(ConfigError), reading(state, "no state of a tracker", remedy="Remove it."):
        known = read_json(state)
        run.id, run.done = str(known["id"]), int(known["done"])
    store = STORES[tracker](run)
    _keep(state, run)
    rows = _JournalRows(folder / METRICS)
    yield run.done
    for message in messages:
        if run.done < message["rows"]:
            _log(store, run, rows, message["rows"])
            _keep(state, run)
        if "finished" in message:
            store.close(message["finished"])
            yield run.done
            return
        yield run.done


def _log(store: Store, run: TrackedRun, rows: "_JournalRows", committed: int) -> None:
    """Log the committed iterations that the store does not have."""
    for row in rows.before(committed):
        iteration = int(row["iteration"])
        if iteration >= run.done or (iteration < 0 and not run.done):  # of before the first one
            store.log(iteration + 1, {name: value for name, value in row.items() if value is not None})
            run.done = iteration + 1
    store.flush()


def _keep(state: Path, run: TrackedRun) -> None:
    replace_file(state, json.dumps({"id": run.id, "done": run.done}) + "\n")


class _JournalRows:
    """The rows of a journal, each read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_bytes = path, 0

    def before(self, iteration: int) -> Iterator[Mapping[str, Any]]:
        """The next rows, up to that iteration: later rows may belong to a commit that fails."""
        with open(self._path, "rb") as file:
            file.seek(self._read_bytes)
            while is_row(line := file.readline()) and (row := json.loads(line))["iteration"] < iteration:
                self._read_bytes += len(line)
                yield row


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
    """MLflow: MLFLOW_TRACKING_URI, by default the database `mlflow.db` beside the run folders, and there the folder
    `mlflow` for what it keeps as files."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        told = os.environ.get("MLFLOW_TRACKING_URI")
        uri = told or f"sqlite:///{run.folder.parent / 'mlflow.db'}"
        # A server knows where its files lie; a database alone would put them into the working directory.
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
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return experiment.experiment_id
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
