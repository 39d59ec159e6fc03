"""The phases of a ledger, their one table of transitions, its timeouts, and the states that watchers see."""

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """What a ledger is about."""

    NEW = "not started"
    RESETTING = "all ranks drop older generations; lost and stuck ones get new processes"
    RESTORING = "all ranks join the groups and load the last commit"
    RUNNING = "iterations may be entered"
    SUSPECTING = "an error was reported; a moment is left for news of a lost rank that explains it"
    ENDING = "what would fail again has failed: what is complete is committed, then the attempt ends"
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
    """Where a node or an iteration stands, for those who watch."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds after which a wait is a fault. Node deadlines come with the requests (`Deadlines`).

    blame_s    how long an error waits for news of a lost rank that explains it
    entry_s    a rank that is inside no node although it has work enters its next one within this
    reset_s    a rank that has not reset within this is stuck, and restarted
    restart_s  every rank is up and clean within this, counted from the end of the time to reset
    restore_s  joining the groups and loading the commit; before it, the time to reset where ranks keep their state
    durable_s  from the answer of a save node until its part is on the disk
    commit_s   manifest and rename
    """

    blame_s: float = 1.0
    entry_s: float = 60.0
    reset_s: float = 20.0
    restart_s: float = 300.0
    restore_s: float = 300.0
    durable_s: float = 600.0
    commit_s: float = 300.0
