"""Failpoints: places in the code at which tests can make a process die, stop, fail or wait.

`PREFECT_RLHF_FAILPOINT=NAME:ACTION[@rankN][@iterN][@genN][@attemptN]`, several separated by commas, arms a process
and all that it starts. Tests arm a running process with `arm`. `@iter3` is iteration 3, counted from 0; for a commit
it is the last iteration in it. A condition that is not given always holds: without `@gen0`, a replaced rank dies
again.

    kill         SIGKILL to this process
    stop         SIGSTOP to this process
    raise        an error of ours
    full         the error of a full disk
    delay=S      wait S seconds

Every place is a `Point`. A place that is not armed costs a call and a comparison. The armed failpoints are a global
of this module, because the code at a place does not know who has started the process.
"""

import errno
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import NamedTuple

VARIABLE = "PREFECT_RLHF_FAILPOINT"
RANK, CONTROLLER, FLOW = "rank", "controller", "flow"


class Point(Enum):
    """A place: its name, the process that reaches it, and what has happened by then."""

    RESET = ("reset", RANK, "the rank was told to drop its state of an older generation")
    JOIN = ("join", RANK, "the rank is about to join the groups of a generation")
    JOINED = ("joined", RANK, "the groups are built, nothing is loaded")
    RESTORE = ("restore", RANK, "the commit's files of a role are known, none is read")
    LOADED = ("loaded", RANK, "the generation is loaded, but not reported")
    FETCH = ("fetch", RANK, "rows are read, no node has them")
    GENERATION = ("generation", RANK, "a step of decoding is done")
    REWARD = ("reward", RANK, "the rewards have returned, nothing is scored")
    BACKWARD = ("backward", RANK, "a mini-batch's gradients are computed, but not reduced over ranks")
    OPTIMIZER_STEP = ("optimizer_step", RANK, "this rank has changed its weights, but not reported it")
    TRAINED = ("trained", RANK, "a train_step is done and its version counted, but not reported")
    REALLOCATION = ("reallocation", RANK, "slices of weights have arrived, but are not verified")
    REALLOCATED = ("reallocated", RANK, "a copy is installed, but not reported")
    TRANSFER = ("transfer", RANK, "heads know which samples they lack, nothing is sent")
    ONLOAD = ("onload", RANK, "the copy of an offloaded model to the device has begun")
    OFFLOAD = ("offload", RANK, "a model is off the device")
    ANSWER = ("answer", RANK, "a node is done, but not reported")
    SAVE = ("save", RANK, "a role's state is copied to host memory, nothing is written")
    SHARD_BEGUN = ("shard_begun", RANK, "a shard has its header, but no tensor")
    SHARD_WRITTEN = ("shard_written", RANK, "a shard is written, but not synced")
    SHARD_SYNCED = ("shard_synced", RANK, "a shard is synced, its folder's entry is not")
    PART_DURABLE = ("part_durable", RANK, "a part is durable, but not reported")
    LEASE = ("lease", CONTROLLER, "an attempt has begun, nothing is read")
    SWEEP = ("sweep", CONTROLLER, "leftovers of earlier attempts are removed, journals are not truncated")
    RESETTING = ("resetting", CONTROLLER, "a rank was told to join the next generation")
    DELIVERED = ("delivered", CONTROLLER, "a rank was sent the requests of an iteration")
    COMMIT = ("commit", CONTROLLER, "all parts of a step are durable, nothing else is written")
    METRICS = ("metrics", CONTROLLER, "the metrics are appended, the lineage is not")
    JOURNALS = ("journals", CONTROLLER, "both journals are appended, there is no manifest")
    MANIFEST_WRITTEN = ("manifest_written", CONTROLLER, "the manifest is written, its checksum is not")
    MANIFEST_SYNCED = ("manifest_synced", CONTROLLER, "manifest and checksum are synced, nothing is renamed")
    RENAMED = ("renamed", CONTROLLER, "the commit's folder is renamed, the run folder is not synced")
    COMMITTED = ("committed", CONTROLLER, "the commit is durable, but not reported")
    PRUNE = ("prune", CONTROLLER, "a commit that is no longer kept is renamed, but not removed")
    ATTEMPT = ("attempt", FLOW, "an attempt has its number, but no lease")
    ENTER = ("enter", FLOW, "an iteration may begin, but nobody was told to begin it")
    PLAN_LOGGED = ("plan_logged", FLOW, "a change of plan is logged, its attempt has not begun")
    ENTERED = ("entered", FLOW, "the controller was told to deliver an iteration")
    EXPORT = ("export", FLOW, "the last step is committed, no model is exported")
    EXPORTED = ("exported", FLOW, "the model is exported, there is no summary")

    def __init__(self, label: str, process: str, when: str) -> None:
        self.label, self.process, self.when = label, process, when


