"""What a person sees of a run: lines in the terminal, artifacts in the UI.

Prefect's server delays no commit: `on_event` notes what is new, and one task writes the newest of it. The notes do
not grow with the lag.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.logging import get_run_logger

from prefect_rlhf.flows.run.prepare import Prepared
from prefect_rlhf.flows.run.summary import model_name, read_jsonl
from prefect_rlhf.flows.trackers import Trackers
from prefect_rlhf.flows.view import artifacts
from prefect_rlhf.flows.view.clocks import spans_of
from prefect_rlhf.flows.view.prefect_api import (
    COMPLETE_S,
    GIVE_UP_S,
    Away,
    CommitEvents,
    PrefectApi,
)
from prefect_rlhf.flows.view.terminal import RunProgress, tell
from prefect_rlhf.rlhf_tasks.algorithms.configurations import MADE_PLANS, RunConfig
from prefect_rlhf.rlhf_tasks.checkpoint.commits import newest_step
from prefect_rlhf.rlhf_tasks.checkpoint.dumps import dump_folder, dumps_of
from prefect_rlhf.rlhf_tasks.checkpoint.journals import ITERATION_S, METRICS, MetricsLines, lineage_lines
from prefect_rlhf.rlhf_tasks.config.sampling import OnePass
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    Aborted,
    Committed,
    Enterable,
    Faulted,
    IterationRan,
)
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from prefect_rlhf.rlhf_tasks.user_code.rewards import SAMPLES

DRAWN_S = 40.0  # for a picture that is drawn first, on a core that others use too
REFRESH_S = 20.0  # least time between two drawings of curves and timeline
REST = 30  # seconds without drawing for each second that a drawing took: ranks on CPUs need the same cores
KEPT = 1000  # rows of iterations that no commit covers yet; older ones are drawn when one does
TIMELINE_ITERATIONS = 3  # more would be too fine to read
RETIRE_S = 2.0  # what the last events may take when the run ends early

IN_A_ROW = 5
"""Iterations that must agree: one batch may be all right or all wrong by chance, five with new prompts hardly."""
KL_PER_TOKEN = 0.5
"""Nats: a model that samples at temperature 1 has about 1 nat of entropy per token, so its text has then left the
reference's."""
DRAWN_KL = 0.05
"""Nats. A tiny model in bfloat16 had 1.5e-5, one iteration of staleness with a learning rate of 1e-3 up to 0.01."""
KL_GROWTH = 3.0
"""Of that of the first iteration: a reference that was far away from the start does not explode."""

Row = Mapping[str, float | None]

logger = logging.getLogger(__name__)


