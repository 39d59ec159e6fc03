"""What benches share: options, ways that take turns, medians with their range, figures in files, ranks."""

import json
import os
import platform
import subprocess
import sys
import time
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import psutil

from prefect_rlhf.rlhf_tasks.controller.controller import Rendezvous
from prefect_rlhf.rlhf_tasks.system.failpoints import VARIABLE

T = TypeVar("T")

Store = tuple[str, int, str]
"""Host, port and prefix of a rendezvous."""


def options(page: str | None) -> ArgumentParser:
    """A parser of options whose help is the module's docstring as it stands."""
    return ArgumentParser(description=page, formatter_class=RawDescriptionHelpFormatter)


class Spread(NamedTuple):
    """Figures of the same thing."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> "Spread":
        return cls(median(figures), min(figures), max(figures))

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.least:.4g} to {self.most:.4g})"


def in_turn(ways: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 0) -> dict[str, list[T]]:
    """Every way once in each round, so that whatever slows the machine down affects all of them alike.

    warm_up  rounds before these, whose results are dropped
    """
    results: dict[str, list[T]] = {way: [] for way in ways}
    for number in range(warm_up + rounds):
        for way, work in ways.items():
            result = work()
            if number >= warm_up:
                results[way].append(result)
    return results


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that some work takes once, by a clock."""
    began_s = clock()
    work()
    return clock() - began_s


def cpu_s(pid: int) -> float:
    """CPU seconds so far of a process and all its descendants."""
    me, seconds = psutil.Process(pid), 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            seconds += sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:  # a child that has just ended: its work is over before iterations begin
            continue
    return seconds


def command(*words: str, log: Path | None = None, failpoint: str = "") -> float:
    """Run `prefect-rlhf` with these words to its end; the seconds that it took.

    log  the file to which its output is appended
    """
    began_s = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-m", "prefect_rlhf.flows.cli", *words],
        env={**os.environ, VARIABLE: failpoint},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if log is not None:
        with log.open("a") as file:
            file.write(ended.stdout)
    if ended.returncode:
        raise SystemExit(f"prefect-rlhf {' '.join(words)}: {ended.stdout[-6000:]}")
    return time.perf_counter() - began_s


def write(figures: Any, path: Path | None) -> None:
    """Write figures as JSON, with the machine on which they were measured. None: nowhere."""
    if path is not None:
        machine = {
            "platform": platform.platform(),
            "cpus": psutil.cpu_count(),
            "python": platform.python_version(),
            "date": date.today().isoformat(),
        }
        path.write_text(json.dumps({"machine": machine, "figures": figures}, indent=1) + "\n")


def on_ranks(n_ranks: int, function: Callable[..., T], *arguments: Any) -> list[T]:
    """Call `function(rank, store, *arguments)` on as many new processes, without Prefect and Dask. In rank order.

    store  (host, port, prefix) of a rendezvous of their own
    Each rank has one thread; where there are enough cores, rank r runs on core r. Raises RuntimeError with the
    traceback of a rank that failed.
    """
    rendezvous, context, ranks = Rendezvous("127.0.0.1"), get_context("spawn"), []
    store: Store = (rendezvous.host, rendezvous.port, "bench")
    for rank in range(n_ranks):
        ours, theirs = context.Pipe()
        work = (function, rank, store, *arguments)
        process = context.Process(target=_rank, args=(rank, n_ranks, theirs, work), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        answers = [pipe.recv() for _, pipe in ranks]
    finally:
        for process, _ in ranks:
            process.join(5.0)
            process.kill()
        rendezvous.close()
    for rank, (done, value) in enumerate(answers):
        if not done:
            raise RuntimeError(f"rank {rank}: {value}")
    return [value for _, value in answers]


def _rank(rank: int, n_ranks: int, pipe: Connection, work: Sequence[Any]) -> None:
    """A rank process: sends what a function returns, or its traceback."""
    import torch

    cores = sorted(os.sched_getaffinity(0))
    if n_ranks <= len(cores):  # two on one core would wait for each other while another idles
        os.sched_setaffinity(0, {cores[rank]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    function, *arguments = work
    try:
        pipe.send((True, function(*arguments)))
    except BaseException:  # noqa: BLE001  sent to the parent, which raises it
        pipe.send((False, traceback.format_exc()))
