"""Whether a wait makes progress, by bytes and never by a total of seconds."""

from prefect_rlhf.rlhf_tasks.protocol.progress import Headway, Pace

PACE = Pace(floor_s=10, least_bytes_per_s=5)  # 50 bytes in 10 s


def wait(moves: dict[int, int], source: int = 0) -> list[int]:
    """The seconds from 0 to 40 at which a wait with these moves (second -> total bytes) is overdue."""
    headway, late = Headway(PACE, 0), []
    for now in range(41):
        if now in moves:
            headway.moved(source, moves[now], now)
        if headway.overdue(now):
            late.append(now)
    return late


def test_a_wait_without_bytes_ends_after_the_floor():
    assert wait({}) == list(range(11, 41))


def test_a_wait_at_the_least_rate_never_ends():
    assert wait({now: 5 * now for now in range(0, 41, 5)}) == []


def test_a_wait_below_the_least_rate_ends():
    assert wait({now: 4 * now for now in range(0, 41, 5)})[0] == 11


def test_bytes_from_long_ago_are_no_credit():
    """A fast disk that hangs is noticed as soon as a slow one."""
    assert wait({1: 10**9}) == list(range(12, 41))


def test_old_news_and_repeats_are_no_progress():
    assert wait({1: 100, 9: 100, 10: 60}) == wait({1: 100})


def test_sources_count_together():
    headway = Headway(PACE, 0)
    for now in range(0, 40, 5):
        for rank in range(5):
            headway.moved(rank, now + 1, now)
        assert not headway.overdue(now)


def test_the_end_of_something_is_progress_however_small():
    headway = Headway(PACE, 0)
    headway.advance(9)
    assert (headway.overdue(19), headway.overdue(19.1)) == (False, True)
