"""One run from its configuration to its summary: what every algorithm's flow does.

carry_out         opens the run and prepares it (prepare.py), unless a command or a pipeline has done so
run_prepared      begins Prefect's server, the view (progress.py) and the watch for orders (orders.py)
  Attempts.run    an attempt after the other until the last iteration or an order (training.py), each by the plan
                  of that time (replanning.py)
    Training.run  one attempt: passes orders on, follows the controller's events
_end              as it was ordered: leaves model and summary (summary.py), or a state in Prefect
"""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, State

from prefect_rlhf.flows.cluster.forks import begin_to_load_for, in_fork, refuse_unguarded_script
from prefect_rlhf.flows.cluster.server import prefect_server
from prefect_rlhf.flows.cluster.shutdown import ending_in_time, patient
from prefect_rlhf.flows.pushes import PushError, push_model
from prefect_rlhf.flows.rewards import secret_blocks
from prefect_rlhf.flows.run.device_loss import problem_of_plan
from prefect_rlhf.flows.run.orders import (
    ENDINGS,
    Order,
    Orders,
    cancelled_by_signals,
    leave_to_prefect,
    watched_orders,
)
from prefect_rlhf.flows.run.origins import leave_origin
from prefect_rlhf.flows.run.prepare import Prepared, prepare
from prefect_rlhf.flows.run.progress import RunView
from prefect_rlhf.flows.run.replanning import Replanning
from prefect_rlhf.flows.run.reporting import leave_report
from prefect_rlhf.flows.run.run_folder import (
    SUMMARY,
    exported_step,
    full_disk,
    open_run,
    remember_folder,
    run_folder_of,
    taken,
)
from prefect_rlhf.flows.run.run_identity import begun_folder, keep_identity, refuse_changes
from prefect_rlhf.flows.run.summary import (
    in_short,
    keep_drift,
    metrics_of_step,
    model_card,
    planned,
    planned_and_measured,
    planned_lanes,
    read_jsonl,
    rows_by_plan,
    run_figures,
)
from prefect_rlhf.flows.run.training import Attempts, Restarts, RunFailed
from prefect_rlhf.flows.view import artifacts
from prefect_rlhf.flows.view.prefect_api import PrefectApi
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from prefect_rlhf.rlhf_tasks.checkpoint.commits import commit_to_export, newest_step
from prefect_rlhf.rlhf_tasks.checkpoint.journals import LINEAGE, METRICS
from prefect_rlhf.rlhf_tasks.config.models import HubPush
from prefect_rlhf.rlhf_tasks.config.sampling import OnePass
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.system.durable import replace_file
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach
from prefect_rlhf.rlhf_tasks.user_code.rewards import mean_scores

EXPORT = "prefect_rlhf.rlhf_tasks.rank.export:export_written"
NOTICED_S = 5.0  # within this the run has heard of an order in Prefect
# That a cancelled run has to reach its next commit and end; else it ends at its last one.
NEXT_COMMIT_S = 18.0
ENDS_S = 600.0  # what the process before may take to end where Prefect starts a flow run again
FLOW_NAMES = {"ppo": "rlhf-ppo"}
"""Algorithm -> the name of its flow, where that is not the algorithm's with hyphens."""


async def carry_out(
    algorithm: str, config: RunConfig | None, run_folder: str | None = None
) -> dict[str, Any] | State[Any]:
    """Open and prepare a run, then run it to its end, from the last commit in `run_folder` if it has one. Returns the
    summary, or the state of a cancelled run.

    algorithm  the type of configuration that the flow carries out

    Called inside a flow. Relative paths mean the flow's folder. Raises ConfigError for what the user can correct,
    RunFailed for a fault during the run, and Prefect's signals if the flow run is suspended or was ended.
    """
    refuse_unguarded_script()
    folder, config = open_run(config, run_folder, flow_run.id)
    if config.type != algorithm:
        raise ConfigError(
            f"{folder} is a run of type {config.type!r}, and this flow carries out {algorithm!r}. Continue it "
            f"with prefect-rlhf run {config.type.replace('_', '-')} --resume {folder}, or name another folder."
        )
    begun, most = _times_begun(), config.max_restarts
    if folder is None and begun > 1 + most:
        raise RunFailed(
            f"its process has ended {begun - 1} times without a run folder (max_restarts={most}). Start a "
            "new flow run."
        )
    blocks = await secret_blocks(config)  # before any code of the user's
    prepared = prepare(config) if folder is None else None  # a run that is refused leaves no folder
    with (
        run_folder_of(config, folder) as place,
        ending_in_time(asyncio.current_task()),
        taken(place, ENDS_S if begun > 1 else 0.0),
    ):
        # Before planning: whatever ends the process from here on counts.
        async with _taken_up(place, most) as rebuilds:
            if prepared is None:
                prepared = prepare(config, place)
                refuse_changes(place, prepared)
            return await run_prepared(place, prepared, blocks, rebuilds)


