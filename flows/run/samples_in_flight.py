"""What becomes of the samples that a commit has in flight, when a run is resumed: what the user is told."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.run.prepare import Prepared
from rlhf_tasks.checkpoint.accepted_changes import samples_count
from rlhf_tasks.checkpoint.commits import step_folder
from rlhf_tasks.checkpoint.in_flight import in_flight
from rlhf_tasks.checkpoint.manifest import Manifest
from rlhf_tasks.spec import SaveSamplesNode

AFTER_SAMPLING = ("Advantages", "Evaluation", "Execution", "KL", "Loss", "Reference", "Score", "Training")
"""Headings of configurations. Fields below them decide neither which samples are drawn nor how a commit stores them.
Samples in flight may depend on a field below any other heading, including those of a user's algorithm."""
_EXCEPTIONS = {
    "importance_cap": True,
    "on_reward_error": False,  # where an environment fails, its response ends there or the run does
    "rewards": True,
}
"""Fields -> whether no sample in flight depends on them, whatever their heading says."""
_SHOWN = 8  # prompts that are named


def keeps_samples(field: str, before: Mapping[str, Any], prepared: Prepared, step: int) -> bool:
    """Whether no sample that the commit of a step has in flight depends on a field that has changed.

    before  the configuration until now
    """
    if field == "total_iterations":
        ends, ended = prepared.iterations, before.get(field, 0)
        return min(step + prepared.plan.lead, ends) <= ended  # all is there that is needed from now on
    below = (heading for heading, fields in prepared.config.headings().items() if field in fields)
    return _EXCEPTIONS.get(field, any(heading in AFTER_SAMPLING for heading in below))


def unreadable(folder: Path, manifest: Manifest, prepared: Prepared) -> Iterator[str]:
    """A sentence for each call whose samples in flight are not there as its plan needs them: another version of this
    project has written the commit."""
    if not manifest.step or manifest.step >= prepared.iterations or not samples_count(folder, manifest.step):
        return
    keys = in_flight(step_folder(folder, manifest.step), manifest).keys
    files = {stored.role for stored in manifest.files}
    for node in prepared.plan.nodes:
        if not isinstance(node, SaveSamplesNode) or (node.call in files and node.call not in keys):
            continue
        call = prepared.plan.calls[node.call][0].call
        needed = (*call.left.values(), *(call.outputs if call.lead else ()))
        missing = [key for key in needed if key not in keys.get(node.call, ())]
        if missing:
            yield (
                f"step {manifest.step} has no {missing[0]!r} of the samples in flight of {node.call}: another "
                "version of prefect-rlhf has written it"
            )


def told(
    folder: Path, manifest: Manifest, prepared: Prepared, before: Mapping[str, Any], causes: Sequence[str]
) -> Iterator[str]:
    """A sentence about the samples that a commit has in flight, where it has some.

    before  the configuration until now
    causes  what has changed on which they depend; nothing: they still count
    """
    found = in_flight(step_folder(folder, manifest.step), manifest)
    if not found.drawn and not found.begun:
        return
    several = (
        f"{len(found.drawn)} samples that were drawn ahead and {len(found.begun)} that were begun in segments"
    )
    if not causes:
        yield f"{several} stay, since they depend on nothing that has changed"
        return
    lost, again = found.if_let_go(manifest.cursor, prepared.config.group_size)
    now = prepared.config.model_dump(mode="json")
    same_order = all(before.get(key) == now.get(key) for key in ("data", "num_generations", "seed"))
    prompts = (
        f". So prompts {_listed(lost)} are not learned from, and prompts {_listed(again)} are learned from twice, as "
        "the run counts them from 0"
    )
    yield (
        f"{several} are let go because of this: {'; '.join(causes)}. Iteration {manifest.step + 1} draws its own"
        f"{prompts if same_order and (lost or again) else ''}"
    )


def _listed(prompts: Sequence[int]) -> str:
    more = f" and {len(prompts) - _SHOWN} more" if len(prompts) > _SHOWN else ""
    return ", ".join(map(str, prompts[:_SHOWN])) + more
