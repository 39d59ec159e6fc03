"""A discrete-event replay of a plan: what each device does when.

It shares no code with the planner, so that it can check the seconds per iteration that the planner reports.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan


class Execution(NamedTuple):
    """One run of one node, in seconds from the start of the first iteration."""

    iteration: int
    node: str
    start_s: float
    end_s: float


def replay(
    plan: ExecutionPlan,
    duration_s: Mapping[str, float],
    iterations: int,
    copy_s: Mapping[str, float] | None = None,
) -> list[Execution]:
    """Simulate `iterations` iterations of a plan as the runtime runs it; executions in the order of their ends.

    duration_s: seconds of every node by name; copy_s: seconds of every onload's copy.
    Every device runs its nodes in the total order. A node of iteration t starts when it is next on all its devices,
    all its predecessors have ended, and iteration t - 2 has ended. When an onload ends, its copy joins a queue
    of its devices; copies run beside the devices' other work. A node whose predecessor is an onload also waits for
    the onload's copy.
    """
    copy_s = copy_s or {}
    todo: dict[int, list[tuple[int, str]]] = {}
    for iteration in range(iterations):
        for node in plan.nodes:
            for device in node.devices:
                todo.setdefault(device, []).append((iteration, node.name))
    for queue in todo.values():
        queue.reverse()
    nodes = {node.name: node for node in plan.nodes}
    ended: set[tuple[int, str]] = set()
    remaining = [len(nodes)] * iterations
    running: list[tuple[float, int, str, float]] = []
    busy: set[int] = set()
    copies = _Copies({name: nodes[name].devices for name in copy_s}, copy_s)
    executions: list[Execution] = []

    def may_start(iteration: int, name: str) -> bool:
        node = nodes[name]
        return (
            all(device not in busy and todo[device][-1] == (iteration, name) for device in node.devices)
            and all((iteration, before) in ended for before in node.after)
            and all((iteration, before) in copies.done for before in node.after if before in copy_s)
            and (iteration == 0 or all((iteration - 1, before) in ended for before in node.after_previous))
            and (iteration < 2 or remaining[iteration - 2] == 0)
        )

    now = 0.0
    while True:
        heads = {queue[-1] for device, queue in todo.items() if queue and device not in busy}
        for iteration, name in sorted(heads):
            if may_start(iteration, name):
                busy.update(nodes[name].devices)
                heapq.heappush(running, (now + duration_s[name], iteration, name, now))
        if not running and not copies.running:
            break
        now = min(ends[0][0] for ends in (running, copies.running) if ends)
        while running and running[0][0] == now:
            _, iteration, name, started = heapq.heappop(running)
            executions.append(Execution(iteration, name, started, now))
            ended.add((iteration, name))
            remaining[iteration] -= 1
            for device in nodes[name].devices:
                busy.discard(device)
                todo[device].pop()
            if name in copy_s:
                copies.ask_for(iteration, name)
        copies.go_on(now)
    assert not any(todo.values()), "the plan's order is not executable"
    return executions


class _Copies:
    """The copies from host memory to the devices: one at a time on each device, in the order of their requests.

    devices, seconds  of the copy that each onload starts
    running           heap of (end, iteration, onload)
    done              copies that have ended
    """

    def __init__(self, devices: Mapping[str, Sequence[int]], seconds: Mapping[str, float]) -> None:
        self._devices, self._seconds = devices, seconds
        self._queues: dict[int, list[tuple[int, str]]] = {d: [] for mesh in devices.values() for d in mesh}
        self.running: list[tuple[float, int, str]] = []
        self.done: set[tuple[int, str]] = set()

    def ask_for(self, iteration: int, onload: str) -> None:
        for device in self._devices[onload]:
            self._queues[device].append((iteration, onload))

    def go_on(self, now: float) -> None:
        """End the copies whose time is over, and start those that are first in the queue of each of their devices."""
        while self.running and self.running[0][0] <= now:
            _, iteration, onload = heapq.heappop(self.running)
            self.done.add((iteration, onload))
            for device in self._devices[onload]:
                self._queues[device].pop(0)
        under_way = {(iteration, onload) for _, iteration, onload in self.running}
        for iteration, onload in sorted({queue[0] for queue in self._queues.values() if queue} - under_way):
            if all(self._queues[device][0] == (iteration, onload) for device in self._devices[onload]):
                heapq.heappush(self.running, (now + self._seconds[onload], iteration, onload))
