"""One run from its configuration to its summary: what every algorithm's flow does."""

import asyncio
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect.exceptions import Abort
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, State

from flows import artifacts
from flows.cluster import Cluster, ClusterError, found_cluster, local_cluster
from flows.disk_room import full_disk
from flows.ending import ending_in_time
from flows.model_card import model_card
from flows.orders import Order, Orders, leave_to_prefect, watched_orders
from flows.planned import keep_drift, planned, planned_and_measured
from flows.planning import hardware_of
from flows.prefect_api import PrefectApi
from flows.prepare import Prepared, prepare
from flows.replanning import Replanning
from flows.run_folder import open_run, remember_folder, run_folder_of, taken
from flows.run_identity import keep_identity, refuse_changes
from flows.run_view import RunView
from flows.secret_blocks import secret_blocks
from flows.server import prefect_server
from flows.summary import read_jsonl, rows_by_plan, run_figures
from flows.terminal import entering
from flows.this_machine import gpus_here
from flows.training import ControllerLost, RunFailed, TrainingResult, run_training
from rlhf_tasks.checkpoint import latest_commit, newest_step
from rlhf_tasks.config import AnyConfig, ConfigError
from rlhf_tasks.durable import replace_file
from rlhf_tasks.failpoints import Point, reach
from rlhf_tasks.journals import LINEAGE, METRICS
from rlhf_tasks.plan_log import logged_changes

SUMMARY = "summary.json"
RESTARTS = "restarts.json"
ENDS_S = 600.0  # what the process before may take to end where Prefect starts a flow run again


async def carry_out(
    algorithm: str, config: AnyConfig | None, run_folder: str | None = None
) -> dict[str, Any] | State[Any]:
    """Run a configuration to its end, or go on from the last commit in `run_folder`; gives the summary, or the state
    of a run that is cancelled.

    algorithm  the type of configuration that the flow carries out

    Called inside a flow. Relative paths mean the flow's folder. Raises ConfigError for what the user can mend,
    RunFailed for what happened on the way, and Prefect's signals where the flow run is suspended or was ended.
    """
    started_again = (flow_run.run_count or 1) > 1
    folder, config = open_run(config, run_folder, flow_run.id)
    if config.type != algorithm:
        raise ConfigError(
            f"{folder} is a run of type {config.type!r}, and this flow carries out {algorithm!r}. Go on with it by "
            f"prefect-rlhf run {config.type.replace('_', '-')} --resume {folder}, or name another folder."
        )
    prepared = prepare(config, folder)
    if folder is not None:
        refuse_changes(folder, prepared)
    for warning in prepared.warnings:
        get_run_logger().warning(warning)
    expected = {p.iteration: planned(config, p.plan) for p in prepared.plans}
    with (
        run_folder_of(config, folder) as folder,
        ending_in_time(asyncio.current_task()),
        taken(folder, ENDS_S if started_again else 0.0),
        prefect_server(folder) as server,
    ):
        remember_folder(folder, flow_run.id)
        keep_identity(folder, prepared)
        view = RunView(prepared, folder, expected)
        try:
            await view.begin()
            async with watched_orders(folder, flow_run.id, view.say) as orders:
                order = await Attempts(prepared, folder, server.environment, view, orders).run(started_again)
            if order is Order.LEAVE:
                await leave_to_prefect(flow_run.id, newest_step(folder) or 0)
            if order is Order.CANCEL:
                return Cancelled(message=f"at commit {newest_step(folder) or 0}; {orders.why}")
            view.finishing()
            summary = await asyncio.to_thread(_finish, folder, prepared, view.replanning, view.api)
            await view.end()
            compared = summary["planned_and_measured"]
            await view.api.show(lambda: artifacts.show_planned_and_measured(compared))
            if missing := view.api.missing():
                view.say(
                    f"Prefect's server was away for {missing['away_s']} s of the run, which went on without it; what "
                    f"it does not show stands in {folder / SUMMARY}"
                )
            view.finished()
        finally:
            await view.close()
    return summary


