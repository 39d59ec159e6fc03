"""Commits of a run: `step-NNNNNNNN` folders, made by a rename, so that each is complete or absent. Torch-free.

Ranks write their parts into `step-NNNNNNNN.tmp-<attempt>` (snapshots.py) and report when they are durable. Then the
controller writes the manifest there and renames the folder: that is the commit. The latest commit is the one with the
highest step whose manifest and files verify. No other record says which it is. The best commits, by the scores of a
run's evaluations, are kept longer.
"""

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from prefect_rlhf.rlhf_tasks.checkpoint.changes import last_accepted, plan_digest
from prefect_rlhf.rlhf_tasks.checkpoint.journals import (
    EMPTY,
    JOURNALS,
    LINEAGE,
    METRICS,
    IterationResults,
    Journal,
    JournalError,
    JournalMark,
    MetricsLines,
    before_first,
    is_row,
    lineage_lines,
    reported,
)
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    CheckpointError,
    Manifest,
    PartReport,
    RoleRecord,
    verify,
    write_manifest,
)
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.protocol.messages import WriteCommit
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount, explained, refuse_full, sync, write_file
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, at, reach

logger = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d{8})")
_LEFTOVER = re.compile(r"step-\d{8}\.(tmp-.*|pruned)")
_REFUSED = re.compile(r"step-\d{8}\.refused-\d+")
ATTEMPTS = "attempts"


class Commit(NamedTuple):
    """A commit that was verified."""

    step: int
    folder: Path
    manifest: Manifest


def step_folder(run_folder: Path, step: int) -> Path:
    """The folder of a commit."""
    return run_folder / f"step-{step:08d}"


def unfinished_folder(run_folder: Path, step: int, attempt: int) -> Path:
    """The folder for the parts of a commit before it is committed."""
    return run_folder / f"step-{step:08d}.tmp-{attempt}"


def commit(run_folder: Path, manifest: Manifest) -> Path:
    """Make a commit from the parts that the ranks have written: manifest, rename, sync. Returns its folder.

    Files that the manifest does not name (from an aborted generation) are removed.
    Raises CheckpointError when a part is missing, OSError when the manifest cannot be written.
    """
    unfinished = unfinished_folder(run_folder, manifest.step, manifest.attempt)
    unfinished.mkdir(exist_ok=True)
    present = {path.name: path for path in unfinished.iterdir()}
    for stored in manifest.files:
        path = present.pop(stored.file, None)
        if path is None or path.stat().st_size != stored.size_bytes:
            raise CheckpointError(f"{unfinished / stored.file}: not the {stored.size_bytes} bytes written.")
    for name, path in present.items():
        if name not in (MANIFEST, CHECKSUM):
            path.unlink()
    write_manifest(unfinished, manifest)
    final = step_folder(run_folder, manifest.step)
    reach(Point.MANIFEST_SYNCED)
    os.rename(unfinished, final)
    reach(Point.RENAMED)
    sync(run_folder)
    reach(Point.COMMITTED)
    return final


def latest_commit(run_folder: Path) -> tuple[Commit | None, list[CheckpointError]]:
    """The newest commit that verifies, and why each later one was refused. Reads every byte of these commits."""
    refused = []
    for step in sorted(steps_of(run_folder), reverse=True):
        folder = step_folder(run_folder, step)
        try:
            manifest = verify(folder)
        except CheckpointError as error:
            refused.append(error)
            continue
        if manifest.step == step:
            return Commit(step, folder, manifest), refused
        refused.append(CheckpointError(f"{folder / MANIFEST}: it is of step {manifest.step}, not {step}."))
    return None, refused


def commit_to_export(run_folder: Path, config: RunConfig) -> tuple[Commit | None, list[CheckpointError]]:
    """The commit whose model a run exports, and why others were refused: with `evaluation.keep_best` the one of the
    best evaluation, else, and where none was evaluated, the newest. Reads every byte of these commits."""
    refused = []
    if keep_best(config.model_dump()):
        there, scores = set(steps_of(run_folder)), scores_of(run_folder)
        for step in best_steps(scores, len(scores)):
            if step in there:
                try:
                    folder = step_folder(run_folder, step)
                    return Commit(step, folder, verify(folder)), refused
                except CheckpointError as error:
                    refused.append(error)
    found, of_newest = latest_commit(run_folder)
    return found, refused + of_newest


