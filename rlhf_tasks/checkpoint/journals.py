"""What a commit appends to the run's journals: one line of metrics per iteration, one of lineage per node.

A commit names how much of them is committed, and the hash of that. Torch-free.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from rlhf_tasks.spec import Frozen, NodeResult
from rlhf_tasks.system.durable import append_lines, no_link

METRICS = "metrics.jsonl"
LINEAGE = "lineage.jsonl"
JOURNALS = (METRICS, LINEAGE)
_CHUNK_BYTES = 1 << 22
ITERATION_S = "time/iteration"  # metric: an iteration's seconds by the ranks' clocks

IterationResults = Mapping[str, Mapping[int, NodeResult]]
"""Node -> rank -> result."""


class JournalMark(Frozen):
    """How much of a journal is committed: its first `size_bytes` bytes, which have this hash."""

    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


def _names_the_journals(marks: dict[str, JournalMark]) -> dict[str, JournalMark]:
    if set(marks) != set(JOURNALS):
        raise ValueError(f"journals are {', '.join(JOURNALS)}, not {', '.join(map(repr, marks))}")
    return marks


JournalMarks = Annotated[dict[str, JournalMark], AfterValidator(_names_the_journals)]
"""Each journal -> how much of it is committed. None may be missing: what has no mark is cut to nothing."""
EMPTY = JournalMark(size_bytes=0, sha256=hashlib.sha256().hexdigest())


class JournalError(ValueError):
    """A journal is not as it was committed: which file, which line."""


class Journal:
    """A journal as its run writes it: what is committed of it, and what the commit under way appends.

    The hash goes on where it stood: a long journal is read once in an attempt.
    """

    def __init__(self, path: Path, mark: JournalMark = EMPTY) -> None:
        """Raises JournalError when the file is not what `mark` says, OSError when it cannot be read."""
        self.path = path
        self._size_bytes, self._digest = mark.size_bytes, _hashed(path, mark)
        self._appended = (self._size_bytes, self._digest)

    def cut(self) -> None:
        """Remove what is behind the committed part: lines of a commit that never was. Raises OSError."""
        append_lines(self.path, self._size_bytes, ())

    def append(self, lines: Iterable[str]) -> JournalMark:
        """Write lines behind the committed part, durably, in place of what a failed commit left there."""
        written = list(lines)
        size_bytes, digest = append_lines(self.path, self._size_bytes, written), self._digest.copy()
        for line in written:
            digest.update(line.encode() + b"\n")
        self._appended = (size_bytes, digest)
        return JournalMark(size_bytes=size_bytes, sha256=digest.hexdigest())

    def keep(self) -> None:
        """What was appended last is committed."""
        self._size_bytes, self._digest = self._appended


def _hashed(path: Path, mark: JournalMark) -> "hashlib._Hash":
    """The hash of a journal's committed part. Raises JournalError when it is another than the mark's."""
    digest, left = hashlib.sha256(), mark.size_bytes
    if path.is_symlink():
        raise JournalError(f"{path} is a symbolic link.")
    if left == 0:
        return digest
    try:
        with open(path, "rb", opener=no_link) as file:
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
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
    """Where the committed part of a journal is not what a run writes, as far as that shows."""
    number = 0
    for number, line in enumerate(committed_lines(path, size_bytes), start=1):
        if not is_row(line):
            return f":{number} is not as it was written."
    return f": one of its {number} committed lines is not as it was written, though each reads as JSON."


def committed_lines(path: Path, size_bytes: int) -> Iterator[bytes]:
    """The lines of a journal's first bytes, one of which may be cut."""
    left = size_bytes
    with open(path, "rb", opener=no_link) as file:
        while left > 0 and (line := file.readline(left)):
            left -= len(line)
            yield line


def is_row(line: bytes) -> bool:
    """Whether a line is one that a run may have written."""
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class MetricsLines:
    """The lines of an attempt's iterations, made in their order.

    peak_flops_per_s  of all the run's devices together; None where nobody knows it, and `mfu` is left out
    """

    def __init__(self, peak_flops_per_s: float | None = None) -> None:
        self._peak_flops_per_s = peak_flops_per_s
        self._generation: tuple[int, int] | None = None
        self._ended_s = 0.0

    def line(self, iteration: int, results: IterationResults) -> str:
        """`metrics` as a line of JSON."""
        return json.dumps(self.metrics(iteration, results), allow_nan=False)

    def metrics(self, iteration: int, results: IterationResults) -> dict[str, float | None]:
        """One iteration's metrics: those of `reported`, ITERATION_S, and `mfu`: the models' work (parallel/flops.py)
        over what the devices could have done meanwhile.

        An iteration's seconds are those since the one before ended, for iterations overlap; from its own start where
        the one before was of another generation or attempt.
        A value that is not finite stands as null: JSON has no other word for it (a step that was skipped has such).
        """
        line = reported(iteration, results)
        seconds = self._seconds([result for ranks in results.values() for result in ranks.values()])
        line[ITERATION_S] = seconds
        if self._peak_flops_per_s is not None and seconds > 0:
            flops = sum(result.flops for ranks in results.values() for result in ranks.values())
            line["mfu"] = flops / (seconds * self._peak_flops_per_s)
        return {name: value if math.isfinite(value) else None for name, value in line.items()}

    def _seconds(self, results: Sequence[NodeResult]) -> float:
        if not results:
            return 0.0
        key, ended_s = results[0].key, max(result.ended_s for result in results)
        began_s = min(result.started_s for result in results)
        if self._generation == (key.attempt, key.generation):
            began_s = self._ended_s
        self._generation, self._ended_s = (key.attempt, key.generation), ended_s
        return max(ended_s - began_s, 0.0)


def reported(iteration: int, results: IterationResults) -> dict[str, float]:
    """`iteration`, what its nodes report, and `time/<node>` in seconds, from the first rank's start to the last
    rank's end. A name that several nodes use is prefixed with the node's.
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
    """What each node of an iteration ran on: attempt, generation, versions, clocks, bytes, work, memory, digest."""
    for node, ranks in results.items():
        if not ranks:
            continue
        first = next(iter(ranks.values()))
        yield json.dumps(
            {
                "iteration": iteration,
                "node": node,
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
