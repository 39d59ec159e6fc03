"""The phases of a ledger with their table of transitions, its timeouts, and the states that watchers see."""

from dataclasses import dataclass
from enum import Enum

INTERRUPT_GRACE_S = 5.0
"""If a rank's aborted job still runs after this, its process exits."""


class Phase(Enum):
    """What a ledger is doing. The value explains it in messages."""

    NEW = "not started"
    RESETTING = "all ranks drop older generations; lost and stuck ones get new processes"
    RESTORING = "all ranks join the groups and load the last commit"
    RUNNING = "iterations may be entered"
    SUSPECTING = "an error was reported; the loss of a rank that explains it may be reported within a moment"
    ENDING = "a failure that a retry would repeat: complete snapshots are committed, then the attempt ends"
    STOPPED = "finished or given up"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.NEW: frozenset({Phase.RESETTING, Phase.STOPPED}),
    Phase.RESETTING: frozenset({Phase.RESETTING, Phase.RESTORING, Phase.ENDING, Phase.STOPPED}),
    Phase.RESTORING: frozenset(
        {Phase.RUNNING, Phase.SUSPECTING, Phase.RESETTING, Phase.ENDING, Phase.STOPPED}
    ),
    Phase.RUNNING: frozenset({Phase.SUSPECTING, Phase.RESETTING, Phase.ENDING, Phase.STOPPED}),
    Phase.SUSPECTING: frozenset({Phase.RESETTING, Phase.ENDING, Phase.STOPPED}),
    Phase.ENDING: frozenset({Phase.STOPPED}),
    Phase.STOPPED: frozenset(),
}


class State(Enum):
    """The state of a node or an iteration, for watchers."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds after which a wait is a fault. Node deadlines come with the requests (`Deadlines`), waits for the disk
    are judged by their progress (`Pace`).

    blame_s    after an error, to wait for the loss of a rank that explains it
    entry_s    for a rank that has work but is inside no node to enter its next one
    reset_s    for a rank to reset; after that it is stuck, and is restarted
    restart_s  after the time to reset, for every rank to be up and clean
    """

    blame_s: float = 1.0
    entry_s: float = 60.0
    reset_s: float = 2 * INTERRUPT_GRACE_S  # a rank with a stuck job has exited by itself by then
    restart_s: float = 300.0
