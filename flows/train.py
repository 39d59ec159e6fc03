"""`train`: a run from Python, in a script, in a notebook, or as a subflow of a flow of the user's own.

It does what `prefect-rlhf run` does, and raises what that prints. Loads Prefect only when a run begins.
"""

import asyncio
import contextvars
import gc
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_rlhf.flows.cluster.forks import environment, nothing_left, refuse_unguarded_script
from prefect_rlhf.flows.cluster.shutdown import TERMINATED, Terminated, Watch, ending_in_time
from prefect_rlhf.flows.run.prepare import Prepared
from prefect_rlhf.flows.run.run_folder import (
    begun_in,
    existing_run_folder,
    finished_since,
    full_disk,
    keep_config,
    open_run,
    refuse_foreign,
    refuse_unwritable,
    refuse_used_name,
    run_folder_of,
    taken,
)
from prefect_rlhf.flows.run.run_identity import prepare_run
from prefect_rlhf.flows.run.summary import read_jsonl
from prefect_rlhf.flows.view.terminal import phase, tell
from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    ConfigError,
    RunConfig,
    load_config,
    make_config,
    resolve_paths,
)
from prefect_rlhf.rlhf_tasks.checkpoint.journals import METRICS
from prefect_rlhf.rlhf_tasks.config.row_objects import Rows, write_rows
from prefect_rlhf.rlhf_tasks.system.child_processes import direct_to_loopback
from prefect_rlhf.rlhf_tasks.system.reading import shown

KERNEL_END_S = 60.0  # from an interrupt until a notebook's kernel is killed with a run that does not end
QUIET = {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL", "DO_NOT_TRACK": "1"}
"""Prefect's settings where the user has not set them: its logs are in the UI, our own lines are printed."""
OF_DASK = ("__DASK_PARENT_PID", "PYTHONHASHSEED")
"""Environment variables that Dask sets in the process that starts its workers."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a finished run has left.

    model    folder of the trained model, which transformers loads (with `lora`: of the adapter, which peft loads);
             None where the run trains none
    metrics  a row for each iteration, in order, as in the run's metrics.jsonl
    folder   the run's
    summary  the figures of the whole run, as in its summary.json
    """

    model: Path | None
    metrics: list[dict[str, Any]]
    folder: Path
    summary: dict[str, Any]


def train(
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    resume: str | Path | None = None,
    accept_changes: bool = False,
) -> TrainResult:
    """Run a configuration to its end, and show its progress. Inside a flow of Prefect's the run is a subflow.

    config          such as GRPOConfig(...), or a dict or YAML file with a configuration
    resume          folder of a run to continue from its last commit; without a configuration, by its own
    accept_changes  resume although rewards, data, models or settings other than ordinary ones (total_iterations,
                    learning rates, when to evaluate) have changed since that commit

    Raises ConfigError for what the user can correct, with one sentence; RunFailed for a fault during the run;
    KeyboardInterrupt after Ctrl-C, prefect.exceptions.CancelledRun where the run was cancelled. No process is left.
    """
    refuse_unguarded_script()
    quiet = {name: os.environ.get(name, value) for name, value in QUIET.items()}
    with environment({**direct_to_loopback(os.environ), **quiet}, OF_DASK), nothing_left():
        begun, settings = _opened(config, resume)
        if begun is None and accept_changes:
            raise ConfigError("accept_changes is only for a run that is resumed: give resume=FOLDER, too.")
        with ExitStack() as stack:
            folder = stack.enter_context(run_folder_of(settings, begun))
            stack.enter_context(taken(folder))
            if (placed := _with_rows(settings, folder)) is not settings:
                settings = placed
                if begun is None:
                    keep_config(folder, settings)
            accepting = "train(..., accept_changes=True)"
            prepared = prepare_run(
                settings, folder, _warn, begun is not None, accept_changes, accepting=accepting
            )
            summary = _run(folder, prepared)
        gc.collect()  # what still holds semaphores, before the process that tracks them is ended
    model = summary.get("model")
    return TrainResult(Path(model) if model else None, read_jsonl(folder / METRICS), folder, summary)


def _opened(
    config: RunConfig | Mapping[str, Any] | str | Path | None, resume: str | Path | None
) -> tuple[Path | None, RunConfig]:
    """(folder, configuration) of a run to resume; (None, configuration) of a new one."""
    if config is None:
        if resume is None:
            raise ConfigError("Give train a configuration, or resume=FOLDER of a run to continue.")
        return open_run(None, str(resume))
    if isinstance(config, str | Path):
        config = load_config(config)
    elif isinstance(config, Mapping):
        config = make_config(config)
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"train takes a configuration such as GRPOConfig(...), a dict or a YAML file, found {shown(config)}."
        )
    config = resolve_paths(config, Path.cwd())
    place = resume or begun_in(config)
    if place is None:
        refuse_unwritable(Path(config.output_dir), "output_dir")
        refuse_used_name(config)
        return None, config
    folder, before = existing_run_folder(place)
    refuse_foreign(folder)
    if before.type != config.type:
        raise ConfigError(
            f"{folder} is of type {before.type!r}, not {config.type!r}. Give a configuration of its type, or none."
        )
    return folder, config.model_copy(update={"name": before.name, "output_dir": before.output_dir})


