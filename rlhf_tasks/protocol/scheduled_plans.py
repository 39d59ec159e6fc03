"""Which plan each iteration goes by: a run may change its plan where one iteration ends and the next begins."""

from collections.abc import Mapping, Sequence

from pydantic import Field

from rlhf_tasks.spec import ExecutionPlan, Frozen


class ScheduledPlan(Frozen):
    """A plan and the first iteration that goes by it.

    predicted_s  node name -> seconds that the planner predicts
    """

    iteration: int = Field(ge=0)
    plan: ExecutionPlan
    predicted_s: Mapping[str, float] = Field(default_factory=dict)


def plan_at(schedule: Sequence[ScheduledPlan], iteration: int) -> ScheduledPlan:
    """The plan that an iteration goes by: the last one in the schedule that begins there or before."""
    return next(planned for planned in reversed(schedule) if planned.iteration <= iteration)
