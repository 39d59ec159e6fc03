"""The run's journals, to which each commit appends: one line of metrics per iteration, one of lineage per node.

A commit records the size of their committed parts and the hash of these. Torch-free.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from prefect_rlhf.rlhf_tasks.config.responses import TURNS
from prefect_rlhf.rlhf_tasks.protocol.decisions import DECIDED
from prefect_rlhf.rlhf_tasks.spec import Frozen, NodeResult
from prefect_rlhf.rlhf_tasks.system.durable import CHUNK_BYTES, append_lines, no_link

METRICS = "metrics.jsonl"
LINEAGE = "lineage.jsonl"
JOURNALS = (METRICS, LINEAGE)
ITERATION_S = "time/iteration"  # metric: seconds of an iteration by the ranks' clocks

BEFORE = "before"  # in a result's details: metrics of the state before the first iteration

IterationResults = Mapping[str, Mapping[int, NodeResult]]
"""Node -> rank -> result."""


class JournalMark(Frozen):
    """The committed part of a journal: its first `size_bytes` bytes, with their hash."""

    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


def _names_the_journals(marks: dict[str, JournalMark]) -> dict[str, JournalMark]:
    if set(marks) != set(JOURNALS):
        raise ValueError(f"journals are {', '.join(JOURNALS)}, not {', '.join(map(repr, marks))}")
    return marks


JournalMarks = Annotated[dict[str, JournalMark], AfterValidator(_names_the_journals)]
"""Each journal -> its committed part. None may be missing: a journal without a mark is truncated to nothing."""
EMPTY = JournalMark(size_bytes=0, sha256=hashlib.sha256().hexdigest())


class JournalError(ValueError):
    """A journal differs from its committed state; the message names file and line."""


class Journal:
    """A journal while its run writes it: the committed part, and the lines that the current commit appends.

    The hash is updated incrementally, so that a long journal is read only once per attempt.
    """

    def __init__(self, path: Path, mark: JournalMark = EMPTY) -> None:
        """Raises JournalError when the file does not match `mark`, OSError when it cannot be read."""
        self.path = path
        self._size_bytes, self._digest = mark.size_bytes, _hashed(path, mark)
        self._appended = (self._size_bytes, self._digest)

    def decided(self) -> Iterator[dict[str, Any]]:
        """The committed lines that have decisions (`lineage_lines`)."""
        return decided_lines(self.path, self._size_bytes)

    def cut(self) -> None:
        """Truncate the file to its committed part: later lines belong to a commit that failed. Raises OSError."""
        append_lines(self.path, self._size_bytes, ())

    def append(self, lines: Iterable[str]) -> JournalMark:
        """Write lines after the committed part, replacing those of a failed commit, and sync. Returns the mark."""
        written = list(lines)
        size_bytes, digest = append_lines(self.path, self._size_bytes, written), self._digest.copy()
        for line in written:
            digest.update(line.encode() + b"\n")
        self._appended = (size_bytes, digest)
        return JournalMark(size_bytes=size_bytes, sha256=digest.hexdigest())

    def keep(self) -> None:
        """Count the lines appended last as committed."""
        self._size_bytes, self._digest = self._appended


def _hashed(path: Path, mark: JournalMark) -> "hashlib._Hash":
    """The hash of a journal's committed part. Raises JournalError when it differs from the mark's."""
    digest, left = hashlib.sha256(), mark.size_bytes
    if path.is_symlink():
        raise JournalError(f"{path} is a symbolic link.")
    if left == 0:
        return digest
    try:
        with open(path, "rb", opener=no_link) as file:
            while left and (chunk := file.read(min(left, CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
    except FileNotFoundError:
        raise JournalError(f"{path} is missing.") from None
    if left:
        has_bytes = mark.size_bytes - left
        raise JournalError(f"{path} has {has_bytes} of the {mark.size_bytes} bytes that are committed.")
    if digest.hexdigest() != mark.sha256:
        raise JournalError(f"{path}{_damage(path, mark.size_bytes)}")
    return digest


def _damage(path: Path, size_bytes: int) -> str:
    """The first committed line that is not a row, for an error message; if all are rows, a sentence that says so."""
    number = 0
    for number, line in enumerate(committed_lines(path, size_bytes), start=1):
        if not is_row(line):
            return f":{number} is not as it was written."
    return f": one of its {number} committed lines is not as it was written, though each reads as JSON."


def committed_lines(path: Path, size_bytes: int) -> Iterator[bytes]:
    """The lines in the first `size_bytes` bytes of a journal; the last one may be cut."""
    left = size_bytes
    with open(path, "rb", opener=no_link) as file:
        while left > 0 and (line := file.readline(left)):
            left -= len(line)
            yield line


def decided_lines(path: Path, size_bytes: int) -> Iterator[dict[str, Any]]:
    """The lines of the lineage's first `size_bytes` bytes that have decisions (`lineage_lines`)."""
    for line in committed_lines(path, size_bytes) if size_bytes else ():
        if b'"decided"' in line:
            yield json.loads(line)