class Attempts:
    """The attempts of a run, one after the other: where a controller or a scheduler is lost, and where devices were
    released, the next one goes on from the last commit.

    Attempts that end without a commit are counted together with rebuilds, also across processes of one flow run that
    Prefect starts again.
    """

    def __init__(
        self, prepared: Prepared, folder: Path, environment: dict[str, str], view: RunView, orders: Orders
    ) -> None:
        self._prepared, self._folder, self._environment = prepared, folder, environment
        self._view, self._orders = view, orders

    async def run(self, started_again: bool) -> Order:
        """Until the run has reached its last iteration (GO_ON, or STOP before that), or ends for another order.

        started_again  by Prefect: its process before was killed, or left
        """
        if not started_again:
            self._forget()
        rebuilds, again = self._rebuilds() + 1 if started_again else 0, False
        why = "its process has ended"
        while True:
            self._count(rebuilds, why)
            try:
                result = await self._attempt(rebuilds, again)
            except ControllerLost as lost:
                rebuilds, again, why = lost.rebuilds + 1, True, str(lost)
                self._view.say(f"{lost}: a new attempt begins at the last commit")
                continue
            if result.order is Order.RELEASE:
                order = await self._orders.released()
                if order is Order.GO_ON or (order is Order.STOP and not newest_step(self._folder)):
                    rebuilds, again = 0, False
                    continue
                if self._orders.wanted is Order.END:
                    raise Abort(self._orders.why)
            self._forget()
            return self._orders.wanted if result.order is Order.RELEASE else result.order

    async def _attempt(self, rebuilds: int, again: bool) -> TrainingResult:
        prepared, config, view = self._prepared, self._prepared.config, self._view
        for change in logged_changes(self._folder)[len(view.replanning.plans) - 1 :]:
            await view.replanning.changed(change)  # written down, but not told before its controller was lost
        expected, blocks = view.replanning.expected, await secret_blocks(config)
        view.starting()
        cluster_context = cluster_of(config, self._folder, self._environment, expected[0].needs, again)
        with entering("cluster", cluster_context, view.say) as cluster:
            view.loading()
            return await run_training(
                prepared.plan,
                config.model_dump(mode="json"),
                cluster,
                run=self._folder.name,
                run_folder=self._folder,
                iterations=prepared.iterations,
                on_commit=view.on_commit,
                on_plan=view.on_plan,
                on_event=view.on_event,
                api=view.api,
                orders=self._orders,
                changes=[
                    p.model_copy(update={"predicted_s": expected[p.iteration].price.duration_s})
                    for p in view.replanning.plans[1:]
                ],
                snapshot_every=config.snapshot_every,
                deadline_factor=config.runtime.deadline_factor,
                deadline_floor_s=config.runtime.deadline_floor_s,
                max_rebuilds=config.runtime.max_restarts,
                rebuilds=rebuilds,
                predicted_s=expected[0].price.duration_s,
                peak_flops_per_s=expected[0].peak_flops_per_s,
                blocks=blocks,
            )

    def _count(self, rebuilds: int, why: str) -> None:
        """Write down that an attempt begins. Raises RunFailed when it is one too many."""
        most = self._prepared.config.runtime.max_restarts
        if rebuilds > most:
            self._forget()
            raise RunFailed(
                f"{why} (after runtime.max_restarts={most} restarts without a commit in between). Resume to go on "
                "from the last commit."
            )
        record = {"step": newest_step(self._folder), "rebuilds": rebuilds}
        replace_file(self._folder / RESTARTS, json.dumps(record) + "\n")

    def _rebuilds(self) -> int:
        """How many there were since the newest commit, as far as it is written down; -1 where the process before this
        one has left in order."""
        try:
            record = json.loads((self._folder / RESTARTS).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return -1
        return record["rebuilds"] if record["step"] == newest_step(self._folder) else 0

    def _forget(self) -> None:
        (self._folder / RESTARTS).unlink(missing_ok=True)


@contextmanager
def cluster_of(
    config: AnyConfig,
    folder: Path,
    environment: dict[str, str],
    needs: Mapping[int, float] | None = None,
    again: bool = False,
) -> Iterator[Cluster]:
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
            devices_per_host=place.devices_per_host,
            environment=environment,
            deadline_s=config.runtime.startup_timeout_s,
            assumed=None if config.planning.device else hardware_of(config).classes.profile(0),
            needs=needs,
            again=again,
        ) as cluster:
            yield cluster
    else:
        n_gpus = gpus_here()
        if 0 < n_gpus < place.n_devices:
            raise ClusterError(
                f"cluster.n_hosts={place.n_hosts} x devices_per_host={place.devices_per_host} are {place.n_devices} "
                f"ranks; this machine has {n_gpus} GPUs. Ask for fewer, or name a larger cluster by cluster.address."
            )
        with local_cluster(
            place.n_devices,
            environment,
            gpus=n_gpus > 0,
            folder=folder / "scratch",
            deadline_s=config.runtime.startup_timeout_s,
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
        commit, _ = latest_commit(folder)
        assert commit is not None, "a finished run has a commit"
        model, role = folder / "model", "actor" if "actor" in trained else trained[0]
        if _exported_step(folder) != commit.step:  # a run that was stopped may have gone on
            shutil.rmtree(model, ignore_errors=True)
            reach(Point.EXPORT)
            _export(commit.folder, prepared, role, model)
            reach(Point.EXPORTED)
        by_now = replace(prepared, changes=replanning.plans[1:])
        card = model_card(by_now, folder.name, role, summary["metrics"])
        (model / "README.md").write_text(card, encoding="utf-8")
        summary["model"] = str(model)
    if missing := api.missing():
        summary["prefect"] = missing
    text = json.dumps(summary, indent=2)
    replace_file(folder / SUMMARY, text + "\n")
    return summary


def _exported_step(folder: Path) -> int | None:
    """How many iterations had been committed when the run's model was exported; None where it was not."""
    try:
        return json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["iterations"]
    except FileNotFoundError:
        return None


def _export(commit: Path, prepared: Prepared, role: str, model: Path) -> None:
    """Write the trained model. Raises RunFailed, with bytes needed and free, when the disk is full."""
    from rlhf_tasks.export import export_commit  # torch, which a flow process needs for nothing else

    try:
        export_commit(commit, prepared.config, role, model)
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
