"""Runs a flow from the command line: with its Prefect server, its address in the terminal, and a clean end."""

import asyncio
import json
import signal
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from prefect.exceptions import Abort, CancelledRun, Pause, TerminationSignal
from rich.markup import escape

from prefect_rlhf.flows.cluster.server import ServerError, prefect_server, refuse_dead_server
from prefect_rlhf.flows.cluster.shutdown import TERMINATED, Terminated, Watch, ending_in_time, terminable
from prefect_rlhf.flows.pipeline import pipeline_as_flow, rlhf_pipeline
from prefect_rlhf.flows.plan import rlhf_profile
from prefect_rlhf.flows.run.orders import Interrupted
from prefect_rlhf.flows.run.planning import profile_folder
from prefect_rlhf.flows.run.prepare import Prepared
from prefect_rlhf.flows.run.reporting import REPORT
from prefect_rlhf.flows.run.run_folder import SUMMARY, finished_since, full_disk
from prefect_rlhf.flows.run.run_identity import CheckedStages
from prefect_rlhf.flows.run.runs import run_as_flow
from prefect_rlhf.flows.run.summary import in_short
from prefect_rlhf.flows.run.training import RunFailed
from prefect_rlhf.flows.series import SeriesRun, series_as_flow
from prefect_rlhf.flows.view.prefect_api import is_prefects, what_is_wrong
from prefect_rlhf.flows.view.terminal import SHOW_CURSOR, console, since_start_s, tell
from prefect_rlhf.planner.pricing.figures import read_profiles, write_profiles
from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    ConfigError,
    PipelineConfig,
    RunConfig,
    folder_of,
)
from prefect_rlhf.rlhf_tasks.system.durable import replace_file
from prefect_rlhf.rlhf_tasks.system.reading import printable

TRACEBACK = "error.log"  # in the run folder


def run_here(folder: Path, prepared: Prepared) -> None:
    """Run a prepared configuration in this process, as a flow run. If the run fails, say how to resume and exit with
    status 1.

    folder  the run's, which the caller has taken
    """
    again = f"prefect-rlhf run {prepared.config.type.replace('_', '-')} --resume {folder}"
    summary = _watched(folder, again, lambda: run_as_flow(folder, prepared))
    tell(f"done in {since_start_s():.0f} s: {in_short(summary)}; {folder / SUMMARY}, {REPORT}")
    if "scores" in summary:
        tell(_means(summary["scores"]))


def demo_here(folder: Path, seed: int) -> None:
    """Run the demo in this process and print its accuracy."""
    refuse_dead_server()
    again = f"prefect-rlhf demo --folder {folder} --seed {seed}"
    summary = _watched(folder, again, lambda: rlhf_pipeline(str(folder), seed))
    tell(
        f"exact-match accuracy on held-out words: {summary['accuracy_before']:.3f} after SFT, "
        f"{summary['accuracy_after']:.3f} after PPO ({since_start_s():.0f} s in all).\n"
        "The demonstrations were sloppy on purpose (60% have their last two letters swapped), the verifier is always "
        f"right.\n{folder / 'summary.json'}; the UI again: prefect-rlhf ui {folder}"
    )


def pipeline_here(config: PipelineConfig, file: Path, checked: CheckedStages) -> None:
    """Run a pipeline in this process, and print what each stage has reached.

    file     with its configuration
    checked  of its stages
    """
    folder = folder_of(config)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    again = f"prefect-rlhf run pipeline --config {file}"
    summary = _watched(folder, again, lambda: pipeline_as_flow(config, checked))
    for name, stage in summary["stages"].items():
        reached = _means(stage["scores"]) if "scores" in stage else stage["model"]
        tell(f"{name} ({stage['type']}): {reached}")
    tell(f"done in {since_start_s():.0f} s; {folder / SUMMARY}")