def _with_rows(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration, with files in the run folder in the place of rows that are objects."""
    changes: dict[str, Any] = {}
    evaluation = getattr(config, "evaluation", None)
    if isinstance(config.data.train, Rows):
        file = str(write_rows(config.data.train, folder))
        changes["data"] = config.data.model_copy(update={"train": file})
    if evaluation is not None and isinstance(evaluation.data, Rows):
        file = str(write_rows(evaluation.data, folder))
        changes["evaluation"] = evaluation.model_copy(update={"data": file})
    return config.model_copy(update=changes) if changes else config


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        tell(f"warning: {line}")


def _run(folder: Path, prepared: Prepared) -> dict[str, Any]:
    """Run what is prepared. Returns the summary."""
    again = f"To continue: train(resume={str(folder)!r})"
    with phase("Prefect"):  # takes seconds to import
        from prefect_rlhf.flows.cluster.server import prefect_server, refuse_dead_server
        from prefect_rlhf.flows.run.orders import Interrupted
        from prefect_rlhf.flows.run.runs import run_as_flow
        from prefect_rlhf.flows.run.training import RunFailed
        from prefect_rlhf.flows.view.prefect_api import is_prefects, of_flow_around, what_is_wrong

    refuse_dead_server()
    began_s = time.time()
    in_loop = _has_loop()
    try:
        with (
            ending_in_time(end_s=KERNEL_END_S) if in_loop else ending_in_time() as watch,
            of_flow_around(),
            prefect_server(folder) as server,
        ):
            tell(server.ui_line)
            return _complete(lambda: run_as_flow(folder, prepared), watch, in_loop)
    except KeyboardInterrupt:
        tell(f"stopped. {again}")
        raise
    except Interrupted as ended:
        tell(f"stopped. {again}")
        if ended.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise Terminated(TERMINATED) from None
    except Exception as error:
        full = full_disk(error, folder)
        if full is not None and not isinstance(error, RunFailed | ConfigError):
            raise RunFailed(f"{full} {again}") from error
        if not is_prefects(error):
            raise
        summary = finished_since(folder, began_s)
        if summary is None:
            raise RunFailed(f"Prefect's server {what_is_wrong(error)}. {again}") from error
        return summary


def _has_loop() -> bool:
    """Whether this thread runs an event loop, as a notebook's does: then it cannot run another one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _complete(run: Callable[[], Awaitable[Any]], watch: Watch, in_loop: bool) -> Any:
    """What a coroutine returns, from an event loop of its own."""

    async def watched() -> Any:
        watch.run = asyncio.current_task()
        return await run()

    if not in_loop:
        return asyncio.run(watched())
    result = list[Any]()
    error = list[BaseException]()
    context = contextvars.copy_context()  # the flow around this one, and the settings

    def body() -> None:
        try:
            result.append(context.run(asyncio.run, watched()))
        except BaseException as raised:  # noqa: BLE001  raised again by the caller
            error.append(raised)

    thread = threading.Thread(target=body, name="train", daemon=True)
    thread.start()
    with _interrupt_after(thread, watch):
        thread.join()
    if error:
        raise error[0]
    return result[0]


@contextmanager
def _interrupt_after(thread: threading.Thread, watch: Watch) -> Iterator[None]:
    """What interrupts this thread inside ends the run first."""
    try:
        yield
    except BaseException:  # KeyboardInterrupt, or what a handler of Prefect's raises
        watch.cancel()
        thread.join(KERNEL_END_S)
        raise