def is_row(line: bytes) -> bool:
    """Whether a line is a complete JSON object, as a run writes them."""
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class MetricsLines:
    """The metrics lines of an attempt. They must be made in the order of the iterations.

    peak_flops_per_s  FLOPs per second of all the run's devices together; None: unknown, and `mfu` is left out
    """

    def __init__(self, peak_flops_per_s: float | None = None) -> None:
        self._peak_flops_per_s = peak_flops_per_s
        self._generation: tuple[int, int] | None = None
        self._ended_s = 0.0

    def lines(self, iteration: int, results: IterationResults) -> list[str]:
        """The lines of an iteration: its own; of the first one, before it that of the state that it begins with."""
        before = before_first(results)
        return [
            *([json.dumps(_finite(before), allow_nan=False)] if before else []),
            self.line(iteration, results),
        ]

    def line(self, iteration: int, results: IterationResults) -> str:
        """The result of `metrics` as a line of JSON."""
        return json.dumps(self.metrics(iteration, results), allow_nan=False)

    def metrics(self, iteration: int, results: IterationResults) -> dict[str, float | None]:
        """One iteration's metrics: those of `reported`, ITERATION_S, and `mfu`, the models' FLOPs (layout/work.py)
        divided by the peak FLOPs of the devices in that time.

        Iterations overlap, so the seconds of an iteration count from the end of the previous one. They count from its
        own start if the previous one was in another generation or attempt.
        Values that are not finite, e.g. of skipped steps, become null, because JSON cannot express them.
        """
        line = reported(iteration, results)
        seconds = self._seconds([result for ranks in results.values() for result in ranks.values()])
        line[ITERATION_S] = seconds
        if self._peak_flops_per_s is not None and seconds > 0:
            flops = sum(result.flops for ranks in results.values() for result in ranks.values())
            line["mfu"] = flops / (seconds * self._peak_flops_per_s)
        return _finite(line)

    def _seconds(self, results: Sequence[NodeResult]) -> float:
        if not results:
            return 0.0
        key, ended_s = results[0].key, max(result.ended_s for result in results)
        began_s = min(result.started_s for result in results)
        if self._generation == (key.attempt, key.generation):
            began_s = self._ended_s
        self._generation, self._ended_s = (key.attempt, key.generation), ended_s
        return max(ended_s - began_s, 0.0)


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """The metrics with null for what is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def before_first(results: IterationResults) -> dict[str, float]:
    """The metrics of the state before the first iteration, from that iteration's results. They count as those of an
    iteration -1, which step 0 follows. Empty where the run does not evaluate that state."""
    told = [
        result.details[BEFORE]
        for ranks in results.values()
        for result in ranks.values()
        if BEFORE in result.details
    ]
    return {"iteration": -1, **told[0]} if told else {}


def reported(iteration: int, results: IterationResults) -> dict[str, float]:
    """`iteration`, the metrics of its nodes, and `time/<node>`: seconds from the first rank's start to the last
    rank's end. A metric's name that several nodes use is prefixed with the node's name.
    """
    told = {node: next(iter(ranks.values())).metrics for node, ranks in results.items() if ranks}
    names = [name for metrics in told.values() for name in metrics]
    line: dict[str, float] = {"iteration": iteration}
    for node, metrics in told.items():
        for name, value in metrics.items():
            line[name if names.count(name) == 1 else f"{node}/{name}"] = value
    for node, ranks in results.items():
        if ranks:
            ended_s = max(result.ended_s for result in ranks.values())
            line[f"time/{node}"] = ended_s - min(result.started_s for result in ranks.values())
    return line


def lineage_lines(iteration: int, results: IterationResults) -> Iterator[str]:
    """A JSON line per node: attempt, generation, clocks (s), versions, bytes sent, FLOPs, peak bytes, digest; where
    something is decided at its end, also of which numbers, and what; of responses of several turns also what was
    measured of these."""
    for node, ranks in results.items():
        if not ranks:
            continue
        first = next(iter(ranks.values()))
        decided = {DECIDED: first.details[DECIDED]} if DECIDED in first.details else {}
        is_played = "turns/count" in first.metrics
        turns = {name: first.metrics[name] for name in ("completions/mean_length", *TURNS) if is_played}
        yield json.dumps(
            {
                "iteration": iteration,
                "node": node,
                **decided,
                **({"turns": turns} if turns else {}),
                "attempt": first.key.attempt,
                "generation": first.key.generation,
                "clocks": {
                    rank: (result.started_s, result.ended_s) for rank, result in sorted(ranks.items())
                },
                "started_s": min(result.started_s for result in ranks.values()),
                "ended_s": max(result.ended_s for result in ranks.values()),
                "versions": {k: v for result in ranks.values() for k, v in result.versions.items()},
                "bytes_sent": sum(result.bytes_sent for result in ranks.values()),
                "flops": sum(result.flops for result in ranks.values()),
                "peak_bytes": {rank: result.peak_bytes for rank, result in sorted(ranks.items())},
                "digest": first.digest,
            }
        )
