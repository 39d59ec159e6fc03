"""`plan: adaptive`: when a run's times drift from its plan, search for a better plan during training, and take it.

The search takes seconds, so a separate process does it. A better plan ends the attempt at its next commit; the next
attempt begins there, on the same cluster, and restores the commit in the layouts of the new plan. The run folder says
at which iteration that was (rlhf_tasks/checkpoint/changes.py).
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from prefect_rlhf.flows.run.downloads import fetched
from prefect_rlhf.flows.run.planning import hardware_of, on_ranks, problem_of
from prefect_rlhf.flows.run.prepare import Prepared
from prefect_rlhf.flows.run.run_folder import existing_run_folder
from prefect_rlhf.flows.run.summary import ENOUGH, Planned, keep_drift, planned, planned_and_measured
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.search.search import find_plan
from prefect_rlhf.rlhf_tasks.algorithms.configurations import RunConfig
from prefect_rlhf.rlhf_tasks.checkpoint.changes import PLAN, RunPlan, log_change, logged_changes, read_plan
from prefect_rlhf.rlhf_tasks.checkpoint.journals import lineage_lines
from prefect_rlhf.rlhf_tasks.protocol.messages import Committed, Enterable, IterationRan
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, Frozen
from prefect_rlhf.rlhf_tasks.system.child_processes import die_with_parent, python_call
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach

GAIN = 0.1  # of an iteration's predicted time: less is within what predictions are off by
STARTING_S = (
    240.0  # of the planning process beside its search: imports, and compilation where nothing is cached
)
NICE = 5  # of the planning process: about a third of a rank's share of a core


class Proposal(Frozen):
    """A new plan, found with a cost model that knows the run's own figures.

    iteration_time_s  under the new plan, and under the present one
    """

    plan: ExecutionPlan
    iteration_time_s: float
    present_iteration_time_s: float

    @property
    def saved_s(self) -> float:
        """Seconds that the new plan is predicted to save in each iteration."""
        return self.present_iteration_time_s - self.iteration_time_s


class ChangeCost:
    """What a change of plan costs, as far as the run has measured it.

    commit_s  from the end of an iteration to its commit, the last time
    start_s   from an attempt's begin until its ranks held what they begin with, the last time
    """

    def __init__(self) -> None:
        self.commit_s = self.start_s = 0.0
        self._began_s: float | None = None
        self._ended_s: dict[int, float] = {}  # uncommitted iteration -> when it had run

    @property
    def seconds(self) -> float:
        """Seconds that a change costs: ranks are idle while a commit is written and the next attempt begins from
        it."""
        return self.commit_s + self.start_s

    def begins(self, now: float) -> None:
        """An attempt begins on a cluster that is there."""
        self._began_s = now

    def hear(self, event: Any, now: float) -> None:
        """An event of the controller."""
        match event:
            case Enterable() if self._began_s is not None:
                self.start_s, self._began_s = now - self._began_s, None
            case IterationRan(iteration=iteration):
                self._ended_s[iteration] = now
            case Committed(iteration=iteration) if iteration in self._ended_s:
                self.commit_s = now - self._ended_s.pop(iteration)


def is_worth_it(proposal: Proposal, iterations_left: int, cost_s: float) -> bool:
    """Whether to change to a proposed plan: clearly faster, and by more in what is left than the change costs."""
    clear = proposal.saved_s >= GAIN * proposal.present_iteration_time_s
    return clear and proposal.saved_s * iterations_left > cost_s


def propose(config: RunConfig, present: ExecutionPlan) -> Proposal:
    """Search for a plan by the figures that are kept by now. Raises ValueError where none fits."""
    problem = problem_of(config, hardware_of(config))
    result = find_plan(problem, "search", config.planning.time_limit_s, config.seed)
    return Proposal(
        plan=result.plan,
        iteration_time_s=result.iteration_time_s,
        present_iteration_time_s=price_plan(present, problem.model).iteration_time_s,
    )


def answer(folder: str, parent: str) -> None:
    """Entry point of the planning process: prints a `Proposal` to replace the plan of the run in a folder."""
    die_with_parent(int(parent))
    os.nice(NICE)
    path, config = existing_run_folder(folder)
    config, _ = fetched(config, path)
    first = read_plan(path / PLAN, "Put it back.")
    config = on_ranks(config, first.devices_per_host)
    present = logged_changes(path)[-1].plan if logged_changes(path) else first
    print(propose(config, present).model_dump_json())


async def propose_beside(config: RunConfig, folder: Path) -> Proposal | None:
    """`propose` in a process of its own; None when it fails or takes too long. Cancelling ends the process."""
    command = python_call(f"{__name__}:{answer.__name__}", str(folder), str(os.getpid()))
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    limit_s = STARTING_S + 2 * config.planning.time_limit_s
    try:
        output, _ = await asyncio.wait_for(process.communicate(), limit_s)
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Proposal.model_validate_json(output) if process.returncode == 0 else None


Propose = Callable[[RunConfig, Path], Awaitable[Proposal | None]]


class Replanning:
    """Watches a run's commits; judges each plan once, after ENOUGH iterations and one to warm up.

    plans     of the run so far
    expected  first iteration of each plan -> what was expected of it before it ran
    better    that the run is to take at its next commit
    cost      what a change of plan costs
    say       tells the user a line
    propose   default: `propose_beside`
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: Path,
        expected: Mapping[int, Planned],
        say: Callable[[str], None],
        propose: Propose | None = None,
    ) -> None:
        self._config, self._iterations, self._folder = prepared.config, prepared.iterations, folder
        self.plans = prepared.plans
        self.expected = dict(expected)
        self.cost = ChangeCost()
        self._say, self._propose = say, propose or propose_beside
        self._rows: list[Mapping[str, Any]] = []  # lineage of the iterations in `_seen`
        self._seen: set[int] = set()  # the first iterations of the present plan
        self._newest = -1
        self._judging: asyncio.Task[None] | None = None
        self.better: Proposal | None = None

    @property
    def present(self) -> RunPlan:
        """The plan that the run follows now."""
        return self.plans[-1]

    @property
    def expectation(self) -> Planned:
        """What was expected of the present plan before it ran."""
        return self.expected[self.present.iteration]

    def on_event(self, event: Any) -> None:
        """An event of the controller."""
        self.cost.hear(event, time.monotonic())
        if self._config.plan == "adaptive" and isinstance(event, Committed):
            self.committed(event.iteration, map(json.loads, lineage_lines(event.iteration, event.by_rank())))

    def committed(self, iteration: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """An iteration is committed; rows: its lineage."""
        self._newest = iteration
        if len(self._seen) <= ENOUGH:
            self._seen.add(iteration)
            self._rows.extend(rows)
            if len(self._seen) > ENOUGH:
                self._judging = asyncio.create_task(self._judge())

    async def take(self, step: int) -> bool:
        """Between two attempts, at the commit of a step: whether the run follows another plan from here on."""
        proposal, self.better = self.better, None
        if proposal is None or proposal.plan.n_devices != self.present.plan.n_devices:
            return False
        try:
            await self.follow(step, proposal.plan, await asyncio.to_thread(self._problem), "")
        except (OSError, ValueError) as error:
            self._say(
                f"the plan stays: the new one could not be priced or written to the log of plans: {error}"
            )
            return False
        return True

    async def follow(self, step: int, plan: ExecutionPlan, problem: Problem, why: str) -> None:
        """Between two attempts, at the commit of a step: follow another plan from here on.

        problem  that the plan solves
        why      other than that it is faster
        Raises OSError where it cannot be written to the log of plans, ConfigError where it cannot be priced.
        """
        if self._judging is not None:
            self._judging.cancel()  # it compares with the plan before
        expected = await asyncio.to_thread(planned, self._config, plan, problem)
        await asyncio.to_thread(log_change, self._folder, step, plan, why)
        reach(Point.PLAN_LOGGED)
        self.plans += (RunPlan(iteration=step, plan=plan, why=why),)
        self.expected[step] = expected
        self._rows, self._seen, self.better = [], set(), None
        self._say(f"a new plan from iteration {step + 1} on{f' ({why})' if why else ''}")

    async def return_to_all(self, step: int) -> None:
        """Follow the newest plan for all devices again. Raises as `follow` does."""
        most = max(change.plan.n_devices for change in self.plans)
        plan = next(change.plan for change in reversed(self.plans) if change.plan.n_devices == most)
        await self.follow(step, plan, await asyncio.to_thread(self._problem), "all devices are back")

    def _problem(self) -> Problem:
        """Of all devices, by the figures that are kept by now."""
        return problem_of(self._config, hardware_of(self._config))

    async def close(self) -> None:
        """End what is under way: the run has ended."""
        if self._judging is not None:
            self._judging.cancel()
            await asyncio.gather(self._judging, return_exceptions=True)

    async def _judge(self) -> None:
        plan, expected = self.present.plan, self.expectation
        if plan.n_devices < self.plans[0].plan.n_devices:
            return  # until the devices are back
        figures = planned_and_measured(plan, expected, self._rows)
        if not await asyncio.to_thread(keep_drift, plan, expected, figures):
            return
        iteration = figures["iteration"]
        self._say(
            f"an iteration takes {iteration['measured']:.4g} s instead of the planned {iteration['planned']:.4g} s "
            f"({', '.join(figures['drifted'])} drifted): searching for a new plan"
        )
        proposal = await self._propose(self._config, self._folder)
        if proposal is None:
            self._say("the search for a new plan gave no result; the plan stays")
            return
        left, cost = self._iterations - self._newest - 1, self.cost
        worth = is_worth_it(proposal, left, cost.seconds)
        self._say(
            f"the plan {'changes' if worth else 'stays'}: by prediction an iteration takes "
            f"{proposal.iteration_time_s:.4g} s under the new plan, {proposal.present_iteration_time_s:.4g} s under "
            f"the present one, which saves {proposal.saved_s * left:.3g} s in the {left} iterations left; a change "
            f"costs {cost.seconds:.3g} s ({cost.commit_s:.3g} s until a commit is written, {cost.start_s:.3g} s "
            "until the ranks have read it)"
        )
        if worth:
            self.better = proposal