def series_here(run: SeriesRun, file: Path) -> None:
    """Carry out a series' run, which the caller has begun, in this process, and print its decision.

    file  with its configuration
    """
    again = f"prefect-rlhf run series --config {file}"
    decision = _watched(run.folder, again, lambda: series_as_flow(run.series, run))
    tell(f"run {run.name} is {decision['decision']}: {decision['reason']}\n{run.place}")


def _means(scores: Mapping[str, float]) -> str:
    """The mean scores of a summary in words."""
    means = ", ".join(f"{name} {mean:.4f}" for name, mean in scores.items() if name != "samples")
    return f"means of {scores['samples']} answers: {means}"


def profile_here(config: RunConfig, out: Path | None) -> None:
    """Measure profiles of a configuration's models in this process.

    out  a file for all profiles, in addition to the cache
    """
    refuse_dead_server()
    folder = profile_folder(config)
    files = _watched(folder, "prefect-rlhf profile with the same configuration", lambda: rlhf_profile(config))
    if out is not None:
        write_profiles([profile for file in files for profile in read_profiles(Path(file))], out)
    for file in files:
        tell(f"measured: {file}")


def _watched(folder: Path, again: str, run: Callable[[], Awaitable[Any]]) -> Any:
    stopped = f"\nstopped. To continue: {again}"
    began_s = time.time()
    try:
        with terminable(), ending_in_time() as watch:
            cursor = SHOW_CURSOR if console.is_terminal else ""
            watch.last_words, watch.to_exit = f"{cursor}{stopped}\n", True
            with prefect_server(folder) as server:
                tell(server.ui_line)
                summary = asyncio.run(_await(run, watch))
    except KeyboardInterrupt:
        tell(stopped)
        raise
    except Interrupted as ended:
        tell(stopped)
        if ended.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(TERMINATED) from None
    except (asyncio.CancelledError, TerminationSignal, Terminated):
        tell(stopped)
        raise SystemExit(TERMINATED) from None
    except CancelledRun:
        tell(f"cancelled. To continue: {again}")
        raise SystemExit(1) from None
    except (Abort, Pause) as ended:
        tell(f"ended: {ended}. To continue: {again}")
        raise SystemExit(1) from None
    except (ServerError, RunFailed) as failure:
        _tell_end(str(failure), again)
        raise SystemExit(1) from None
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  whatever it is, print its cause first, then how to resume
        if is_prefects(error):  # Prefect's engine aborts a flow run whose state it cannot report
            return _without_prefect(error, folder, again, began_s)
        _tell_end(full_disk(error, folder) or f"{type(error).__name__}: {error}", again)
        _keep_traceback(error, folder)
        raise SystemExit(1) from None
    return json.loads(json.dumps(summary))


def _without_prefect(error: Exception, folder: Path, again: str, began_s: float) -> Any:
    """The summary of a run that is complete although Prefect's server does not answer or has a new database.

    Exits with status 1 where the run is not complete.

    began_s  time.time() when the command began
    """
    summary = finished_since(folder, began_s)
    if summary is None:
        _tell_end(f"Prefect's server {what_is_wrong(error)}.", again)
        raise SystemExit(1) from None
    tell("Prefect's server does not show the run's end; the run is complete.")
    return summary


def _tell_end(cause: str, again: str) -> None:
    """Print why a run has ended, as the first line, and how to resume it."""
    console.print(
        f"[bold red]failed:[/] {escape(cause)}\nTo continue: {again}", highlight=False, soft_wrap=True
    )


def _keep_traceback(error: Exception, folder: Path) -> None:
    """Write an unexpected error with its traceback to a file; if that fails, to the terminal."""
    text = printable("".join(traceback.format_exception(error)))
    try:
        replace_file(folder / TRACEBACK, text)
    except OSError:
        tell(f"\n{text}")
    else:
        tell(f"The whole error: {folder / TRACEBACK}")


async def _await(run: Callable[[], Awaitable[Any]], watch: Watch) -> Any:
    watch.run = asyncio.current_task()
    return await run()
