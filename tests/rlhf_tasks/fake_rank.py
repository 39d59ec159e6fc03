"""A rank's executor and the controller's snapshots for tests of the runtime: no model, but real gloo
collectives.

Every node's ranks sum a number that names the node and its iteration: two calls paired up wrongly give a
wrong sum. A trained role's state is one number, `3 * state + iteration + 1` after each train_step, written
by the save nodes.

config keys: sleep_s (seconds each node takes, a number or node -> number); until_next (node -> node: the first
ends only when the second has begun in the next iteration; not in the last one); held (path: no node ends before
that file is there); fault: {kind, node, iteration, rank} with kind kill | stop | raise | user code | hang, done in
generation 0 only unless `always`.
"""

import datetime
import json
import os
import signal
import threading
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

from prefect_rlhf.rlhf_tasks.protocol.messages import SavedPart
from prefect_rlhf.rlhf_tasks.spec import CallNode, NodeResult, SaveNode
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount
from prefect_rlhf.rlhf_tasks.user_code.errors import UserCodeError


def wait_for(path):
    while not path.exists():
        time.sleep(0.005)


class FakeExecutor:
    def __init__(self, rank, on_saved):
        self.rank, self.on_saved = rank, on_saved
        self.groups = {}
        self.moved = ByteCount()

    def load(self, spec):
        self.spec = spec
        store = dist.TCPStore(spec.store_host, spec.store_port, is_master=False)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(spec.store_prefix, store),
            rank=spec.rank,
            world_size=spec.n_ranks,
            timeout=datetime.timedelta(seconds=spec.timeout_s),
        )
        for devices in sorted({node.devices for node in spec.plan.nodes}):
            self.groups[devices] = dist.new_group(list(devices))
        self.roles = {role: 0 for role, p in spec.plan.roles.items() if p.trained}
        self.versions = dict(self.roles)
        if spec.restore_step is not None:
            saved = json.loads((Path(spec.run_folder) / f"step-{spec.restore_step}.json").read_text())
            self.roles, self.versions = saved["roles"], saved["versions"]
        else:
            for node in spec.plan.nodes:
                if isinstance(node, SaveNode) and self.rank in node.devices:
                    self.save(node.role, 0)

    def execute(self, request, node):
        started_s = time.time()
        key = request.key
        for role, version in request.versions.items():
            if role in self.versions:
                assert self.versions[role] == version, (key, self.versions, request.versions)
        if self.fail_if_told(key):
            return None
        self.take_time(key)
        mark = zlib.crc32(f"{key.iteration} {key.node}".encode()) % 100_003
        total = torch.tensor([float(mark)], dtype=torch.float64)
        dist.all_reduce(total, group=self.groups[node.devices])
        assert total.item() == mark * len(node.devices), f"{key} was paired up with another node"
        if isinstance(node, CallNode) and node.trains:
            role = node.call.role
            self.roles[role] = 3 * self.roles[role] + key.iteration + 1
            self.versions[role] += 1
        if isinstance(node, SaveNode) and request.in_snapshot:
            self.save(node.role, key.iteration + 1)
        return NodeResult(
            key=key, rank=self.rank, started_s=started_s, ended_s=time.time(), metrics={"mark": float(mark)}
        )

    def take_time(self, key):
        config = self.spec.config
        sleep_s = config.get("sleep_s", 0.0)
        time.sleep(sleep_s.get(key.node, 0.0) if isinstance(sleep_s, dict) else sleep_s)
        if "held" in config:
            wait_for(Path(config["held"]))
        until_next = config.get("until_next", {})
        if key.node in until_next.values():
            self.began(key.node, key.iteration).touch()
        if key.node in until_next and key.iteration + 1 < self.spec.iterations:
            wait_for(self.began(until_next[key.node], key.iteration + 1))

    def began(self, node, iteration):
        return Path(self.spec.run_folder) / f"began-{node}-{iteration}"

    def save(self, role, step):
        spec = self.spec
        names = {"run": spec.run, "attempt": spec.attempt, "generation": spec.generation}
        details = {"state": self.roles[role], "version": self.versions[role]}
        part = SavedPart(**names, step=step, role=role, rank=self.rank, details=details)
        threading.Timer(0.02, self.on_saved, (part,)).start()

    def fail_if_told(self, key):
        fault = self.spec.config.get("fault")
        if not fault or (key.generation > 0 and not fault.get("always")):
            return False
        if (key.node, key.iteration, self.rank) != (fault["node"], fault["iteration"], fault["rank"]):
            return False
        if fault["kind"] == "no result":
            return True
        if fault["kind"] == "raise":
            raise ValueError("told to fail")
        if fault["kind"] == "user code":
            raise UserCodeError("reward 'mine' raised KeyError", "mine.py, line 3")
        if fault["kind"] == "hang":
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL if fault["kind"] == "kill" else signal.SIGSTOP)
        time.sleep(600)  # the main thread takes a SIGSTOP, and stops this one when it gets round to it

    def abort(self):
        for group in self.groups.values():
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                group.abort()

    def close(self):
        if dist.is_initialized():
            dist.destroy_process_group()
        self.groups = {}


def make_executor(rank, on_saved):
    return FakeExecutor(rank, on_saved)


class FakeSnapshots:
    def __init__(self, spec):
        self.folder = Path(spec.run_folder)
        self.moved = ByteCount()

    def latest(self):
        steps = [int(path.stem.removeprefix("step-")) for path in self.folder.glob("step-*.json")]
        if not steps:
            return None
        return max(steps), json.loads((self.folder / f"step-{max(steps)}.json").read_text())["cursor"]

    def commit(self, order, results):
        parts = {node: dict(ranks) for node, ranks in order.parts.items()}
        for ranks in parts.values():
            assert len({json.dumps(details) for details in ranks.values()}) == 1, parts
        roles = {
            node.removeprefix("save_"): next(iter(ranks.values()))["state"] for node, ranks in parts.items()
        }
        saved = {"roles": roles, "versions": dict(order.versions), "cursor": order.cursor}
        temporary = self.folder / f"step-{order.step}.tmp"
        temporary.write_text(json.dumps(saved))
        temporary.rename(self.folder / f"step-{order.step}.json")

    def prune(self):
        """Every step stays."""


def make_snapshots(spec):
    return FakeSnapshots(spec)
