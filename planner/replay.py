"""A discrete-event replay of a plan: what each device does when.

It shares no code with the simulator, so that the two can check each other.
"""

import heapq
from collections.abc import Mapping
from typing import NamedTuple

from rlhf_tasks.spec import ExecutionPlan


class Execution(NamedTuple):
    """One run of one node, in seconds from the start of the first iteration."""

    iteration: int
    node: str
    start_s: float
    end_s: float


def replay(plan: ExecutionPlan, duration_s: Mapping[str, float], iterations: int) -> list[Execution]:
    """Run `iterations` iterations of a plan as the runtime does; executions in the order of their ends.

    Every device works off its nodes in the total order. A node starts when it is next on all its devices, all
    its predecessors have ended, and the iteration but one before has ended.
    """
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
    executions: list[Execution] = []

    def may_start(iteration: int, name: str) -> bool:
        node = nodes[name]
        return (
            all(device not in busy and todo[device][-1] == (iteration, name) for device in node.devices)
            and all((iteration, before) in ended for before in node.after)
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
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] == now:
            _, iteration, name, started = heapq.heappop(running)
            executions.append(Execution(iteration, name, started, now))
            ended.add((iteration, name))
            remaining[iteration] -= 1
            for device in nodes[name].devices:
                busy.discard(device)
                todo[device].pop()
    assert not any(todo.values()), "the plan's order is not executable"
    return executions
