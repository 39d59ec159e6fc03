"""One run from its configuration to its summary: what every algorithm's flow does."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.exceptions import Abort
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, State

from flows.cluster.cluster import ClusterError, DaskCluster, found_cluster, local_cluster
from flows.cluster.forks import begin_to_load_for, in_fork, refuse_unguarded_script
from flows.cluster.server import prefect_server
from flows.cluster.shutdown import ending_in_time, patient
from flows.cluster.this_machine import gpus_here
from flows.rewards import secret_blocks
from flows.run.orders import ENDINGS, Order, Orders, cancelled_by_signals, leave_to_prefect, watched_orders
from flows.run.planning import hardware_of, users_seconds
from flows.run.prepare import Prepared, prepare
from flows.run.progress import RunView
from flows.run.replanning import Replanning
from flows.run.run_folder import SUMMARY, full_disk, open_run, remember_folder, run_folder_of, taken
from flows.run.run_identity import keep_identity, refuse_changes
from flows.run.stages import begun_folder
from flows.run.summary import (
    keep_drift,
    metrics_of_step,
    model_card,
    planned,
    planned_and_measured,
    read_jsonl,
    rows_by_plan,
    run_figures,
)
from flows.run.training import ControllerLost, RunFailed, TrainingResult, run_training
from flows.view import artifacts
from flows.view.prefect_api import PrefectApi
from flows.view.terminal import entering
from rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from rlhf_tasks.algorithms.held_out import HELD_OUT
from rlhf_tasks.checkpoint.commits import commit_to_export, newest_step
from rlhf_tasks.checkpoint.journals import LINEAGE, METRICS
from rlhf_tasks.config.base import OnePass
from rlhf_tasks.protocol.messages import RunSpec
from rlhf_tasks.system.durable import replace_file
from rlhf_tasks.system.failpoints import Point, reach
from rlhf_tasks.system.reading import read_json, reading
from rlhf_tasks.user_code.rewards import mean_scores

EXPORT = "rlhf_tasks.rank.export:export_written"
RESTARTS = "restarts.json"
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
    begun, most = _times_begun(), config.runtime.max_restarts
    if folder is None and begun > 1 + most:
        raise RunFailed(
            f"its process has ended {begun - 1} times without a run folder (runtime.max_restarts={most}). Start a "
            "new flow run."
        )
    blocks = await secret_blocks(config)  # before any code of the user's
    prepared = prepare(config) if folder is None else None  # a run that is refused leaves no folder
    with (
        run_folder_of(config, folder) as place,
        ending_in_time(asyncio.current_task()),
        taken(place, ENDS_S if begun > 1 else 0.0),
    ):
        async with _cancelled_at_its_commit(place):
            rebuilds = _take_up(place, most)  # at once: whatever ends the process from here on counts
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
            async with _cancelled_at_its_commit(folder):
                rebuilds = _take_up(folder, config.runtime.max_restarts)
                return await run_prepared(folder, prepared, blocks, rebuilds)

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


def _cancelled_at_its_commit(folder: Path) -> AbstractAsyncContextManager[None]:
    return cancelled_by_signals(lambda: f"at commit {newest_step(folder) or 0}")


def _take_up(folder: Path, max_restarts: int) -> int:
    """Record in the run folder that this flow run takes the run up. Returns the attempts and rebuilds since the
    newest commit. Raises RunFailed when they are too many."""
    remember_folder(folder, flow_run.id)
    return Restarts(folder, max_restarts).begin(started_again=_times_begun() > 1)


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
    expected = {p.iteration: planned(config, p.plan, prepared.problem) for p in prepared.plans}
    begin_to_load_for(config.cluster)
    with prefect_server(folder):
        keep_identity(folder, prepared)
        prepared.keep_rows(folder)
        view = RunView(prepared, folder, expected)
        try:
            await view.begin()
            async with watched_orders(folder, flow_run.id, view.say) as orders:
                restarts = Restarts(folder, config.runtime.max_restarts)
                attempts = Attempts(prepared, folder, blocks, view, orders, restarts)
                by_worker = bool(os.environ.get("PREFECT__FLOW_RUN_ID"))
                with patient(lambda: patience_s(orders)) if by_worker else nullcontext():
                    order = await attempts.run(rebuilds)
            return await _end(order, orders, prepared, folder, view)
        finally:
            await view.close()
            await view.api.part()


def patience_s(orders: Orders) -> float:
    """Seconds from the SIGTERM of a worker of Prefect's until it takes effect.

    A worker cancels a flow run by SIGTERM. The run also gets this as an order, before or after the signal. A run that
    should end at its next commit gets some time to reach it.
    """
    return NEXT_COMMIT_S if orders.wanted in ENDINGS and orders.wanted is not Order.END else NOTICED_S


async def _end(
    order: Order, orders: Orders, prepared: Prepared, folder: Path, view: RunView
) -> dict[str, Any] | State[Any]:
    """End a run as it was ordered: its summary, or its state."""
    if order is Order.LEAVE:
        await leave_to_prefect(flow_run.id, newest_step(folder) or 0, orders.left)
    if order is Order.CANCEL:
        return Cancelled(message=f"at commit {newest_step(folder) or 0}; {orders.why}")
    view.finishing()
    await view.end()  # first: the summary says what Prefect does not show
    summary = await asyncio.to_thread(_finish, folder, prepared, view.replanning, view.api)
    if (scores := summary.get("scores")) is not None:
        await view.api.show(lambda: artifacts.show_scores(scores))
    compared = summary["planned_and_measured"]
    await view.api.show(lambda: artifacts.show_planned_and_measured(compared))
    if missing := view.api.missing():
        view.say(
            f"Prefect does not show all of the run, which continued without the server for {missing['away_s']} s: "
            f"{folder / SUMMARY} has the rest"
        )
    view.finished()
    return summary


class Restarts:
    """The count of attempts and rebuilds since the newest commit, which `runtime.max_restarts` bounds, also across
    processes of one flow run that Prefect starts again: the run folder has it."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most

    def begin(self, started_again: bool) -> int:
        """Count a process that takes the run up. Returns the count. Raises RunFailed when it is one too many.

        started_again  by Prefect: its process before was killed, or left
        """
        if not started_again:
            self.forget()
        count = self._so_far() + 1 if started_again else 0
        self.count(count, "its process has ended")
        return count

    def count(self, count: int, why: str) -> None:
        """Write down that an attempt begins. Raises RunFailed when it is one too many."""
        if count > self._most:
            self.forget()
            raise RunFailed(
                f"{why} (after runtime.max_restarts={self._most} restarts without a commit in between). Resume to "
                "continue from the last commit."
            )
        record = {"step": newest_step(self._folder), "rebuilds": count}
        replace_file(self._folder / RESTARTS, json.dumps(record) + "\n")

    def forget(self) -> None:
        """Delete the count, so that the next process begins at 0."""
        (self._folder / RESTARTS).unlink(missing_ok=True)

    def _so_far(self) -> int:
        """The count so far; -1 if the process before this one has ended properly, 0 for a damaged record."""
        path = self._folder / RESTARTS
        if not path.exists():
            return -1
        try:
            with reading(path, "no count of restarts"):
                record = read_json(path)
                return int(record["rebuilds"]) if record["step"] == newest_step(self._folder) else 0
        except ConfigError:
            return 0


