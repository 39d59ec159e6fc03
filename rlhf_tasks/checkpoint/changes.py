"""What has changed between the attempts of a run, in its folder: plans, and what its user has accepted. Torch-free.

`plan.json` is the run's first plan; `plan-2.json`, `plan-3.json`, ... are later ones. Each line of `plans.jsonl`
names a later plan and the iteration from which on the run follows it: that after the commit at which an attempt ended
for the change. The line is written before the next attempt begins. So an attempt has one plan, the newest in the log,
and a run that is resumed keeps it, unless its first plan is made anew: then the log is removed.

A run is resumed as its last commit left it. Any other difference is refused (flows/run/run_identity.py) unless a line
of `accepted.jsonl` records it. An accepted change drops the samples that the commit has in flight, for they may
depend on it.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from prefect_rlhf.rlhf_tasks.checkpoint.journals import JournalMarks
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import CheckpointError, Manifest
from prefect_rlhf.rlhf_tasks.config.files import first_fault, read_document
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, Frozen
from prefect_rlhf.rlhf_tasks.system.durable import append_lines, replace_file, sync, write_file
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, reading, shown

PLAN = "plan.json"
CHANGES = "plans.jsonl"
ACCEPTED = "accepted.jsonl"
DRAWN = "old_logprobs/lengths"  # of drawn samples: numbers of tokens
BEGUN = "left_number/values"  # of samples in segments: the number of the one in each place; negative in a free one
_PLAN = TypeAdapter(ExecutionPlan)


class RunPlan(Frozen):
    """A plan of a run, the first iteration that follows it, and why, other than that it is faster."""

    iteration: int = Field(ge=0)
    plan: ExecutionPlan
    why: str = ""


def plan_at(plans: Sequence[RunPlan], iteration: int) -> RunPlan:
    """The plan that an iteration follows: the last one that begins at it or before."""
    return next(planned for planned in reversed(plans) if planned.iteration <= iteration)


class PlanChange(Frozen):
    """A line of the log: the first iteration, the plan's file in the run folder, its digest, and why it changed."""

    iteration: int = Field(ge=0)
    file: str = Field(pattern=r"^plan-[0-9]+\.json$")
    sha256: str
    why: str = ""


def plan_digest(plan: ExecutionPlan) -> str:
    """SHA-256 of a plan, which identifies it in the log and in manifests.

    A lead of 0, segments that there are not, weights that are not sharded, and calls by no decision are left out:
    plans of runs from before there were such have the digests of then.
    """
    document = _without_nothing(plan.model_dump(mode="json"))
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


_NOTHING = {"lead": 0, "segment_tokens": None, "cp": 1, "shard": "gradients", "decides": [], "when": ""}


def _without_nothing(document: Any) -> Any:
    """A JSON document without the keys that say that there is nothing of something."""
    if isinstance(document, list):
        return [_without_nothing(item) for item in document]
    if not isinstance(document, dict):
        return document
    present = {key: value for key, value in document.items() if key not in _NOTHING or value != _NOTHING[key]}
    before = {"earlier": []} if "runs_model" in document else {}  # calls had such a list
    return {key: _without_nothing(value) for key, value in {**present, **before}.items()}


def log_change(folder: Path, iteration: int, plan: ExecutionPlan, why: str = "") -> PlanChange:
    """Write a plan into the run folder, append its first iteration to the log, and sync both. Raises OSError.

    why  other than that it is faster
    """
    file = f"plan-{2 + len(_lines(folder / CHANGES))}.json"
    change = PlanChange(iteration=iteration, file=file, sha256=plan_digest(plan), why=why)
    write_file(folder / file, plan.model_dump_json(indent=1).encode())
    _append(folder / CHANGES, change.model_dump_json())
    sync(folder)
    return change


def logged_changes(folder: Path) -> tuple[RunPlan, ...]:
    """The plans that a run has changed to, in order. Raises ConfigError naming a missing or changed file."""
    return tuple(
        RunPlan(iteration=change.iteration, plan=_read(folder / change.file, change), why=change.why)
        for change in _changes(folder)
    )


def keep_first_plan(folder: Path, plan: ExecutionPlan, changes: Sequence[RunPlan]) -> None:
    """Write the first plan into the run folder, whose log has its changes; without any the log is removed."""
    if not changes:
        (folder / CHANGES).unlink(missing_ok=True)
    replace_file(folder / PLAN, plan.model_dump_json(indent=1))


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
        lines = _lines(path)
    try:
        return [PlanChange.model_validate_json(line) for line in lines]
    except ValidationError as error:
        raise ConfigError(
            f"{path}: it is not as the run wrote it: {first_fault(error)} Put it back."
        ) from None


class Accepted(Frozen):
    """The changes that were accepted at a commit.

    step      of the commit that the run resumes from
    changes   a sentence for each change
    config    the run's configuration from now on
    journals  each journal -> the part of it that counts as committed, instead of that in the commit's manifest
    """

    step: int = Field(ge=0)
    changes: tuple[str, ...]
    config: dict[str, Any]
    journals: JournalMarks


def write_accepted(run_folder: Path, accepted: Accepted) -> None:
    """Append accepted changes to the file, and sync it. Raises OSError."""
    _append(run_folder / ACCEPTED, accepted.model_dump_json())


def last_accepted(run_folder: Path) -> Accepted | None:
    """The changes accepted last; None if there are none. Raises CheckpointError naming a damaged file."""
    accepted = _accepted(run_folder)
    return accepted[-1] if accepted else None


def samples_count(run_folder: Path, step: int) -> bool:
    """Whether the samples that a commit has in flight still count: no change was accepted at this commit, nor at a
    later one, which was lost. Raises CheckpointError naming a damaged file."""
    return all(accepted.step < step for accepted in _accepted(run_folder))


def has_samples_in_flight(step_folder: Path, manifest: Manifest) -> bool:
    """Whether a commit has samples of iterations to come: drawn ahead of their training, or begun in segments. Files
    that cannot be read are left out."""
    for stored in manifest.files:
        if stored.role in manifest.roles:
            continue
        with suppress(OSError, SafetensorError), safe_open(step_folder / stored.file, "np") as file:
            names = set(file.keys())
            if DRAWN in names and file.get_tensor(DRAWN).any():
                return True
            if BEGUN in names and (file.get_tensor(BEGUN) >= 0).any():
                return True
    return False


def _accepted(run_folder: Path) -> list[Accepted]:
    try:
        return [Accepted.model_validate_json(line) for line in _lines(run_folder / ACCEPTED)]
    except ValidationError:
        raise CheckpointError(f"{run_folder / ACCEPTED} is not as the run wrote it. Put it back.") from None


def _append(path: Path, line: str) -> None:
    """Append a line after the complete ones, and sync it. Raises OSError."""
    written = path.read_bytes() if path.exists() else b""
    append_lines(path, written.rfind(b"\n") + 1, [line])


def _lines(path: Path) -> list[str]:
    """The complete lines of a log. A last line without line end was not acknowledged, so it is ignored."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []
