"""Places in the code at which a process can be made to die, stop, fail or wait, so that tests see what comes of it.

`PREFECT_RLHF_FAILPOINT=NAME:ACTION[@rankN][@iterN][@genN][@attemptN]`, several separated by commas, arms a process
and all that it starts; tests arm a running one by `arm`. `@iter3` is iteration 3, counted from 0; of a commit it is
the last iteration in it. What is not named may be anything: without `@gen0` a rank that was replaced dies again.

    kill         SIGKILL to this process
    stop         SIGSTOP to this process
    raise        an error of ours
    full         the error of a full disk
    delay=S      wait S seconds

Every place is named in `Point`. One that is not armed costs a call and a comparison. What is armed is an attribute of
this module, as a place in the engine knows nothing of who made the process.
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
    """A place: its name, the process that comes there, and what has happened by then."""

    RESET = ("reset", RANK, "the rank is to give up what it holds of an older generation")
    JOIN = ("join", RANK, "the rank is about to join the groups of a generation")
    JOINED = ("joined", RANK, "the groups stand, nothing is loaded")
    RESTORE = ("restore", RANK, "the commit's files of a role are named, none is read")
    LOADED = ("loaded", RANK, "the generation is loaded, nobody knows it")
    FETCH = ("fetch", RANK, "rows are read, no node has them")
    GENERATION = ("generation", RANK, "a step of decoding is done")
    REWARD = ("reward", RANK, "the rewards have answered, nothing is scored")
    BACKWARD = ("backward", RANK, "a mini-batch has its gradients, they are not summed over ranks")
    OPTIMIZER_STEP = ("optimizer_step", RANK, "this rank has changed its weights, nobody knows it")
    TRAINED = ("trained", RANK, "a train_step is done and its version counted, nobody knows it")
    REALLOCATION = ("reallocation", RANK, "slices of weights have arrived, they are not compared")
    REALLOCATED = ("reallocated", RANK, "a copy is installed, nobody knows it")
    TRANSFER = ("transfer", RANK, "heads know what they lack, nothing is sent")
    ONLOAD = ("onload", RANK, "an offloaded model is on its way to the device")
    OFFLOAD = ("offload", RANK, "a model is off the device")
    ANSWER = ("answer", RANK, "a node is done, nobody knows it")
    SAVE = ("save", RANK, "a role's state is copied aside")
    SHARD_BEGUN = ("shard_begun", RANK, "a shard has its header and no tensor")
    SHARD_WRITTEN = ("shard_written", RANK, "a shard is written and not synced")
    SHARD_SYNCED = ("shard_synced", RANK, "a shard is synced, its folder's entry is not")
    PART_DURABLE = ("part_durable", RANK, "a part is durable, nobody knows it")
    LEASE = ("lease", CONTROLLER, "an attempt is begun, nothing is read")
    SWEEP = ("sweep", CONTROLLER, "leftovers of earlier attempts are gone, journals are not cut back")
    RESETTING = ("resetting", CONTROLLER, "a rank was told to go to the next generation")
    DELIVERED = ("delivered", CONTROLLER, "a rank was sent the requests of an iteration")
    COMMIT = ("commit", CONTROLLER, "all parts of a step are durable, nothing else is written")
    METRICS = ("metrics", CONTROLLER, "the metrics are appended, the lineage is not")
    JOURNALS = ("journals", CONTROLLER, "both journals are appended, there is no manifest")
    MANIFEST_WRITTEN = ("manifest_written", CONTROLLER, "the manifest is written, its checksum is not")
    MANIFEST_SYNCED = ("manifest_synced", CONTROLLER, "manifest and checksum are synced, nothing is renamed")
    RENAMED = ("renamed", CONTROLLER, "the commit has its name, the run folder is not synced")
    COMMITTED = ("committed", CONTROLLER, "the commit is durable, nobody knows it")
    PRUNE = ("prune", CONTROLLER, "a commit that is no longer kept is out of the way, its files are there")
    PLAN_LOGGED = ("plan_logged", CONTROLLER, "a change of the plan is written down, nobody knows it")
    ATTEMPT = ("attempt", FLOW, "an attempt has its number and no lease")
    ENTER = ("enter", FLOW, "an iteration may be entered, nobody was told to")
    ENTERED = ("entered", FLOW, "the controller was told to deliver an iteration")
    EXPORT = ("export", FLOW, "the last step is committed, no model is exported")
    EXPORTED = ("exported", FLOW, "the model is exported, there is no summary")

    def __init__(self, label: str, process: str, when: str) -> None:
        self.label, self.process, self.when = label, process, when


class Whereabouts(NamedTuple):
    """Where a thread is; None where that is not said."""

    rank: int | None = None
    iter: int | None = None
    gen: int | None = None
    attempt: int | None = None


class Failpoint(NamedTuple):
    """A place, and what is to be done there."""

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
    """The failpoints in a text, as the environment variable has it. Raises ValueError naming what is none."""
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
    """Arm this process, in place of what it was armed with; an empty text disarms it. Raises ValueError."""
    global _armed
    _armed = parse(text)


@contextmanager
def at(
    rank: int | None = None,
    iteration: int | None = None,
    generation: int | None = None,
    attempt: int | None = None,
) -> Iterator[None]:
    """Inside, what this thread (or asyncio task) reaches is of this rank, iteration, generation and attempt."""
    token = _here.set(Whereabouts(rank, iteration, generation, attempt))
    try:
        yield
    finally:
        _here.reset(token)


def reach(point: Point) -> None:
    """This process has come to a place: what is armed for it happens."""
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
