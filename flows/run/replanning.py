"""`replan: auto`: where a run's times drift from what was planned, plan anew beside it and change its plan.

The decision takes seconds of search, so it is made beside the training, in a process of its own; it takes effect at
the first iteration not yet delivered, and the run folder says which that was (rlhf_tasks/checkpoint/plan_log.py): no
iteration's plan is decided twice.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.run.planned_and_measured import ENOUGH, Planned, keep_drift, planned, planned_and_measured
from flows.run.planning import hardware_of, problem_of
from flows.run.ranks import on_ranks
from flows.run.run_folder import existing_run_folder
from flows.run.training import RunControl
from planner.pricing.plans import price_plan
from planner.search.search import find_plan
from rlhf_tasks.algorithms.configurations import RunConfig
from rlhf_tasks.checkpoint.plan_log import PLAN, logged_changes, read_plan
from rlhf_tasks.protocol.scheduled_plans import ScheduledPlan, plan_at
from rlhf_tasks.spec import ExecutionPlan, Frozen
from rlhf_tasks.system.child_processes import die_with_parent, python_call

GAIN = 0.1  # of an iteration's predicted time: less is within what predictions are off by
STARTING_S = (
    240.0  # of the planning process beside its search: imports, and compilation where nothing is cached
)
NICE = 5  # of the planning process: about a third of a rank's share of a core


class Proposal(Frozen):
    """What planning anew has found, by a cost model that knows the run's own figures.

    predicted_s       node -> seconds under the new plan
    iteration_time_s  under the new plan, and under the present one
    """

    plan: ExecutionPlan
    predicted_s: dict[str, float]
    iteration_time_s: float
    present_iteration_time_s: float


def is_worth_it(proposal: Proposal, iterations_left: int) -> bool:
    """Whether to change to a proposed plan: clearly faster, and by more than an iteration over what is left.

    (About that long the devices idle while iterations end and ranks load the commit in another layout.)
    """
    saved_s = proposal.present_iteration_time_s - proposal.iteration_time_s
    clear = saved_s >= GAIN * proposal.present_iteration_time_s
    return clear and saved_s * iterations_left > proposal.present_iteration_time_s


def propose(config: RunConfig, present: ExecutionPlan) -> Proposal:
    """Search for a plan by the figures that are kept by now. Raises ValueError where none fits."""
    problem = problem_of(config, hardware_of(config))
    found = find_plan(problem, "search", config.planning.time_limit_s, config.seed)
    return Proposal(
        plan=found.plan,
        predicted_s=found.price.longest_s,
        iteration_time_s=found.iteration_time_s,
        present_iteration_time_s=price_plan(present, problem.model).iteration_time_s,
    )


def answer(folder: str, iteration: str, parent: str) -> None:
    """Entry point of the planning process: prints a `Proposal` to replace the plan that an iteration of the run in
    a folder goes by."""
    die_with_parent(int(parent))
    os.nice(NICE)
    path, config = existing_run_folder(folder)
    first = read_plan(path / PLAN, "Put it back.")
    config = on_ranks(config, first.devices_per_host)
    plans = (ScheduledPlan(iteration=0, plan=first), *logged_changes(path))
    print(propose(config, plan_at(plans, int(iteration)).plan).model_dump_json())


async def propose_beside(config: RunConfig, folder: Path, iteration: int) -> Proposal | None:
    """`propose` in a process of its own; None when it fails or takes too long. Cancelling ends the process."""
    command = python_call(f"{__name__}:{answer.__name__}", str(folder), str(iteration), str(os.getpid()))
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


Propose = Callable[[RunConfig, Path, int], Awaitable[Proposal | None]]


class Replanning:
    """Watches a run's commits; judges each plan once, after ENOUGH iterations and one to warm up.

    plans     which plan each iteration goes by, as far as it is decided
    expected  first iteration of each plan -> what was expected of it before it ran
    say       tells the user a line
    propose   default: `propose_beside`
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        plans: Sequence[ScheduledPlan],
        expected: Mapping[int, Planned],
        iterations: int,
        say: Callable[[str], None],
        propose: Propose | None = None,
    ) -> None:
        self._config, self._folder, self._iterations = config, folder, iterations
        self.plans = tuple(plans)
        self.expected = dict(expected)
        self._say, self._propose = say, propose or propose_beside
        self._present: ScheduledPlan | None = None
        self._rows: list[Mapping[str, Any]] = []
        self._seen: set[int] = set()
        self._newest = -1
        self._judging: asyncio.Task[None] | None = None

    async def changed(self, change: ScheduledPlan) -> None:
        """The run will go by another plan."""
        self.plans += (change,)
        self.expected[change.iteration] = await asyncio.to_thread(self._expectation, change.plan)

    def _expectation(self, plan: ExecutionPlan) -> Planned:
        """By the figures that are kept by now."""
        return planned(self._config, plan, problem_of(self._config, hardware_of(self._config)))

    async def on_commit(self, iteration: int, rows: Sequence[Mapping[str, Any]], control: RunControl) -> None:
        """An iteration is committed; rows: its lineage."""
        present = plan_at(self.plans, iteration)
        if present is not self._present:
            self._present, self._rows, self._seen = present, [], set()
        self._newest = iteration
        if len(self._seen) > ENOUGH:
            return
        self._seen.add(iteration)
        self._rows.extend(rows)
        if len(self._seen) > ENOUGH and present is self.plans[-1]:
            self._judging = asyncio.create_task(self._judge(present, control))

    async def close(self) -> None:
        """End what is under way: the run has ended."""
        if self._judging is not None:
            self._judging.cancel()
            await asyncio.gather(self._judging, return_exceptions=True)

    async def _judge(self, present: ScheduledPlan, control: RunControl) -> None:
        expected = self.expected[present.iteration]
        found = planned_and_measured(present.plan, expected, self._rows)
        if not await asyncio.to_thread(keep_drift, present.plan, expected, found):
            return
        iteration = found["iteration"]
        self._say(
            f"an iteration takes {iteration['measured']:.4g} s, planned were {iteration['planned']:.4g} s "
            f"({', '.join(found['drifted'])} drifted): planning anew"
        )
        proposal = await self._propose(self._config, self._folder, present.iteration)
        if proposal is None:
            self._say("planning anew found nothing; the plan stays")
            return
        times = (
            f"{proposal.iteration_time_s:.4g} s predicted for an iteration of the new plan, "
            f"{proposal.present_iteration_time_s:.4g} s for one of the present plan"
        )
        if is_worth_it(proposal, self._iterations - self._newest - 1):
            self._say(f"{times}: the plan changes")
            control.change_plan(proposal.plan, proposal.predicted_s)
        else:
            self._say(f"{times}: the plan stays")
