"""The loop in virtual time: seconds pass by jumps, and what an executor does takes what it says."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_tasks.rehearsal.virtual_time import NothingLeft, VirtualTime


@pytest.fixture
def loop():
    made = VirtualTime()
    yield made
    made.close()


def test_a_day_passes_at_once_and_timers_come_in_order(loop):
    seen = []

    async def day():
        loop.call_later(86_400.0, lambda: seen.append(("day", loop.time())))
        loop.call_later(60.0, lambda: seen.append(("minute", loop.time())))
        await asyncio.sleep(90_000.0)

    began = time.monotonic()
    loop.run_until_complete(day())
    assert time.monotonic() - began < 60
    assert seen == [("minute", pytest.approx(60.0)), ("day", pytest.approx(86_400.0))]
    assert loop.time() == pytest.approx(90_000.0)


def test_work_in_an_executor_takes_virtual_seconds_one_piece_after_the_other(loop):
    one_thread = ThreadPoolExecutor(1)

    def write(seconds):
        loop.takes(asyncio.sleep(seconds))
        return seconds

    async def two():
        pieces = [loop.run_in_executor(one_thread, write, seconds) for seconds in (5.0, 3.0)]
        first = await pieces[0]
        at = loop.time()
        return first, at, await pieces[1], loop.time()

    assert loop.run_until_complete(two()) == (5.0, pytest.approx(5.0), 3.0, pytest.approx(8.0))


def test_what_work_in_an_executor_raises_reaches_whoever_awaits_it(loop):
    async def full():
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        loop.run_until_complete(loop.run_in_executor(None, lambda: loop.takes(full())))


def test_a_program_that_waits_for_nothing_is_told(loop):
    with pytest.raises(NothingLeft):
        loop.run_until_complete(loop.create_future())
