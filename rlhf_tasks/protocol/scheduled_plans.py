"""Which plan each iteration follows. A run may change its plan between two iterations."""

from collections.abc import Mapping, Sequence

from pydantic import Field

from rlhf_tasks.spec import ExecutionPlan, Frozen


class ScheduledPlan(Frozen):
    """A plan and the first iteration that follows it.

    predicted_s  node name -> seconds that the planner predicts
    """

    iteration: int = Field(ge=0)
    plan: ExecutionPlan
    predicted_s: Mapping[str, float] = Field(default_factory=dict)


def plan_at(schedule: Sequence[ScheduledPlan], iteration: int) -> ScheduledPlan:
    """The plan that an iteration follows: the last one in the schedule that begins at it or before."""
    return next(planned for planned in reversed(schedule) if planned.iteration <= iteration)