async def run_as_flow(folder: Path, prepared: Prepared) -> dict[str, Any]:
    """Run a configuration that the caller has prepared, in a flow run of its own. Returns the summary.

    folder  the run's, which the caller has taken
    Raises what `carry_out` does, and `prefect.exceptions.CancelledRun`.
    """
    config = prepared.config

    async def run(config: RunConfig, run_folder: str) -> Any:
        """The parameters are what Prefect shows of the run."""
        blocks = await secret_blocks(config)
        with ending_in_time(asyncio.current_task()):
            async with _taken_up(folder, config.max_restarts) as rebuilds:
                ended = await run_prepared(folder, prepared, blocks, rebuilds)
                return ended if isinstance(ended, State) else Completed(data=ended, message=in_short(ended))

    name = FLOW_NAMES.get(config.type, config.type.replace("_", "-"))
    of_run = Flow(run, name, flow_run_name=flow_run_name, persist_result=False, validate_parameters=False)
    return await of_run(config, str(folder))


async def run_stage(config: RunConfig, prepared: Prepared) -> dict[str, Any]:
    """Run a stage to its end, from its last commit if it has one. Returns its summary.

    config    its name is that of its run folder
    prepared  by `prepare_stage`; its configuration is the one to run
    """
    with (
        run_folder_of(config, begun_folder(config)) as folder,
        taken(folder, ENDS_S if _times_begun() > 1 else 0.0),
    ):
        return await run_as_flow(folder, prepared)


def _times_begun() -> int:
    """How many processes have begun this flow run."""
    return flow_run.run_count or 1


@asynccontextmanager
async def _taken_up(folder: Path, max_restarts: int) -> AsyncIterator[int]:
    """Record in the run folder that this flow run takes the run up; a signal cancels it at its newest commit. Gives
    the attempts and rebuilds since that commit. Raises RunFailed when they are too many."""
    async with cancelled_by_signals(lambda: f"at commit {newest_step(folder) or 0}"):
        remember_folder(folder, flow_run.id)
        yield Restarts(folder, max_restarts).begin(started_again=_times_begun() > 1)


async def run_prepared(
    folder: Path, prepared: Prepared, blocks: Mapping[str, str], rebuilds: int
) -> dict[str, Any] | State[Any]:
    """Run an opened, taken and prepared run to its end. Returns what `carry_out` does.

    blocks    Prefect Secret block that rewards and environment name -> its value; a later attempt needs no server
    rebuilds  attempts and rebuilds since the newest commit, in processes before this one
    """
    for warning in prepared.warnings:
        get_run_logger().warning(warning)
    config = prepared.config
    expected = {
        p.iteration: planned(config, p.plan, problem_of_plan(config, p.plan, prepared.problem))
        for p in prepared.plans
    }
    begin_to_load_for(config.cluster)
    with prefect_server(folder):
        keep_identity(folder, prepared)
        prepared.keep_rows(folder)
        view = RunView(prepared, folder, expected[0].peak_flops_per_s)
        replanning = Replanning(prepared, folder, expected, view.say)
        try:
            await view.begin()
            async with watched_orders(folder, flow_run.id, view.say) as orders:
                restarts = Restarts(folder, config.max_restarts)
                attempts = Attempts(prepared, folder, blocks, view, orders, replanning, restarts)
                by_worker = bool(os.environ.get("PREFECT__FLOW_RUN_ID"))
                with patient(lambda: patience_s(orders)) if by_worker else nullcontext():
                    order = await attempts.run(rebuilds)
            return await _end(order, orders, prepared, folder, view, replanning)
        except RunFailed as fault:
            cause = str(fault).partition("\n")[0]
            await asyncio.to_thread(leave_report, folder, f"It has ended by a fault: {cause}")
            raise
        finally:
            await replanning.close()
            await view.close()
            await view.api.part()


def patience_s(orders: Orders) -> float:
    """Seconds from the SIGTERM of a worker of Prefect's until it takes effect.

    A worker cancels a flow run by SIGTERM. The run also gets this as an order, before or after the signal. A run that
    should end at its next commit gets some time to reach it.
    """
    return NEXT_COMMIT_S if orders.wanted in ENDINGS and orders.wanted is not Order.END else NOTICED_S


