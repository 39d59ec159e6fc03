"""The plans of a run in its folder, and the log of which iteration each begins at. Torch-free.

`plan.json` is the plan that the run began by, `plan-2.json`, `plan-3.json`, ... are later ones, and each line of
`plans.jsonl` names one and its first iteration. A line is written before any iteration goes by its plan and never
taken back: a resumed run, and one that repeats iterations after a fault, changes its plan where it did before.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, TypeAdapter, ValidationError

from rlhf_tasks.config.files import first_fault, read_document
from rlhf_tasks.protocol.scheduled_plans import ScheduledPlan
from rlhf_tasks.spec import ExecutionPlan, Frozen
from rlhf_tasks.system.durable import append_lines, sync, write_file
from rlhf_tasks.system.reading import ConfigError, reading, shown

PLAN = "plan.json"
CHANGES = "plans.jsonl"


_PLAN = TypeAdapter(ExecutionPlan)


class PlanChange(Frozen):
    """A line of the log: the first iteration, the plan's file in the run folder, and its digest."""

    iteration: int = Field(ge=0)
    file: str = Field(pattern=r"^plan-[0-9]+\.json$")
    sha256: str


def plan_digest(plan: ExecutionPlan) -> str:
    """SHA-256 of a plan: what names it in the log and in manifests."""
    return hashlib.sha256(json.dumps(plan.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def log_change(folder: Path, iteration: int, plan: ExecutionPlan) -> PlanChange:
    """Keep a plan in the run folder and write down, durably, at which iteration it begins. Raises OSError."""
    lines = _lines(folder)
    file = f"plan-{2 + len(lines)}.json"
    change = PlanChange(iteration=iteration, file=file, sha256=plan_digest(plan))
    write_file(folder / file, plan.model_dump_json(indent=1).encode())
    written_bytes = sum(len(line.encode()) + 1 for line in lines)
    append_lines(folder / CHANGES, written_bytes, [change.model_dump_json()])
    sync(folder)
    return change


def logged_changes(folder: Path) -> tuple[ScheduledPlan, ...]:
    """The plans that a run has changed to, in order. Raises ConfigError naming a file that is not as written."""
    return tuple(
        ScheduledPlan(iteration=change.iteration, plan=_read(folder / change.file, change))
        for change in _changes(folder)
    )


def read_plan(path: Path, remedy: str) -> ExecutionPlan:
    """A plan in a file. Raises ConfigError naming the file and the fault, with what to do, for one that is none: its
    nodes must have names of their own, wait for nodes that stand before them, and name devices that there are."""
    plan = read_document(path, _PLAN, "no execution plan", remedy=remedy)
    names, fault = [node.name for node in plan.nodes], None
    for i, node in enumerate(plan.nodes):
        if node.name in names[:i]:
            fault = f"two nodes are named {shown(node.name)}"
        elif unknown := [name for name in node.after if name not in names[:i]]:
            fault = f"node {shown(node.name)} waits for {shown(unknown[0])}, which does not stand before it"
        elif unknown := [name for name in node.after_previous if name not in names]:
            fault = f"node {shown(node.name)} waits for {shown(unknown[0])}, which is no node"
        elif not all(0 <= device < plan.n_devices for device in node.devices):
            fault = f"node {shown(node.name)} names devices that are not among the plan's {plan.n_devices}"
        if fault is not None:
            raise ConfigError(f"{path}: no execution plan: {fault}. {remedy}")
    return plan


def _read(path: Path, change: PlanChange) -> ExecutionPlan:
    plan = read_plan(
        path, f"The run goes by it from iteration {change.iteration} on. Put it back, or start a new run."
    )
    if plan_digest(plan) != change.sha256:
        raise ConfigError(
            f"{path} is not the plan that {CHANGES} names for iteration {change.iteration}. Put it back, or start "
            "a new run."
        )
    return plan


def _changes(folder: Path) -> Sequence[PlanChange]:
    path = folder / CHANGES
    with reading(path, "it is not as the run wrote it", remedy="Put it back."):
        lines = _lines(folder)
    try:
        return [PlanChange.model_validate_json(line) for line in lines]
    except ValidationError as error:
        raise ConfigError(
            f"{path}: it is not as the run wrote it: {first_fault(error)} Put it back."
        ) from None


def _lines(folder: Path) -> list[str]:
    """The whole lines of the log: one without its end was never counted on."""
    path = folder / CHANGES
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