class Attempts:
    """The attempts of a run, one after the other. When a controller or a scheduler is lost, or devices were released,
    the next attempt continues from the last commit.

    Attempts that end without a commit are counted together with rebuilds.

    blocks  Prefect Secret block that rewards name -> its value
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: Path,
        blocks: Mapping[str, str],
        view: RunView,
        orders: Orders,
        restarts: Restarts,
    ) -> None:
        self._prepared, self._folder, self._blocks = prepared, folder, dict(blocks)
        self._view, self._orders, self._restarts = view, orders, restarts

    async def run(self, rebuilds: int) -> Order:
        """Until the run has reached its last iteration (CONTINUE, or STOP before that), or ends for another order.

        rebuilds  how many there were since the last commit, before this process
        """
        again = False
        while True:
            try:
                result = await self._attempt(rebuilds, again)
            except ControllerLost as lost:
                wanted = self._orders.wanted
                if wanted is Order.END:
                    raise Abort(self._orders.why) from None
                if wanted in ENDINGS and (wanted is not Order.STOP or newest_step(self._folder)):
                    return wanted  # which is at the last commit: nothing is gained by another attempt
                rebuilds, again = lost.rebuilds + 1, True
                self._restarts.count(rebuilds, str(lost))
                self._view.say(f"{lost}: a new attempt begins at the last commit")
                continue
            if result.order is Order.RELEASE:
                order = await self._orders.released()
                if order is Order.CONTINUE or (order is Order.STOP and not newest_step(self._folder)):
                    rebuilds, again = 0, False
                    self._restarts.count(rebuilds, "")
                    continue
                if self._orders.wanted is Order.END:
                    raise Abort(self._orders.why)
            self._restarts.forget()
            return self._orders.wanted if result.order is Order.RELEASE else result.order

    async def _attempt(self, rebuilds: int, again: bool) -> TrainingResult:
        prepared, config, view = self._prepared, self._prepared.config, self._view
        view.starting()
        await view.between_attempts()
        present = view.replanning.present
        needs = view.replanning.expected[present.iteration].needs
        with entering("cluster", cluster_of(config, self._folder, needs, again), view.say) as cluster:
            while True:  # attempts on one cluster, each with a plan of its own
                view.loading()
                present = view.replanning.present
                expected = view.replanning.expected[present.iteration]
                spec = RunSpec(
                    run=self._folder.name,
                    plan=present.plan,
                    config=config.model_dump(mode="json"),
                    run_folder=str(self._folder),
                    iterations=prepared.iterations,
                    limits=config.limits,
                    rebuilds=rebuilds,
                    predicted_s=expected.price.longest_s,
                    users_s=users_seconds(config, present.plan, len(prepared.held_out.get(HELD_OUT, ()))),
                    peak_flops_per_s=expected.peak_flops_per_s,
                    blocks=self._blocks,
                )
                result = await run_training(
                    spec,
                    cluster,
                    on_commit=view.on_commit,
                    on_event=view.on_event,
                    api=view.api,
                    orders=self._orders,
                )
                if not result.again:
                    return result
                if self._orders.wanted in (Order.RELEASE, Order.LEAVE, Order.CANCEL):
                    self._orders.hold(result.committed_step)
                    return replace(result, order=self._orders.wanted)
                rebuilds = result.rebuilds
                await view.between_attempts()


@contextmanager
def cluster_of(
    config: RunConfig,
    folder: Path,
    needs: Mapping[int, float] | None = None,
    again: bool = False,
) -> Iterator[DaskCluster]:
    """The cluster that a configuration names, or one of our own on this machine.

    again  this process has lost it
    needs  rank -> bytes of tensors by the plan, which a cluster found by address must have room for
    """
    place = config.cluster
    if place.address is not None:
        with found_cluster(
            place.address,
            place.n_devices,
            folder=folder,
            devices_per_host=place.per_host,
            deadline_s=config.runtime.startup_s,
            assumed=None if config.planning.device else hardware_of(config).classes.profile(0),
            needs=needs,
            again=again,
        ) as cluster:
            yield cluster
    else:
        gpus = gpus_here()
        if 0 < len(gpus) < place.n_devices:
            raise ClusterError(
                f"cluster.n_hosts={place.n_hosts} x devices_per_host={place.per_host} are {place.n_devices} "
                f"ranks; this machine has {len(gpus)} visible GPUs ({', '.join(gpus)}). Ask for fewer, or name a "
                "larger cluster by cluster.address."
            )
        with local_cluster(
            place.n_devices,
            gpus=gpus,
            folder=folder / "scratch",
            deadline_s=config.runtime.startup_s,
        ) as cluster:
            yield cluster


def _finish(folder: Path, prepared: Prepared, replanning: Replanning, api: PrefectApi) -> dict[str, Any]:
    """Export the trained model and write `summary.json`."""
    metrics, lineage = read_jsonl(folder / METRICS), read_jsonl(folder / LINEAGE)
    summary = run_figures(replanning.plans, lineage)
    last, rows = rows_by_plan(replanning.plans, lineage)[-1]
    expected = replanning.expected[last.iteration]
    summary["planned_and_measured"] = planned_and_measured(last.plan, expected, rows)
    keep_drift(last.plan, expected, summary["planned_and_measured"])
    summary["run"] = folder.name
    summary["metrics"] = metrics[-1] if metrics else {}
    trained = [role for role, placed in prepared.plan.roles.items() if placed.trained]
    if trained:
        commit, _ = commit_to_export(folder, prepared.config)
        assert commit is not None, "a finished run has a commit"
        model, role = folder / "model", "actor" if "actor" in trained else trained[0]
        if _exported_step(folder) != commit.step:  # a run that was stopped may have continued
            shutil.rmtree(model, ignore_errors=True)
            reach(Point.EXPORT)
            _export(commit.folder, prepared, role, model)
            reach(Point.EXPORTED)
        by_now = replace(prepared, changes=replanning.plans[1:])
        card = model_card(by_now, folder.name, role, metrics_of_step(metrics, commit.step))
        (model / "README.md").write_text(card, encoding="utf-8")
        summary |= {"model": str(model), "model_step": commit.step}
    if isinstance(prepared.config, OnePass):
        summary["scores"] = mean_scores(folder, prepared.config.samples(len(prepared.rows)))
    if missing := api.missing():
        summary["prefect"] = missing
    text = json.dumps(summary, indent=2)
    replace_file(folder / SUMMARY, text + "\n")
    return summary


def _exported_step(folder: Path) -> int | None:
    """The step of the commit that the run's model was exported from; None if it is not recorded."""
    with suppress(ConfigError):
        return read_json(folder / SUMMARY).get("model_step")
    return None


def _export(commit: Path, prepared: Prepared, role: str, model: Path) -> None:
    """Write the trained model. Raises RunFailed, with bytes needed and free, when the disk is full."""
    try:
        in_fork(EXPORT, commit, prepared.config.model_dump(mode="json"), role, model)
    except Exception as error:  # safetensors has an error of its own
        full = full_disk(error, model.parent, prepared.disk.export_bytes)
        if full is None:
            raise
        raise RunFailed(f"the model could not be written, all iterations are committed. {full}") from error


def flow_run_name() -> str:
    """`ppo/<run>`, from the parameters of the flow run that asks."""
    parameters = flow_run.parameters or {}
    config, folder = parameters.get("config"), parameters.get("run_folder")
    name = Path(folder).name if folder else getattr(config, "name", None) or flow_run.id[:8]
    return f"{flow_run.flow_name.removeprefix('rlhf-')}/{name}"
