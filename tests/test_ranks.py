"""The pool itself: results, errors, hangs and deaths."""

import os
import time

import pytest
import torch
import torch.distributed as dist

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
    with pytest.raises(TimeoutError, match=r"\[0\] of 2"):
        ranks.run(2, _hang, timeout=5.0)
    with pytest.raises(RuntimeError, match="died"):
        ranks.run(2, _die)
    assert ranks.run(2, _sum, 0.0)[1][2] == 1.0
