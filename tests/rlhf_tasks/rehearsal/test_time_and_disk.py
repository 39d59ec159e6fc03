"""Time passes only by jumps, and the disk moves what it is asked to as fast as all of it can be moved."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefect_rlhf.rlhf_tasks.rehearsal.time_and_disk import Disk, NothingLeft, VirtualTime


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


def ends(moves, *, rate=10.0, thread=10.0, slow=()):
    """When each of some (start in s, bytes) ends. slow: (time in s, factor) pairs."""
    loop = VirtualTime()
    disk = Disk(loop, rate, thread)

    async def one(start_s, size_bytes):
        await asyncio.sleep(start_s)
        await disk.move(size_bytes)
        return loop.time()

    async def all_of_them():
        for at_s, factor in slow:
            loop.call_later(at_s, disk.slow_down, factor)
        return await asyncio.gather(*(one(*move) for move in moves))

    try:
        return loop.run_until_complete(all_of_them())
    finally:
        loop.close()


def test_alone_it_takes_bytes_over_rate():
    assert ends([(0, 100)]) == [pytest.approx(10.0)]


def test_one_thread_cannot_use_a_faster_disk_alone_but_several_can():
    assert ends([(0, 100)], rate=40.0) == [pytest.approx(10.0)]
    assert ends([(0, 100)] * 4, rate=40.0) == [pytest.approx(10.0)] * 4
    assert ends([(0, 100)] * 8, rate=40.0) == [pytest.approx(20.0)] * 8


def test_a_short_one_that_comes_later_makes_a_long_one_later():
    """By hand: 5 s alone (50 of 100), then 20 each until the short one's 20 are moved at 9 s, the last 30 alone."""
    assert ends([(0, 100), (5, 20)]) == [pytest.approx(12.0), pytest.approx(9.0)]


def test_what_is_cancelled_leaves_its_share_to_the_others():
    loop = VirtualTime()
    disk = Disk(loop, 10.0, 10.0)

    async def run():
        given_up = loop.create_task(disk.move(100, "one"))
        loop.call_later(4.0, given_up.cancel)
        loop.call_later(2.0, lambda: seen.append(disk.in_progress()))
        await disk.move(50, "other")
        return loop.time()

    seen = []
    try:
        # 5 bytes a second for 4 s, then 10 for 3.
        assert loop.run_until_complete(run()) == pytest.approx(7.0)
    finally:
        loop.close()
    assert dict(seen[0]) == {"one": pytest.approx(10.0), "other": pytest.approx(10.0)}


def test_a_slow_time_stretches_what_is_moved_in_it():
    """5 s at 10, 10 s at 2.5, the rest at 10 again."""
    assert ends([(0, 100)], slow=[(5, 4.0), (15, 1 / 4)]) == [pytest.approx(17.5)]


def test_slow_times_that_overlap_multiply():
    """By hand: 20 at 10, 10 at 5, 20 / 6 at 10 / 6, 20 / 3 at 10 / 3, and the last 60 at 10 again."""
    assert ends([(0, 100)], slow=[(2, 2.0), (4, 3.0), (6, 1 / 2), (8, 1 / 3)]) == [pytest.approx(14.0)]
