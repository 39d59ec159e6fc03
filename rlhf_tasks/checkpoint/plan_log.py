"""The plans of a run in its folder, and the log of the iteration at which each begins. Torch-free.

`plan.json` is the run's first plan; `plan-2.json`, `plan-3.json`, ... are later ones. Each line of `plans.jsonl`
names a later plan and the iteration from which on the run follows it: that after the commit at which an attempt ended
for the change. The line is written before the next attempt begins, and is never removed. So an attempt has one plan,
the newest in the log, and a run that is resumed keeps it.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, TypeAdapter, ValidationError

from rlhf_tasks.config.files import first_fault, read_document
from rlhf_tasks.spec import ExecutionPlan, Frozen
from rlhf_tasks.system.durable import append_lines, sync, write_file
from rlhf_tasks.system.reading import ConfigError, reading, shown

PLAN = "plan.json"
CHANGES = "plans.jsonl"


_PLAN = TypeAdapter(ExecutionPlan)


class RunPlan(Frozen):
    """A plan of a run, and the first iteration that follows it."""

    iteration: int = Field(ge=0)
    plan: ExecutionPlan


def plan_at(plans: Sequence[RunPlan], iteration: int) -> RunPlan:
    """The plan that an iteration follows: the last one that begins at it or before."""
    return next(planned for planned in reversed(plans) if planned.iteration <= iteration)


class PlanChange(Frozen):
    """A line of the log: the first iteration, the plan's file in the run folder, and its digest."""

    iteration: int = Field(ge=0)
    file: str = Field(pattern=r"^plan-[0-9]+\.json$")
    sha256: str


def plan_digest(plan: ExecutionPlan) -> str:
    """SHA-256 of a plan, which identifies it in the log and in manifests.

    A lead of 0, and segments that there are not, are left out: plans of runs from before there were such have the
    digests of then.
    """
    document = plan.model_dump(mode="json")
    for node in document["nodes"]:
        for part in (node, node.get("call")):
            for name, nothing in (("lead", 0), ("segment_tokens", None)):
                if isinstance(part, dict) and part.get(name, ...) == nothing:
                    del part[name]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def log_change(folder: Path, iteration: int, plan: ExecutionPlan) -> PlanChange:
    """Write a plan into the run folder, append its first iteration to the log, and sync both. Raises OSError."""
    lines = _lines(folder)
    file = f"plan-{2 + len(lines)}.json"
    change = PlanChange(iteration=iteration, file=file, sha256=plan_digest(plan))
    write_file(folder / file, plan.model_dump_json(indent=1).encode())
    written_bytes = sum(len(line.encode()) + 1 for line in lines)
    append_lines(folder / CHANGES, written_bytes, [change.model_dump_json()])
    sync(folder)
    return change


def logged_changes(folder: Path) -> tuple[RunPlan, ...]:
    """The plans that a run has changed to, in order. Raises ConfigError naming a missing or changed file."""
    return tuple(
        RunPlan(iteration=change.iteration, plan=_read(folder / change.file, change))
        for change in _changes(folder)
    )


def read_plan(path: Path, remedy: str) -> ExecutionPlan:
    """The plan in a file.

    Its nodes must have different names, wait only for earlier nodes, and use only the plan's devices. Otherwise
    ConfigError names the file and the fault, followed by `remedy`.
    """
    plan = read_document(path, _PLAN, "not an execution plan", remedy=remedy)
    names, fault = [node.name for node in plan.nodes], None
    for i, node in enumerate(plan.nodes):
        if node.name in names[:i]:
            fault = f"two nodes are named {shown(node.name)}"
        elif unknown := [name for name in node.after if name not in names[:i]]:
            fault = f"node {shown(node.name)} waits for {shown(unknown[0])}, which does not come before it"
        elif unknown := [name for name in node.after_previous if name not in names]:
            fault = f"node {shown(node.name)} waits for {shown(unknown[0])}, which is not a node"
        elif not all(0 <= device < plan.n_devices for device in node.devices):
            fault = f"node {shown(node.name)} names devices that are not among the plan's {plan.n_devices}"
        if fault is not None:
            raise ConfigError(f"{path}: not an execution plan: {fault}. {remedy}")
    return plan


def _read(path: Path, change: PlanChange) -> ExecutionPlan:
    plan = read_plan(
        path, f"The run uses it from iteration {change.iteration} on. Put it back, or start a new run."
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
    """The complete lines of the log. A last line without line end was not acknowledged, so it is ignored."""
    path = folder / CHANGES
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