class Whereabouts(NamedTuple):
    """The rank, iteration, generation and attempt in which a thread works; None where unknown."""

    rank: int | None = None
    iter: int | None = None
    gen: int | None = None
    attempt: int | None = None


class Failpoint(NamedTuple):
    """A place, the action to take there, and the conditions under which it is taken."""

    point: Point
    action: str
    seconds: float
    place: Whereabouts


_FAILPOINT = re.compile(
    r"(\w+):(kill|stop|raise|full|delay)(?:=([0-9.]+))?((?:@(?:rank|iter|gen|attempt)-?\d+)*)"
)
_NOWHERE = Whereabouts()
_here: ContextVar[Whereabouts] = ContextVar("failpoints", default=_NOWHERE)
_armed: tuple[Failpoint, ...] = ()


def parse(text: str) -> tuple[Failpoint, ...]:
    """The failpoints in a text of the environment variable's form. Raises ValueError naming an invalid one."""
    return tuple(_parse_one(part.strip()) for part in text.split(",") if part.strip())


def _parse_one(text: str) -> Failpoint:
    names = {point.label: point for point in Point}
    match = _FAILPOINT.fullmatch(text)
    if match is None or (match[2] == "delay") != (match[3] is not None):
        raise ValueError(
            f"{VARIABLE}: {text!r} is not of the form NAME:ACTION[@rankN][@iterN][@genN][@attemptN], with ACTION one "
            "of kill, stop, raise, full, delay=SECONDS."
        )
    if match[1] not in names:
        raise ValueError(f"{VARIABLE}: there is no place {match[1]!r}. There are: {', '.join(names)}.")
    where = {kind: int(number) for kind, number in re.findall(r"@([a-z]+)(-?\d+)", match[4])}
    return Failpoint(names[match[1]], match[2], float(match[3] or 0), Whereabouts(**where))


def arm(text: str) -> None:
    """Replace the armed failpoints of this process; an empty text disarms it. Raises ValueError as `parse` does."""
    global _armed
    _armed = parse(text)


@contextmanager
def at(
    rank: int | None = None,
    iteration: int | None = None,
    generation: int | None = None,
    attempt: int | None = None,
) -> Iterator[None]:
    """Inside, the places that this thread (or asyncio task) reaches belong to this rank, iteration and so on."""
    token = _here.set(Whereabouts(rank, iteration, generation, attempt))
    try:
        yield
    finally:
        _here.reset(token)


def reach(point: Point) -> None:
    """Take the action that is armed for a place. Code calls this when it reaches the place."""
    if _armed:
        _act(point)


def _act(point: Point) -> None:
    here = _here.get()
    for failpoint in _armed:
        matches = all(
            wanted is None or wanted == found for wanted, found in zip(failpoint.place, here, strict=True)
        )
        if failpoint.point is point and matches:
            _do(failpoint)


def _do(failpoint: Failpoint) -> None:
    match failpoint.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise RuntimeError(f"failpoint {failpoint.point.label}")
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case _:
            time.sleep(failpoint.seconds)


arm(os.environ.get(VARIABLE, ""))
