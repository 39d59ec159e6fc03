"""A flow run from the command line: with its Prefect server, its address on the screen, and a clean end."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from prefect.exceptions import Abort, CancelledRun, Pause, TerminationSignal
from rich.console import Console
from rich.markup import escape

from flows.ending import TERMINATED, Terminated, Watch, ending_in_time, terminable
from flows.pipeline import rlhf_pipeline
from flows.planning import profile_folder
from flows.ppo import rlhf_ppo
from flows.profiling import rlhf_profile
from flows.reward_model import reward_model
from flows.rollout import rollout
from flows.server import prefect_server
from flows.sft import sft
from flows.training import RunFailed
from planner.profile_cache import read_profiles, write_profiles
from rlhf_tasks.config import AnyConfig

FLOWS = {"ppo": rlhf_ppo, "sft": sft, "reward_model": reward_model, "rollout": rollout}

console = Console()


def run_here(algorithm: str, config: AnyConfig, folder: Path) -> None:
    """Run an algorithm's flow in this process; ends with status 1 and the way to go on when the run fails."""
    again = f"prefect-rlhf run {algorithm.replace('_', '-')} --resume {folder}"
    summary = _watched(folder, again, lambda: FLOWS[algorithm](config, str(folder)))
    console.print(
        f"done: {summary['iterations']} iterations in {summary['seconds']:.0f} s; {folder / 'summary.json'}"
    )


def demo_here(folder: Path, seed: int) -> None:
    """Run the demo in this process and tell what it reached."""
    folder.mkdir(parents=True, exist_ok=True)
    again = f"prefect-rlhf demo --folder {folder} --seed {seed}"
    summary = _watched(folder, again, lambda: rlhf_pipeline(str(folder), seed))
    console.print(
        f"exact-match accuracy on held-out words: {summary['accuracy_before']:.3f} after SFT, "
        f"{summary['accuracy_after']:.3f} after PPO ({summary['seconds']:.0f} s in all).\n"
        "The demonstrations were sloppy on purpose (60% have their last two letters swapped), the verifier is always "
        f"right.\n{folder / 'summary.json'}; the UI again: prefect-rlhf ui {folder}",
        highlight=False,
        soft_wrap=True,
    )


def profile_here(config: AnyConfig, out: Path | None) -> None:
    """Measure a configuration's models in this process; out: a file for all profiles besides the cache."""
    folder = profile_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    files = _watched(folder, "prefect-rlhf profile with the same configuration", lambda: rlhf_profile(config))
    if out is not None:
        write_profiles([profile for file in files for profile in read_profiles(Path(file))], out)
    for file in files:
        console.print(f"measured: {file}", highlight=False, soft_wrap=True)


def _watched(folder: Path, again: str, run: Callable[[], Awaitable[Any]]) -> Any:
    stopped = f"\nstopped. To go on: {again}"
    try:
        with terminable(), ending_in_time() as watch:
            watch.last_words, watch.to_exit = f"{stopped}\n", True
            with prefect_server(folder) as server:
                console.print(server.ui_line, highlight=False, soft_wrap=True)
                summary = asyncio.run(_await(run, watch))
    except KeyboardInterrupt:
        console.print(stopped, highlight=False, soft_wrap=True)
        raise
    except (asyncio.CancelledError, TerminationSignal, Terminated):
        console.print(stopped, highlight=False, soft_wrap=True)
        raise SystemExit(TERMINATED) from None
    except CancelledRun:
        console.print(f"cancelled. To go on: {again}", highlight=False, soft_wrap=True)
        raise SystemExit(1) from None
    except (Abort, Pause) as ended:
        console.print(f"ended: {ended}. To go on: {again}", highlight=False, soft_wrap=True)
        raise SystemExit(1) from None
    except RunFailed as failure:
        console.print(f"[bold red]failed:[/] {escape(str(failure))}\nTo go on: {again}", soft_wrap=True)
        raise SystemExit(1) from None
    return json.loads(json.dumps(summary))


async def _await(run: Callable[[], Awaitable[Any]], watch: Watch) -> Any:
    watch.run = asyncio.current_task()
    return await run()
