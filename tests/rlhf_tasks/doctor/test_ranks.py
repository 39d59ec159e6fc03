"""Rank processes that are started for one call: results, errors, deaths, silence."""

import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from rlhf_tasks.doctor.ranks import run_ranks
from rlhf_tasks.system.reading import ConfigError

pytestmark = pytest.mark.dist


def _sum(rank: int, device: torch.device, value: float) -> float:
    total = torch.tensor(value + rank, device=device)
    dist.all_reduce(total)
    return total.item()


def _die(rank: int, device: torch.device, sleeps_s: float) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(sleeps_s)


def _spawned() -> set[int]:
    """Processes that multiprocessing has started here; other tests' clusters may have some."""
    return {p.pid for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())}


@pytest.mark.whole
def test_results_come_in_rank_order_and_no_process_stays():
    before = _spawned()
    assert run_ranks(2, _sum, (1.0,), 100.0) == [3.0, 3.0]
    assert _spawned() <= before


@pytest.mark.whole
def test_an_error_comes_with_its_rank_and_a_death_with_its_likely_cause(monkeypatch):
    monkeypatch.setattr("rlhf_tasks.doctor.ranks.GRACE_S", 0.5)
    with pytest.raises(RuntimeError, match=r"rank [01] of 2: (?s:.*)TypeError"):
        run_ranks(2, _sum, ("a",), 100.0)
    with pytest.raises(ConfigError, match=r"rank 1 was ended, as the kernel does when memory runs out"):
        run_ranks(2, _die, (60.0,), 100.0)
