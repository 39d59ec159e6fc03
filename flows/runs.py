"""One run from its configuration to its summary: what every algorithm's flow does."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from rich.console import Console

from flows import artifacts
from flows.clocks import spans_of
from flows.cluster import Cluster, ClusterError, found_cluster, local_cluster
from flows.ending import ending_in_time
from flows.events import CommitEvents
from flows.model_card import model_card
from flows.planned import Planned, keep_drift, planned, planned_and_measured
from flows.planning import hardware_of
from flows.prepare import Prepared, prepare
from flows.replanning import Replanning
from flows.run_folder import open_run, run_folder_of, taken
from flows.server import prefect_server
from flows.summary import read_jsonl, rows_by_plan, run_figures
from flows.this_machine import gpus_here
from flows.training import RunControl, run_training
from rlhf_tasks.checkpoint import latest_commit
from rlhf_tasks.config import MADE_PLANS, AnyConfig, ConfigError
from rlhf_tasks.durable import replace_file
from rlhf_tasks.journals import LINEAGE, METRICS, MetricsLines, lineage_lines
from rlhf_tasks.plan_log import PLAN
from rlhf_tasks.protocol.scheduled_plans import plan_at
from rlhf_tasks.samples_folder import SAMPLES
from rlhf_tasks.spec import NodeResult
from rlhf_tasks.transport import Committed, PlanChanged, PlanKept

REFRESH_S = 20.0  # between two drawings of curves and timeline: each costs about a second of a core
TIMELINE_ITERATIONS = 3  # more would be too fine to read
SHOWN_METRICS = ("reward", "rewards/exact/mean", "kl", "accuracy", "loss/sft", "loss/policy", "loss/value")

console = Console()


async def carry_out(
    algorithm: str, config: AnyConfig | None, run_folder: str | None = None
) -> dict[str, Any]:
    """Run a configuration to its end, or go on from the last commit in `run_folder`; gives the summary.

    algorithm  the type of configuration that the flow carries out

    Called inside a flow. Relative paths mean the flow's folder. Raises ConfigError for what the user can mend,
    RunFailed for what happened on the way.
    """
    folder, config = open_run(config, run_folder)
    if config.type != algorithm:
        raise ConfigError(
            f"{folder} is a run of type {config.type!r}, and this flow carries out {algorithm!r}. Go on with it by "
            f"prefect-rlhf run {config.type.replace('_', '-')} --resume {folder}, or name another folder."
        )
    prepared = prepare(config, folder)
    for warning in prepared.warnings:
        get_run_logger().warning(warning)
    expected = {p.iteration: planned(config, p.plan) for p in prepared.plans}
    with (
        run_folder_of(config, folder) as folder,
        ending_in_time(asyncio.current_task()),
        taken(folder),
        prefect_server(folder) as server,
        cluster_of(config, folder, server.environment, expected[0].needs) as cluster,
    ):
        _keep_identity(folder, prepared)
        view = RunView(prepared, folder, expected)
        await view.begin()
        try:
            await run_training(
                prepared.plan,
                config.model_dump(mode="json"),
                cluster,
                run=folder.name,
                run_folder=folder,
                iterations=prepared.iterations,
                on_commit=view.on_commit,
                on_plan=view.on_plan,
                changes=[
                    p.model_copy(update={"predicted_s": expected[p.iteration].price.duration_s})
                    for p in prepared.changes
                ],
                snapshot_every=config.snapshot_every,
                deadline_factor=config.runtime.deadline_factor,
                deadline_floor_s=config.runtime.deadline_floor_s,
                max_rebuilds=config.runtime.max_restarts,
                predicted_s=expected[0].price.duration_s,
                peak_flops_per_s=expected[0].peak_flops_per_s,
            )
        finally:
            await view.replanning.close()
        await view.end()
        summary = await asyncio.to_thread(_finish, folder, prepared, view.replanning)
        await artifacts.show_planned_and_measured(summary["planned_and_measured"])
    return summary


@contextmanager
def cluster_of(
    config: AnyConfig, folder: Path, environment: dict[str, str], needs: Mapping[int, float] | None = None
) -> Iterator[Cluster]:
    """The cluster that a configuration names, or one of our own on this machine.

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


