"""The pool itself: results, errors, hangs and deaths."""

import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import rendezvous

pytestmark = pytest.mark.dist

FACTOR = 3


def _sum(rank: int, world: int, value: float) -> tuple[int, int, float]:
    total = torch.tensor(value * FACTOR + rank)
    dist.all_reduce(total)
    return rank, world, total.item()


def _fail(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def _hang(rank: int, world: int) -> None:
    if rank == 0:
        time.sleep(60)


def _die(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def test_functions_of_a_test_file_run_on_ranks(ranks) -> None:
    assert ranks.run(2, _sum, 1.0) == [(0, 2, 7.0), (1, 2, 7.0)]
    assert ranks.run(1, _sum, 1.0) == [(0, 1, 3.0)]


def test_an_error_comes_back_with_its_traceback_and_the_pool_lives_on(ranks) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 of 2(?s:.*)_fail(?s:.*)broken on purpose"):
        ranks.run(2, _fail)
    assert ranks.run(2, _sum, 0.0)[0][2] == 1.0


def test_a_hang_and_a_death_end_and_the_pool_starts_again(ranks) -> None:
    ranks.run(2, _sum, 0.0)  # both have started
    with pytest.raises(TimeoutError, match=r"\[0\] of 2"):
        ranks.run(2, _hang, timeout=3.0)
    with pytest.raises(RuntimeError, match="died"):
        ranks.run(2, _die)
    assert ranks.run(2, _sum, 0.0)[1][2] == 1.0


class Struck(BaseException):
    """What a test's timeout raises, wherever the test is."""


def _strike(*_: Any) -> None:
    raise Struck


def _polled(connection: Connection, timeout: float | None = 0.0, *, poll=Connection.poll) -> bool:
    """Strikes where the test waits; other threads, a cluster's nannies among them, look as ever."""
    if threading.current_thread() is threading.main_thread():
        raise Struck
    return poll(connection, timeout)


@pytest.mark.parametrize("place", ["while ranks start", "while they work"])
def test_an_interrupted_run_leaves_nothing_to_be_read_as_a_later_result(
    ranks, monkeypatch, place: str
) -> None:
    pool = type(ranks)(ranks.nursery)
    try:
        with monkeypatch.context() as patch:
            if place == "while ranks start":
                patch.setattr(Connection, "poll", _polled)
            else:
                patch.setattr(pool, "_collect", _strike)
            with pytest.raises(Struck):
                pool.run(1, _sum, 5.0)
        assert pool.run(1, _sum, 1.0) == [(0, 1, 3.0)]
    finally:
        pool.close()


def _meet(rank: int, world: int) -> str:
    """Fails like gloo where another call of the function has left its keys."""
    store = rendezvous.store()
    assert store.add("came", 1) <= world, "Gloo connectFullMesh failed"
    return rendezvous.prefix


def test_ranks_that_have_not_found_each_other_are_started_anew_once(ranks, monkeypatch):
    collect, seen = ranks._collect, []

    def failing_at_first(n, timeout):
        seen.append(collect(n, timeout))
        return (
            seen[-1]
            if len(seen) > 1
            else ([], ["rank 0 of 2: the ranks have not found each other: gloo"], [])
        )

    monkeypatch.setattr(ranks, "_collect", failing_at_first)
    first, second = ranks.run(2, _meet)
    assert first == second
    assert len(seen) == 2
