"""What trackers' own local stores hold, read as their own programs read them."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

Points = list[tuple[str, int, float]]
"""Name, step and value of each point, in the order of the store."""


def in_event_files(folder: Path) -> Points:
    """TensorBoard's event files in order: a file that starts a session at a step purges later points before it."""
    points: Points = []
    for path in sorted(folder.glob("events.out.tfevents.*"), key=os.path.getmtime):
        data = path.read_bytes()
        while data:
            size = struct.unpack("<Q", data[:8])[0]
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.session_log.status == SessionLog.START:
                points = [point for point in points if point[1] < event.step]
            points += [
                (v.tag, event.step, v.simple_value) for v in event.summary.value if not v.metadata.ByteSize()
            ]
    return points


def in_wandb(folder: Path) -> Points:
    """W&B's transaction logs: LevelDB's format with a header of 7 bytes; values are JSON."""
    points: Points = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=os.path.getmtime):
        for record in map(Record.FromString, _records(path.read_bytes())):
            found = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
            step = int(found.get("_step", record.history.step.num))
            points += [(name, step, float(value)) for name, value in found.items() if name[0] != "_"]
    return points


def _records(data: bytes) -> Iterator[bytes]:
    block, at, parts = 32768, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if kind == 0:
            at += block - at % block
            continue
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def in_mlflow(folder: Path) -> Points:
    """MLflow's database beside the run folders: every point of the one run that it must have."""
    client = MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    run = only_mlflow_run(client)
    return [
        (m.key, m.step, m.value)
        for name in run.data.metrics
        for m in client.get_metric_history(run.info.run_id, name)
    ]


def only_mlflow_run(client: MlflowClient) -> Any:
    experiments = [e.experiment_id for e in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    return client.get_run(run.info.run_id)