async def _end(
    order: Order,
    orders: Orders,
    prepared: Prepared,
    folder: Path,
    view: RunView,
    replanning: Replanning,
) -> dict[str, Any] | State[Any]:
    """End a run as it was ordered: its summary, or its state."""
    if order is Order.LEAVE:
        await leave_to_prefect(flow_run.id, newest_step(folder) or 0, orders.left)
    if order is Order.CANCEL:
        await asyncio.to_thread(leave_report, folder, "It was cancelled.")
        return Cancelled(message=f"at commit {newest_step(folder) or 0}; {orders.why}")
    view.finishing()
    await view.end()  # first: the summary says what Prefect does not show
    summary = await asyncio.to_thread(_finish, folder, prepared, replanning, view.api)
    if (scores := summary.get("scores")) is not None:
        await view.api.show(lambda: artifacts.show_scores(scores))
    compared = summary["planned_and_measured"]
    if compared["iterations"]:
        await view.api.show(lambda: artifacts.show_planned_and_measured(compared))
    if missing := view.api.missing():
        view.say(
            f"Prefect does not show all of the run, which continued without the server for {missing['away_s']} s: "
            f"{folder / SUMMARY} has the rest"
        )
    if isinstance(prepared.config, TrainingConfig) and (target := prepared.config.push_to_hub) is not None:
        summary |= await asyncio.to_thread(_push, folder, target, summary, view.say)
    view.finished()
    return summary


def _push(
    folder: Path, target: HubPush, summary: dict[str, Any], say: Callable[[str], None]
) -> dict[str, str]:
    """Put the run's model on the Hub. Returns what the summary says of that: where it is, or why it is not; then the
    run is complete all the same."""
    message = f"{folder.name} after {summary['model_step']} iterations"
    try:
        pushed = {"pushed_to": push_model(Path(summary["model"]), target, message, say)}
        say(f"the model is at {pushed['pushed_to']}")
    except PushError as error:
        again = f"prefect-rlhf export {folder} --push {target.repo}{'' if target.private else ' --public'}"
        pushed = {"not_pushed": str(error)}
        say(f"the model is not on the Hub: {error} It is in {summary['model']}. To try again: {again}")
    replace_file(folder / SUMMARY, json.dumps({**summary, **pushed}, indent=2) + "\n")
    return pushed


def _finish(folder: Path, prepared: Prepared, replanning: Replanning, api: PrefectApi) -> dict[str, Any]:
    """Export the trained model, write `summary.json` and the report."""
    metrics, lineage = read_jsonl(folder / METRICS), read_jsonl(folder / LINEAGE)
    summary = run_figures(replanning.plans, lineage)
    parts = rows_by_plan(replanning.plans, lineage)
    last, rows = parts[-1] if parts else (replanning.present, [])
    expected = replanning.expected[last.iteration]
    summary["planned_and_measured"] = planned_and_measured(last.plan, expected, rows)
    summary["planned_lanes"] = planned_lanes(last.plan, expected.price)
    keep_drift(last.plan, expected, summary["planned_and_measured"])
    summary["run"] = folder.name
    summary["metrics"] = metrics[-1] if metrics else {}
    trained = [role for role, placed in prepared.plan.roles.items() if placed.trained]
    if trained:
        by_now, role = (
            replace(prepared, changes=replanning.plans[1:]),
            "actor" if "actor" in trained else trained[0],
        )
        summary |= _leave_model(folder, by_now, role, metrics)
    if isinstance(prepared.config, OnePass):
        summary["scores"] = mean_scores(folder, prepared.config.samples(len(prepared.rows)))
    if missing := api.missing():
        summary["prefect"] = missing
    replace_file(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
    leave_report(folder)
    return summary


def _leave_model(
    folder: Path, prepared: Prepared, role: str, metrics: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Export a role's model, with its card, unless the folder has that of this commit. Returns what the summary says
    of it."""
    commit, _ = commit_to_export(folder, prepared.config)
    assert commit is not None, "a finished run has a commit"
    model = folder / "model"
    if exported_step(folder) != commit.step:  # a run that was stopped may have continued
        shutil.rmtree(model, ignore_errors=True)
        reach(Point.EXPORT)
        _export(commit.folder, prepared, role, model)
        leave_origin(folder, commit, model)
        reach(Point.EXPORTED)
    card = model_card(prepared, folder.name, role, metrics_of_step(metrics, commit.step))
    (model / "README.md").write_text(card, encoding="utf-8")
    return {"model": str(model), "model_step": commit.step}


def _export(commit: Path, prepared: Prepared, role: str, model: Path) -> None:
    """Write the trained model. Raises RunFailed, with bytes needed and free, when the disk is full."""
    try:
        in_fork(EXPORT, commit, prepared.config.model_dump(mode="json"), role, model)
    except Exception as error:  # safetensors has an error of its own
        full = full_disk(error, model.parent, prepared.disk.export_bytes)
        if full is None:
            raise
        raise RunFailed(
            f"all iterations are committed, but the model could not be written. {full}"
        ) from error


def flow_run_name() -> str:
    """`ppo/<run>`, from the parameters of the flow run that asks."""
    parameters = flow_run.parameters or {}
    config, folder = parameters.get("config"), parameters.get("run_folder")
    name = Path(folder).name if folder else getattr(config, "name", None) or flow_run.id[:8]
    return f"{flow_run.flow_name.removeprefix('rlhf-')}/{name}"
