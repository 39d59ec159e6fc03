"""What a person sees of a run: lines in the terminal, artifacts in the UI."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.logging import get_run_logger

from flows import artifacts
from flows.clocks import spans_of
from flows.events import CommitEvents
from flows.planned import Planned
from flows.prefect_api import PrefectApi
from flows.prepare import Prepared
from flows.replanning import Replanning
from flows.summary import read_jsonl
from flows.terminal import RunProgress, tell
from flows.training import RunControl
from rlhf_tasks.config import MADE_PLANS, AnyConfig
from rlhf_tasks.journals import ITERATION_S, METRICS, MetricsLines, lineage_lines
from rlhf_tasks.protocol.scheduled_plans import plan_at
from rlhf_tasks.samples_folder import SAMPLES
from rlhf_tasks.spec import NodeResult
from rlhf_tasks.transport import Committed, Enterable, Faulted, IterationRan, PlanChanged, PlanKept

DRAWN_S = 40.0  # for what is drawn first, on a core that others use too
REFRESH_S = 20.0  # between two drawings of curves and timeline: each costs about a second of a core
TIMELINE_ITERATIONS = 3  # more would be too fine to read


class RunView:
    """What a person sees of a run: lines in the terminal, artifacts in the UI."""

    def __init__(self, prepared: Prepared, folder: Path, expected: Mapping[int, Planned]) -> None:
        self._prepared, self._folder = prepared, folder
        self._progress: UUID | None = None
        self.api = PrefectApi(folder.name)
        self._events = CommitEvents(folder.name, self.api)
        self._lines = MetricsLines(expected[0].peak_flops_per_s)
        # Lineage of the newest iterations of one plan. A long run's journal is too large to read again and again.
        self._shown = prepared.plan
        self._recent: deque[dict[str, Any]] = deque()
        self.replanning = Replanning(
            prepared.config, folder, prepared.plans, expected, prepared.iterations, self.say
        )
        self._drawn_s = 0.0
        self._loaded = False
        self._terminal = RunProgress(folder.name, prepared.iterations, self.say)

    async def begin(self) -> None:
        """Show the plan and an empty progress bar, and tag the flow run."""
        api, prepared = self.api, self._prepared
        await api.show(lambda: artifacts.tag_flow_run(run_tags(prepared.config)))
        await api.show(lambda: artifacts.show_plan(prepared.plans[-1].plan), DRAWN_S)
        await self._show_progress(0)

    def on_event(self, event: Any) -> None:
        """What the terminal shows, at once: hooks that wait for the Prefect server may lag behind."""
        match event:
            case Enterable() if not self._loaded:
                self._loaded = True
                self._terminal.begin_phase("first iteration")
            case IterationRan(iteration=iteration, metrics=metrics):
                self._terminal.ran(iteration, metrics[ITERATION_S] or 0.0, metrics)
            case Committed(iteration=iteration):
                self._terminal.committed(iteration + 1)
            case Faulted(cause=cause, generation=generation):
                self.say(f"generation {generation} has ended: {cause}. Rebuilding the ranks.")

    async def on_commit(self, committed: Committed, control: RunControl) -> None:
        """After each commit: an event and the bar in the UI; curves and timeline every so often."""
        now = time.monotonic()
        results = by_rank(committed)
        metrics = json.loads(self._lines.line(committed.iteration, results))
        rows = list(map(json.loads, lineage_lines(committed.iteration, results)))
        self._keep_recent(committed.iteration, rows)
        done = committed.iteration + 1
        await self._events.tell(committed.iteration, metrics)
        await self._show_progress(done)
        if now - self._drawn_s > REFRESH_S:
            self._drawn_s = now
            await self._draw()
        if self._prepared.config.replan == "auto":
            await self.replanning.on_commit(committed.iteration, rows, control)

    async def on_plan(self, change: PlanChanged | PlanKept) -> None:
        """What came of a change of the plan: a line, and the new plan in the UI."""
        if isinstance(change, PlanKept):
            self.say(f"the plan stays: {change.reason}")
            return
        await self.replanning.changed(change.planned)
        self.say(f"a new plan from iteration {change.planned.iteration + 1} on")
        await self.api.show(lambda: artifacts.show_plan(change.planned.plan), DRAWN_S)

    def say(self, line: str) -> None:
        """A line in the terminal and in the flow run's log."""
        get_run_logger().info(line)
        tell(f"{self._folder.name}: {line}")

    def _keep_recent(self, iteration: int, rows: list[dict[str, Any]]) -> None:
        plan = plan_at(self.replanning.plans, iteration).plan
        if plan is not self._shown:
            self._shown = plan
            self._recent.clear()
        self._recent.extend(rows)
        while len(self._recent) > TIMELINE_ITERATIONS * len(plan.nodes):
            self._recent.popleft()

    def starting(self) -> None:
        """An attempt begins: there is no cluster yet, or none any more."""
        self._terminal.close()

    def loading(self) -> None:
        """The cluster is there, its ranks load the models."""
        self._loaded = False
        self._terminal.begin_phase("models")

    def finishing(self) -> None:
        """The last commit is written: what is left is to export the model."""
        self._terminal.begin_phase("model and summary")

    def finished(self) -> None:
        """All is done."""
        self._terminal.end_phase()

    async def close(self) -> None:
        """End what moves in the terminal, and a search for a plan that is under way."""
        self._terminal.close()
        await self.replanning.close()

    async def _show_progress(self, done: int) -> None:
        """The bar, which is made as soon as Prefect takes it."""
        known, total = self._progress, self._prepared.iterations
        if known is None:
            known = self._progress = await self.api.show(lambda: artifacts.start_progress(total))
        if known is not None and done:
            await self.api.show(lambda: artifacts.show_progress(known, done, total))

    async def end(self) -> None:
        """Show everything in its final state."""
        await self._draw()

    async def _draw(self) -> None:
        metrics = await asyncio.to_thread(read_jsonl, self._folder / METRICS)
        await self.api.show(lambda: artifacts.show_curves(metrics), DRAWN_S)
        await self.api.show(lambda: artifacts.show_timeline(spans_of(self._shown, self._recent)), DRAWN_S)
        samples = await asyncio.to_thread(latest_samples, self._folder)
        await self.api.show(lambda: artifacts.show_completions(samples))


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


def run_tags(config: AnyConfig) -> list[str]:
    """`algo:`, `model:` and `plan:`, by which runs are found in the UI."""
    folder = Path(config.roles()[next(iter(config.roles()))].folder)
    model = (
        folder.parent.name if folder.name == "model" else folder.name
    )  # a run leaves its model as RUN/model
    plan = config.plan if config.plan in MADE_PLANS else "manual"
    return [f"algo:{config.type.replace('_', '-')}", f"model:{model}", f"plan:{plan}"]