def put_refused_aside(run_folder: Path, found: int, attempt: int) -> None:
    """Rename the commits after step `found`, which were refused. Their iterations are done again.

    A refused commit that kept its name would count among those that are kept, so that good ones are removed; and the
    next attempt would compare the journals with it, which go back to step `found`.
    """
    refused = [step_folder(run_folder, step) for step in steps_of(run_folder) if step > found]
    for folder in refused:
        aside = folder.with_name(f"{folder.name}.refused-{attempt}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    if refused:
        sync(run_folder)


def prune(run_folder: Path, keep_last: int, best: Collection[int], moved: ByteCount) -> None:
    """Remove all commits but the newest `keep_last` and those of the steps `best`.

    Nothing is read: each rank has checked its files of a commit before the commit was made.
    moved  counts the bytes that are removed
    Raises OSError.
    """
    steps = sorted(steps_of(run_folder))
    for step in steps[:-keep_last]:
        if step in best:
            continue
        folder = step_folder(run_folder, step)
        pruned = folder.rename(folder.with_name(f"{folder.name}.pruned"))
        reach(Point.PRUNE)
        for path in pruned.iterdir():
            if path.is_file():
                n_bytes = path.stat().st_size
                path.unlink()
                moved.add(n_bytes)
        shutil.rmtree(pruned)


def sweep(run_folder: Path) -> None:
    """Remove the unfinished folders of earlier attempts. Only for the holder of the run's lease.

    A rank that has not noticed the end of its attempt may still write into such a folder. It is then left for the
    next attempt.
    """
    for path in run_folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            try:
                shutil.rmtree(path)
            except OSError as error:
                logger.warning("%s is left for the next attempt: %s", path, error)


def newest_step(run_folder: Path) -> int | None:
    """The step of the newest commit, whether it verifies or not; None without commits."""
    return max(steps_of(run_folder), default=None)


def lost_commits(run_folder: Path) -> str | None:
    """A sentence with the traces of lost commits in a run folder without commits; None if there are no traces.

    A new start in such a folder would remove what is left of the run.
    """
    if not run_folder.is_dir() or steps_of(run_folder):
        return None
    found = [f"{name} with rows" for name in JOURNALS if _size_bytes(run_folder / name)]
    found += sorted(path.name for path in run_folder.iterdir() if _REFUSED.fullmatch(path.name))
    found += [
        f"attempt {path.name}, which has committed step {path.read_text(errors='replace').strip()}"
        for path in sorted((run_folder / ATTEMPTS).glob("*"))
        if _size_bytes(path)
    ]
    if not found:
        return None
    return (
        f"{run_folder} has {', '.join(found)}, but no commit to resume from: its folders step-* are gone. Put them "
        "back, or move the folder away to start from the beginning."
    )


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def step_folders(run_folder: Path) -> list[Path]:
    """The folders of a run's commits, whether they verify or not."""
    return [step_folder(run_folder, step) for step in steps_of(run_folder)]


def steps_of(run_folder: Path) -> list[int]:
    """The numbers of a run folder's commits, whether they verify or not."""
    matches = [_STEP.fullmatch(path.name) for path in run_folder.iterdir()] if run_folder.is_dir() else []
    return [int(match[1]) for match in matches if match]


class RunIdentity(Protocol):
    """The facts about an attempt that commits need (`rlhf_tasks.protocol.messages.RunSpec` is one)."""

    @property
    def run(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def run_folder(self) -> str: ...
    @property
    def peak_flops_per_s(self) -> float | None: ...


def run_snapshots(spec: RunIdentity) -> "RunSnapshots":
    """The commits of one attempt of a run, for its controller."""
    return RunSnapshots(spec)


class RunSnapshots:
    """Finds the commit to resume from, writes new commits and the run's journals, and removes old commits (see
    `Snapshots`)."""

    def __init__(self, spec: RunIdentity) -> None:
        self.moved = ByteCount()
        self._spec = spec
        self._folder = Path(spec.run_folder)
        self._journals = self._open_journals({})
        self._marked = False
        self._metrics = MetricsLines(spec.peak_flops_per_s)
        self._scores: dict[int, Score] = {}  # of evaluated steps

    def latest(self) -> tuple[int, int] | None:
        """(step, cursor) of the newest commit that verifies; None when the run has no commit yet.

        Restores the run folder to the state of that commit: renames later ones, which were refused, removes
        unfinished folders and truncates journals.
        Raises CheckpointError, naming the files, when no commit can be used, when commits have been lost, and when
        the committed part of a journal has changed.
        """
        found, refused = latest_commit(self._folder)
        for error in refused:
            logger.warning("checkpoint refused: %s", error)
        if found is None and refused:
            reasons = " ".join(map(str, refused))
            raise CheckpointError(
                f"no commit in {self._folder} can be used. {reasons} Put one back from a copy, or move the folder "
                "away to start from the beginning."
            )
        if found is None and (lost := lost_commits(self._folder)) is not None:
            raise CheckpointError(lost)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._journals = self._open_journals({} if found is None else self._marks(found))
        if found is not None:
            put_refused_aside(self._folder, found.step, self._spec.attempt)
        sweep(self._folder)
        with at(attempt=self._spec.attempt):
            reach(Point.SWEEP)
        for journal in self._journals.values():
            journal.cut()
        if keep_best(self._spec.config):
            self._scores = scores_of(self._folder)
        return None if found is None else (found.step, found.manifest.cursor)

    def decided(self) -> Iterator[dict[str, Any]]:
        """The lines of the lineage that have decisions."""
        return self._journals[LINEAGE].decided()

    def commit(self, order: WriteCommit, results: Mapping[int, IterationResults]) -> None:
        """Commit a step: journals, manifest, rename. Its cost does not depend on the size of the state.

        results  iteration -> node -> rank -> result, for `order.iterations`
        Raises CheckpointError when the parts do not match, OSError with path and sizes on a full disk.
        """
        with at(iteration=order.step - 1, attempt=self._spec.attempt):
            self._commit(order, results)

    def prune(self) -> None:
        """Remove the commits that are no longer kept; a failure is logged."""
        step = newest_step(self._folder)
        with at(iteration=None if step is None else step - 1, attempt=self._spec.attempt):
            try:
                there = set(
                    steps_of(self._folder)
                )  # what an earlier configuration has removed cannot be kept
                self._scores = {step: score for step, score in self._scores.items() if step in there}
                best = best_steps(self._scores, keep_best(self._spec.config))
                prune(self._folder, self._spec.config["keep_last"], best, self.moved)
            except OSError as error:
                logger.error("older commits are kept: %s", error)

    def _commit(self, order: WriteCommit, results: Mapping[int, IterationResults]) -> None:
        parts = [PartReport.model_validate(part) for ranks in order.parts.values() for part in ranks.values()]
        roles = _records(parts)
        versions = {role: record.version for role, record in roles.items()}
        if versions != dict(order.versions):
            raise CheckpointError(f"step {order.step}: parts of versions {versions}, not {order.versions}.")
        reach(Point.COMMIT)
        marks = self._append(order.iterations, results)
        reach(Point.JOURNALS)
        manifest = Manifest(
            run=self._spec.run,
            attempt=self._spec.attempt,
            step=order.step,
            seed=self._spec.config["seed"],
            cursor=order.cursor,
            versions=versions,
            roles=roles,
            files=tuple(sorted((part.stored for part in parts), key=lambda stored: stored.file)),
            journals=marks,
            config=dict(self._spec.config),
            plan_sha256=plan_digest(order.plan),
        )
        path = unfinished_folder(self._folder, order.step, self._spec.attempt) / MANIFEST
        size_bytes = len(manifest.model_dump_json(indent=1))
        try:
            path.parent.mkdir(exist_ok=True)
            refuse_full(path, size_bytes)
            commit(self._folder, manifest)
        except OSError as error:
            raise explained(error, path, size_bytes) from error
        for journal in self._journals.values():
            journal.keep()
        self._mark_attempt(order.step)
        self._score(order.iterations, results)
        self.moved.add(size_bytes + sum(mark.size_bytes for mark in marks.values()))

    def _marks(self, found: Commit) -> Mapping[str, JournalMark]:
        """The committed part of each journal, by the changes accepted at this commit, else by its manifest."""
        accepted = last_accepted(self._folder)
        return accepted.journals if accepted and accepted.step == found.step else found.manifest.journals

    def _open_journals(self, marks: Mapping[str, JournalMark]) -> dict[str, Journal]:
        try:
            return {name: Journal(self._folder / name, marks.get(name, EMPTY)) for name in JOURNALS}
        except JournalError as error:
            raise CheckpointError(str(error)) from None

    def _append(
        self, iterations: Iterable[int], results: Mapping[int, IterationResults]
    ) -> dict[str, JournalMark]:
        """Append iterations to both journals after their committed parts. Returns the parts to commit."""
        lines = {
            METRICS: [
                line for i in iterations if i in results for line in self._metrics.lines(i, results[i])
            ],
            LINEAGE: [line for i in iterations if i in results for line in lineage_lines(i, results[i])],
        }
        marks = {}
        for name, more in lines.items():
            path, size_bytes = self._folder / name, sum(map(len, more))
            try:
                refuse_full(path, size_bytes)
                marks[name] = self._journals[name].append(more)
                if name == METRICS:
                    reach(Point.METRICS)
            except OSError as error:
                raise explained(error, path, size_bytes) from error
        return marks

    def _score(self, iterations: Iterable[int], results: Mapping[int, IterationResults]) -> None:
        for i in iterations:
            for metrics in (before_first(results[i]), reported(i, results[i])) if i in results else ():
                if (score := score_of(metrics)) is not None:
                    self._scores[int(metrics["iteration"]) + 1] = score

    def _mark_attempt(self, step: int) -> None:
        """Record in the attempt's file that it has trained: `lost_commits` needs that if all commits are lost."""
        if step > 0 and not self._marked:
            attempts = self._folder / ATTEMPTS
            try:
                attempts.mkdir(exist_ok=True)
                write_file(attempts / str(self._spec.attempt), f"{step}\n".encode())
                self._marked = True
            except OSError as error:
                logger.warning("%s: %s; the step is committed nevertheless", attempts, error)


def _records(parts: Iterable[PartReport]) -> dict[str, RoleRecord]:
    """Role -> its record. Raises CheckpointError when the ranks of a role have different records."""
    roles: dict[str, RoleRecord] = {}
    for part in parts:
        role = part.stored.role
        if part.record is None:
            continue
        if roles.setdefault(role, part.record) != part.record:
            raise CheckpointError(
                f"ranks disagree on the state of role {role!r}: {roles[role]} {part.record}"
            )
    return roles


def keep_best(config: Mapping[str, Any]) -> int:
    """How many of the best commits a run keeps, from its configuration as a document."""
    return (config.get("evaluation") or {}).get("keep_best", 0)


Score = tuple[bool, float]
"""(whether rewards gave it, number), higher is better: numbers of rewards and of losses are not compared."""


def score_of(metrics: Mapping[str, float | None]) -> Score | None:
    """By which commits are compared: an iteration's eval/reward, or, without that, its eval/loss with the other sign.
    None where it has none that is finite. An iteration without eval/reward, since no reward judged its answers, is
    worse than any with it."""
    reward, loss = metrics.get("eval/reward"), metrics.get("eval/loss")
    score = reward if reward is not None or loss is None else -loss
    return (reward is not None, score) if score is not None and math.isfinite(score) else None


def scores_of(run_folder: Path) -> dict[int, Score]:
    """Step -> score of the evaluated iterations in a run's journal of metrics. A line that a kill has cut is none."""
    path = run_folder / METRICS
    if not path.exists():
        return {}
    with path.open("rb") as lines:
        rows = [json.loads(line) for line in lines if is_row(line)]
    return {row["iteration"] + 1: score for row in rows if (score := score_of(row)) is not None}


def best_steps(scores: Mapping[int, Score], count: int) -> list[int]:
    """The `count` steps of the highest scores, the best first; of equal ones the earlier comes first."""
    return sorted(scores, key=lambda step: (scores[step], -step), reverse=True)[:count]