class RunView:
    """What a person sees of a run: lines in the terminal, artifacts in the UI.

    peak_flops_per_s  of all devices of the cluster together
    """

    def __init__(self, prepared: Prepared, folder: Path, peak_flops_per_s: float) -> None:
        self._prepared, self._folder = prepared, folder
        self._progress: UUID | None = None
        self.api = PrefectApi(folder.name)
        self._events = CommitEvents(folder.name, self.api)
        self._lines = MetricsLines(peak_flops_per_s)
        # Lineage of the newest iterations of one plan. A long run's journal is too large to read again and again.
        self._shown = prepared.plans[-1].plan
        self._recent: deque[dict[str, Any]] = deque()
        self._committed = newest_step(folder) or 0
        self._complete = self._committed
        self._uncommitted: deque[dict[str, Any]] = deque(maxlen=KEPT)  # rows as the journal will have them
        self._newest: deque[Mapping[str, float | None]] = deque(maxlen=IN_A_ROW)
        self._first: Mapping[str, float | None] | None = None
        self._warned: set[str] = set()
        self._plan_due: ExecutionPlan | None = None
        self._pages: dict[str, UUID] = {}  # key -> of the page that Prefect has, which later ones replace
        self._news = asyncio.Event()
        self._ending = False
        self._showing: asyncio.Task[None] | None = None
        self._draw_from_s = 0.0
        self._loaded = False
        self._terminal = RunProgress(folder.name, prepared.iterations, self.say)
        self._trackers = Trackers(prepared.config, folder, self.say)

    async def begin(self) -> None:
        """Show the plan and an empty progress bar, and tag the flow run."""
        api, prepared = self.api, self._prepared
        await api.show(lambda: artifacts.tag_flow_run(run_tags(prepared.config)))
        await self._show_page(lambda: artifacts.plan_page(prepared.plans[-1].plan))
        await api.show(lambda: artifacts.show_skipped_rows(prepared.rows.skipped))
        await self._show_progress()
        self._showing = asyncio.create_task(self._show_all())

    def on_event(self, event: Any) -> None:
        """News for the terminal, which shows it at once, and for trackers and Prefect, where it may lag."""
        match event:
            case Enterable() if not self._loaded:
                self._loaded = True
                self._terminal.begin_phase("first iteration")
            case IterationRan(iteration=iteration, metrics=metrics):
                self._terminal.iteration_ended(iteration, metrics[ITERATION_S] or 0.0, metrics)
                self._warn(iteration, metrics)
                self._uncommitted.append({**metrics, "iteration": iteration})
                self._reached(iteration + 1)
            case Aborted(iteration=iteration):
                self._reached(min(self._complete, iteration))
            case Committed(iteration=iteration) as committed:
                self._terminal.committed(iteration + 1)
                self._committed = iteration + 1
                results = committed.by_rank()
                self._recent.extend(map(json.loads, lineage_lines(iteration, results)))
                while len(self._recent) > TIMELINE_ITERATIONS * len(self._shown.nodes):
                    self._recent.popleft()
                self._events.tell(iteration, json.loads(self._lines.line(iteration, results)))
                self._trackers.tell(iteration + 1)
                self._reached(max(self._complete, iteration + 1))
            case Faulted(cause=cause, generation=generation):
                self.say(f"generation {generation} has ended: {cause}. Rebuilding the ranks.")

    def _warn(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """Warn, once for each cause, of an anomaly, and if the metrics so far show that the run cannot learn."""
        self._first = self._first or metrics
        self._newest.append(metrics)
        dumps = [str(folder) for folder in dumps_of(self._folder)]
        warned = anomaly_warnings(metrics, iteration, dumps) | learning_warnings(
            self._first, list(self._newest)
        )
        for what, said in warned.items():
            if what not in self._warned:
                self._warned.add(what)
                self.say(f"warning: {said}")

    def _reached(self, complete: int) -> None:
        """Note how many iterations are complete. Rows of undone iterations, and of those in the journal, are
        dropped."""
        self._complete = complete
        rows = (row for row in self._uncommitted if self._committed <= row["iteration"] < complete)
        self._uncommitted = deque(rows, KEPT)
        self._news.set()

    def plan_changed(self, plan: ExecutionPlan) -> None:
        """The next attempt follows another plan."""
        self._shown = self._plan_due = plan
        self._recent.clear()
        self._news.set()

    def say(self, line: str) -> None:
        """A line in the terminal and in the flow run's log."""
        get_run_logger().info(line)
        tell(f"{self._folder.name}: {line}")

    def starting(self) -> None:
        """An attempt begins: there is no cluster yet, or none any more. What was not committed is lost."""
        self._reached(self._committed)
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

    async def end(self) -> None:
        """The run has ended well: show everything in its final state, as long as Prefect takes it."""
        self._ending = True
        self._news.set()
        if self._showing is not None:
            _, late = await asyncio.wait([self._showing], timeout=COMPLETE_S)
            self.api.skipped += len(late)
        await self._stop_showing()
        await self._trackers.close(finished=True)

    async def close(self) -> None:
        """End what moves in the terminal, and what is shown in the UI."""
        self._terminal.close()
        await self._trackers.close(finished=False)
        await self._stop_showing()

    # --- the UI -----------------------------------------------------------------------------------------

    async def _show_all(self) -> None:
        """Write what is new, the newest of its kind, until the run has ended and all is written."""
        while not self._ending:
            await self._news.wait()
            self._news.clear()
            try:
                await self._show_news()
            except Exception:
                logger.exception("showing the run in Prefect has failed; training continues")
        while self._events.due and self.api.outage_s < GIVE_UP_S:
            with suppress(Away):
                await asyncio.sleep(min(self.api.wait_s, 1.0))
                await self._events.send()
        await self._draw()

    async def _show_news(self) -> None:
        plan, self._plan_due = self._plan_due, None
        if plan is not None:
            await self._show_page(lambda: artifacts.plan_page(plan))
        with suppress(Away):
            await self._events.send()
        await self._show_progress()
        began_s = time.monotonic()
        if not self._ending and began_s > self._draw_from_s:
            await self._draw()
            ended_s = time.monotonic()
            self._draw_from_s = max(began_s + REFRESH_S, ended_s + REST * (ended_s - began_s))

    async def _stop_showing(self) -> None:
        """Stop writing to Prefect; only the last events get a moment more."""
        if self._showing is None:
            return
        self._showing.cancel()
        (error,) = await asyncio.gather(self._showing, return_exceptions=True)
        if isinstance(error, Exception):
            logger.error("showing the end of the run in Prefect has failed", exc_info=error)
        self._showing = None
        if not self.api.wait_s:
            with suppress(Away, TimeoutError):
                await asyncio.wait_for(self._events.send(), RETIRE_S)
        self._events.give_up()

    async def _show_progress(self) -> None:
        """The bar, which is made as soon as Prefect takes it."""
        known, total = self._progress, self._prepared.iterations
        if known is None:
            known = self._progress = await self.api.show(lambda: artifacts.start_progress(total))
        complete, committed = self._complete, self._committed
        if known is not None and (complete or committed):
            await self.api.show(lambda: artifacts.show_progress(known, complete, committed, total))

    async def _draw(self) -> None:
        metrics = await asyncio.to_thread(read_jsonl, self._folder / METRICS)
        last = metrics[-1]["iteration"] if metrics else -1
        metrics += [row for row in self._uncommitted if row["iteration"] > last]
        if not isinstance(
            self._prepared.config, OnePass
        ):  # whose iterations are parts of one answer: `show_scores`
            await self._show_page(lambda: artifacts.curves_page(metrics))
        spans = spans_of(self._shown, self._recent)
        await self._show_page(lambda: artifacts.timeline_page(spans))
        samples = await asyncio.to_thread(latest_samples, self._folder)
        await self._show_page(lambda: artifacts.completions_page(samples))

    async def _show_page(self, draw: Callable[[], artifacts.Page | None]) -> None:
        """Draw a page, then show it in place of the one before. A fault of a picture does not count against the
        server."""
        try:
            page = await asyncio.wait_for(asyncio.to_thread(draw), DRAWN_S)
        except Exception:
            logger.exception("a page of the run cannot be drawn; training continues")
            self.api.skipped += 1
            return
        if page is not None:
            known = self._pages.pop(page.key, None)
            shown = await self.api.show(lambda: artifacts.show_page(page, known))
            if shown is not None:
                self._pages[page.key] = shown


def latest_samples(folder: Path, count: int = 8) -> list[dict[str, Any]]:
    """A few of the samples that the last iteration wrote."""
    files = sorted((folder / SAMPLES).glob("*.jsonl"))
    if not files:
        return []
    shown = ("prompt", "completion", "score", "rewards", "reward_model", "truncated", "columns")
    return [{name: row[name] for name in shown} for row in read_jsonl(files[-1])[:count]]


def run_tags(config: RunConfig) -> list[str]:
    """`algo:`, `model:` and `plan:`, by which runs are found in the UI."""
    plan = config.plan if config.plan in MADE_PLANS else "manual"
    return [f"algo:{config.type.replace('_', '-')}", f"model:{model_name(config)}", f"plan:{plan}"]


# --- a run that cannot learn ---


def anomaly_warnings(row: Row, iteration: int, dumps: Sequence[str]) -> dict[str, str]:
    """What is an anomaly (`on_anomaly`) -> a sentence that says so, by an iteration's row, with its dump if there is
    one. dumps: folders of dumps"""
    known = {
        "anomaly/kl": "the KL divergence from the reference is above kl_bound",
        "anomaly/equal_rewards": "all rewards are equal, in equal_rewards_iterations iterations in a row",
    }
    steps = {
        name: f"optimizer steps of {name.partition('/')[2]} had no finite loss or gradient, and were left out"
        for name in row
        if name.startswith("skipped_steps/")
    }

    def replay(name: str) -> str:
        role = name.partition("/")[2] if name in steps else "actor"
        of_call = dump_folder(Path(), role, iteration).name
        folder = next((dump for dump in dumps if Path(dump).name == of_call), "")
        return f" To compute it again: prefect-rlhf replay {folder}" if folder else ""

    return {name: f"{said}.{replay(name)}" for name, said in {**steps, **known}.items() if row.get(name)}


def learning_warnings(first: Row, newest: Sequence[Row]) -> dict[str, str]:
    """What is wrong -> a sentence with what to look at, by the first row of a run and its newest ones, in order."""
    newest = newest[-IN_A_ROW:]
    if len(newest) < IN_A_ROW:
        return {}
    return {what: said for what, rule in _RULES.items() if (said := rule(first, newest))}


def _nothing_differs(_first: Row, newest: Sequence[Row]) -> str:
    rewards, spreads = _all(newest, "reward"), _all(newest, "reward_std")
    remedy = (
        "Read the answers in samples/ with their rewards. If these are right, try easier or harder prompts, or more "
        "answers to each."
    )
    if rewards and len(set(rewards)) == 1 and spreads and not any(spreads):
        return (
            f"every response of {IN_A_ROW} iterations has the reward {rewards[0]:.3f}, so nothing can be learned "
            f"from it. {remedy}"
        )
    equal = _all(newest, "frac_reward_zero_std")
    if equal and min(equal) == 1:
        return (
            f"in {IN_A_ROW} iterations all responses to a prompt have equal rewards (frac_reward_zero_std 1), so "
            f"nothing can be learned from them. {remedy}"
        )
    return ""


def _none_ends(_first: Row, newest: Sequence[Row]) -> str:
    truncated, lengths = _all(newest, "completions/clipped_ratio"), _all(newest, "completions/mean_length")
    if not truncated or min(truncated) < 1:
        return ""
    return (
        f"no response of {IN_A_ROW} iterations has an end token: all are cut at {max(lengths, default=0):.0f} "
        "tokens. Raise sampling.max_completion_length, see whether the chat template ends the model's answers, or "
        "name strings in sampling.stop."
    )


def _kl_explodes(first: Row, newest: Sequence[Row]) -> str:
    kl = [_kl_per_token(row) for row in newest]
    least = max(KL_PER_TOKEN, KL_GROWTH * (_kl_per_token(first) or 0.0))
    if any(value is None or value < least for value in kl):
        return ""
    return (
        f"the KL divergence from the reference is {kl[-1]:.2g} nats a token, above {KL_PER_TOKEN:g} for {IN_A_ROW} "
        "iterations: the model has left the reference. Lower optimizer.learning_rate, or raise kl_coef or beta, and "
        "look at the answers in samples/."
    )


def _drawn_by_another(_first: Row, newest: Sequence[Row]) -> str:
    apart = _all(newest, "importance/kl")
    if not apart or min(apart) < DRAWN_KL:
        return ""
    return (
        "the policy that is trained differs from the one that has drawn the responses by "
        f"{apart[-1]:.2g} nats a token (importance/kl), above {DRAWN_KL:g} for {IN_A_ROW} iterations. Choose a "
        "smaller staleness, or a dtype and an engine that round less; or leave out what is far off, with "
        "correction: {kind: masked, level: geometric}."
    )


_RULES: Mapping[str, Callable[[Row, Sequence[Row]], str]] = {
    "equal rewards": _nothing_differs,
    "truncated": _none_ends,
    "kl": _kl_explodes,
    "drawn by another": _drawn_by_another,
}


def _all(rows: Sequence[Row], name: str) -> list[float]:
    """A metric of all rows; nothing where one of them lacks it."""
    values = [value for row in rows if (value := row.get(name)) is not None]
    return values if len(values) == len(rows) else []


def _kl_per_token(row: Row) -> float | None:
    kl, length = row.get("kl"), row.get("completions/mean_length")
    return None if kl is None or not length else kl / length
