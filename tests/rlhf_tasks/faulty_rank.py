"""The product's executor, in ranks that die when another rank, or another thread, is at a precise place.

The place stands in `fault.json` of the run folder (`Fault`); it counts in generation 0 of attempt 1 only, so that
what is repeated runs undisturbed.
"""

import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from prefect_rlhf.rlhf_tasks.protocol.messages import GenerationSpec, SavedPart
from prefect_rlhf.rlhf_tasks.rank.plan_nodes import make_executor as make_real_executor
from prefect_rlhf.rlhf_tasks.spec import NodeRequest, NodeResult, PlanNode

KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)
NEVER_S = 600.0
BEGAN = "began"  # file: the node that the fault waits for has begun
FIRED = "fired"  # file: time.time() of the signal


@dataclass(frozen=True)
class Fault:
    """A signal that a process sends to itself.

    rank       whose process
    node       the node inside which it comes, of `iteration`; for a save node: once its part is durable and before
               anybody has heard of it
    inside_s   how long after the node has begun on this rank; 0: before it does anything
    meanwhile  (iteration, node) that must have begun on some rank before the faulty node begins; for a save node: in
               which this rank must be when the signal comes
    """

    rank: int
    iteration: int
    node: str
    inside_s: float = 0.0
    signal: int = KILL
    meanwhile: tuple[int, str] | None = None

    def write(self, run_folder: Path) -> None:
        run_folder.mkdir(parents=True)
        (run_folder / "fault.json").write_text(json.dumps(asdict(self)))


def read_fault(run_folder: Path) -> Fault | None:
    path = run_folder / "fault.json"
    return Fault(**json.loads(path.read_text())) if path.exists() else None


class FaultyExecutor:
    """The product's executor, and a fault."""

    def __init__(self, rank, on_saved) -> None:
        self._rank, self._on_saved = rank, on_saved
        self._fault: Fault | None = None
        self._real = make_real_executor(rank, self._saved)
        self.abort, self.close, self.moved = self._real.abort, self._real.close, self._real.moved

    def load(self, spec: GenerationSpec) -> None:
        self._folder = Path(spec.run_folder)
        first = (spec.attempt, spec.generation) == (1, 0)
        self._fault = read_fault(self._folder) if first else None
        self._real.load(spec)

    def execute(self, request: NodeRequest, node: PlanNode) -> NodeResult:
        fault, place = self._fault, (request.key.iteration, node.name)
        if fault is not None and fault.meanwhile is not None and place == tuple(fault.meanwhile):
            (self._folder / BEGAN).touch()
            if self._rank == fault.rank:
                time.sleep(NEVER_S)  # the signal comes from the thread that saves
        here = fault is not None and (self._rank, *place) == (fault.rank, fault.iteration, fault.node)
        if not here or node.kind == "save":
            return self._real.execute(request, node)
        self._wait_for_meanwhile()
        if not fault.inside_s:
            self._fire()
        threading.Timer(fault.inside_s, self._fire).start()
        self._real.execute(request, node)
        time.sleep(NEVER_S)  # the node is never reported as done
        raise AssertionError("the signal did not come")

    def _saved(self, part: SavedPart) -> None:
        fault = self._fault
        if fault is not None and (part.rank, f"save_{part.role}", part.step) == (
            fault.rank,
            fault.node,
            fault.iteration + 1,
        ):
            self._wait_for_meanwhile()
            self._fire()
        self._on_saved(part)

    def _wait_for_meanwhile(self) -> None:
        while self._fault.meanwhile is not None and not (self._folder / BEGAN).exists():
            time.sleep(0.005)

    def _fire(self) -> None:
        (self._folder / FIRED).write_text(repr(time.time()))
        os.kill(os.getpid(), self._fault.signal)


def make_executor(rank, on_saved):
    return FaultyExecutor(rank, on_saved)