class RunView:
    """What a person sees of a run: lines in the terminal, artifacts in the UI."""

    def __init__(self, prepared: Prepared, folder: Path, expected: Mapping[int, Planned]) -> None:
        self._prepared, self._folder = prepared, folder
        self._progress: UUID | None = None
        self._events = CommitEvents(folder.name)
        self._lines = MetricsLines(expected[0].peak_flops_per_s)
        # Lineage of the newest iterations of one plan. A long run's journal is too large to read again and again.
        self._shown = prepared.plan
        self._recent: deque[dict[str, Any]] = deque()
        self.replanning = Replanning(
            prepared.config, folder, prepared.plans, expected, prepared.iterations, self._say
        )
        self._drawn_s = 0.0
        self._last_s = time.monotonic()

    async def begin(self) -> None:
        """Show the plan and an empty progress bar, and tag the flow run."""
        await artifacts.tag_flow_run(run_tags(self._prepared.config))
        await artifacts.show_plan(self._prepared.plans[-1].plan)
        self._progress = await artifacts.start_progress(self._prepared.iterations)

    async def on_commit(self, committed: Committed, control: RunControl) -> None:
        """After each commit: a line and the bar; curves and timeline every so often."""
        now = time.monotonic()
        results = by_rank(committed)
        metrics = json.loads(self._lines.line(committed.iteration, results))
        rows = list(map(json.loads, lineage_lines(committed.iteration, results)))
        self._keep_recent(committed.iteration, rows)
        done = committed.iteration + 1
        figures = [f"{name} {metrics[name]:.3f}" for name in SHOWN_METRICS if metrics.get(name) is not None]
        head = f"iteration {done} of {self._prepared.iterations}, {now - self._last_s:.1f} s"
        self._say(", ".join([head, *figures]))
        self._last_s = now
        await self._events.tell(committed.iteration, metrics)
        assert self._progress is not None
        await artifacts.show_progress(self._progress, done, self._prepared.iterations)
        if now - self._drawn_s > REFRESH_S:
            self._drawn_s = now
            await self._draw()
        if self._prepared.config.replan == "auto":
            await self.replanning.on_commit(committed.iteration, rows, control)

    async def on_plan(self, change: PlanChanged | PlanKept) -> None:
        """What came of a change of the plan: a line, and the new plan in the UI."""
        if isinstance(change, PlanKept):
            self._say(f"the plan stays: {change.reason}")
            return
        await self.replanning.changed(change.planned)
        self._say(f"a new plan from iteration {change.planned.iteration + 1} on")
        await artifacts.show_plan(change.planned.plan)

    def _say(self, line: str) -> None:
        get_run_logger().info(line)
        console.print(f"{self._folder.name}: {line}", highlight=False, soft_wrap=True)

    def _keep_recent(self, iteration: int, rows: list[dict[str, Any]]) -> None:
        plan = plan_at(self.replanning.plans, iteration).plan
        if plan is not self._shown:
            self._shown = plan
            self._recent.clear()
        self._recent.extend(rows)
        while len(self._recent) > TIMELINE_ITERATIONS * len(plan.nodes):
            self._recent.popleft()

    async def end(self) -> None:
        """Show everything in its final state."""
        await self._draw()

    async def _draw(self) -> None:
        await artifacts.show_curves(await asyncio.to_thread(read_jsonl, self._folder / METRICS))
        await artifacts.show_timeline(spans_of(self._shown, self._recent))
        await artifacts.show_completions(await asyncio.to_thread(latest_samples, self._folder))


def by_rank(committed: Committed) -> dict[str, dict[int, NodeResult]]:
    """Node -> rank -> result, as the journals have it."""
    return {node: {result.rank: result for result in ranks} for node, ranks in committed.results.items()}


def latest_samples(folder: Path, count: int = 8) -> list[dict[str, Any]]:
    """A few of the samples that the last iteration wrote."""
    files = sorted((folder / SAMPLES).glob("*.jsonl"))
    if not files:
        return []
    shown = ("prompt", "completion", "score", "rewards", "reward_model", "truncated")
    return [{name: row[name] for name in shown} for row in read_jsonl(files[-1])[:count]]


def _finish(folder: Path, prepared: Prepared, replanning: Replanning) -> dict[str, Any]:
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
        from rlhf_tasks.export import export_commit  # torch, which a flow process needs for nothing else

        commit, _ = latest_commit(folder)
        assert commit is not None, "a finished run has a commit"
        model, role = folder / "model", "actor" if "actor" in trained else trained[0]
        if not model.exists():
            export_commit(commit.folder, prepared.config, role, model)
        by_now = replace(prepared, changes=replanning.plans[1:])
        card = model_card(by_now, folder.name, role, summary["metrics"])
        (model / "README.md").write_text(card, encoding="utf-8")
        summary["model"] = str(model)
    text = json.dumps(summary, indent=2)
    replace_file(folder / "summary.json", text + "\n")
    return summary


def _keep_identity(folder: Path, prepared: Prepared) -> None:
    """Write the plan and the data's digest down; a resumed run must find its data unchanged."""
    identity = folder / "data.sha256"
    if identity.exists() and identity.read_text() != prepared.data_digest:
        raise ConfigError(
            f"{prepared.config.data.train} has changed since {folder} began. Put the data back, or start a new run."
        )
    replace_file(identity, prepared.data_digest)
    replace_file(folder / PLAN, prepared.plan.model_dump_json(indent=1))


def run_tags(config: AnyConfig) -> list[str]:
    """`algo:`, `model:` and `plan:`, by which runs are found in the UI."""
    folder = Path(config.roles()[next(iter(config.roles()))].folder)
    model = (
        folder.parent.name if folder.name == "model" else folder.name
    )  # a run leaves its model as RUN/model
    plan = config.plan if config.plan in MADE_PLANS else "manual"
    return [f"algo:{config.type.replace('_', '-')}", f"model:{model}", f"plan:{plan}"]


def flow_run_name() -> str:
    """`ppo/<run>`, from the parameters of the flow run that asks."""
    parameters = flow_run.parameters or {}
    config, folder = parameters.get("config"), parameters.get("run_folder")
    name = Path(folder).name if folder else getattr(config, "name", None) or flow_run.id[:8]
    return f"{flow_run.flow_name.removeprefix('rlhf-')}/{name}"
