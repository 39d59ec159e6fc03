"""The process of one tracker: reads the committed rows of `metrics.jsonl`, and hands them to the tracker's store.

Messages come on standard input, answers leave on the original standard output, each one line of JSON. The first
message says which store and run; each later one how many iterations are committed, the last also whether the run has
`finished`. The answer to each is how many iterations the store has, or what went wrong, after which the process ends.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flows.trackers.stores import STORES, Store, TrackedRun
from rlhf_tasks.checkpoint.journals import METRICS, is_row
from rlhf_tasks.system.durable import replace_file
from rlhf_tasks.system.reading import ConfigError, one_line, read_json, reading

TRACKERS = "trackers"  # in a run folder: what each tracker has, and what it has printed


def serve() -> None:
    """The process's own life, until it is told how the run has ended."""
    messages, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # nobody answers a tracker that asks for a login
    os.dup2(2, 1)  # what it prints is no answer
    try:
        for done in _served(messages):
            answers.write(json.dumps({"done": done}).encode() + b"\n")
    except Exception as error:  # noqa: BLE001  a tracker may raise anything
        fault = f"{type(error).__name__}: {one_line(str(error))}"
        answers.write(json.dumps({"fault": fault}).encode() + b"\n")


def _served(messages: Any) -> Iterator[int]:
    begin = json.loads(messages.readline())
    tracker, folder = begin["tracker"], Path(begin["folder"])
    state = folder / TRACKERS / f"{tracker}.json"
    run = TrackedRun(folder.name, folder, begin["config"])
    # None yet, or a damaged one: the store begins anew.
    with suppress(ConfigError), reading(state, "no state of a tracker", remedy="Remove it."):
        known = read_json(state)
        run.id, run.done = str(known["id"]), int(known["done"])
    store = STORES[tracker](run)
    _keep(state, run)
    rows = _JournalRows(folder / METRICS)
    yield run.done
    for line in messages:
        message = json.loads(line)
        if run.done < message["rows"]:
            _log(store, run, rows, message["rows"])
            _keep(state, run)
        if "finished" in message:
            store.close(message["finished"])
            yield run.done
            return
        yield run.done


def _log(store: Store, run: TrackedRun, rows: "_JournalRows", committed: int) -> None:
    """Log the committed iterations that the store does not have."""
    for row in rows.before(committed):
        iteration = int(row["iteration"])
        if iteration >= run.done or (iteration < 0 and not run.done):  # of before the first one
            store.log(iteration + 1, {name: value for name, value in row.items() if value is not None})
            run.done = iteration + 1
    store.flush()


def _keep(state: Path, run: TrackedRun) -> None:
    replace_file(state, json.dumps({"id": run.id, "done": run.done}) + "\n")


class _JournalRows:
    """The rows of a journal, each read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_bytes = path, 0

    def before(self, iteration: int) -> Iterator[Mapping[str, Any]]:
        """The next rows, up to that iteration: later ones may belong to a commit that fails."""
        with open(self._path, "rb") as file:
            file.seek(self._read_bytes)
            while is_row(line := file.readline()) and (row := json.loads(line))["iteration"] < iteration:
                self._read_bytes += len(line)
                yield row
