"""Whether a wait for the disk makes progress. Pure: bytes and times are passed in.

A wait has no limit in total, because a commit may have any size. It is a fault when bytes stop moving.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """The slowest progress that a wait may make.

    floor_s            seconds in which there must be progress
    least_bytes_per_s  progress is this rate times `floor_s`, or the end of a file or of a rank's work
    """

    floor_s: float
    least_bytes_per_s: float

    @property
    def least_bytes(self) -> float:
        """Bytes to move in `floor_s` seconds."""
        return self.floor_s * self.least_bytes_per_s

    def __str__(self) -> str:
        return (
            f"fewer than {self.least_bytes:.0f} bytes in {self.floor_s:g} s; if the disk was only slow, raise "
            "runtime.patience"
        )


class Headway:
    """One wait, for one or several sources of bytes (ranks, or the controller's disk).

    A window of `pace.floor_s` seconds begins with the wait, and anew with each progress. The wait is overdue when a
    window ends without progress.
    """

    def __init__(self, pace: Pace, now: float) -> None:
        self._pace = pace
        self._since = now
        self._begun_bytes = 0  # of the total, when the window began
        self._total_bytes = 0
        self._of_source: dict[int, int] = {}

    def moved(self, source: int, total_bytes: int, now: float) -> None:
        """A source has moved so many bytes since it began to count. Repeats and old news change nothing."""
        new_bytes = total_bytes - self._of_source.get(source, 0)
        if new_bytes > 0:
            self._of_source[source] = total_bytes
            self._total_bytes += new_bytes
        if self._total_bytes - self._begun_bytes >= self._pace.least_bytes:
            self.advance(now)

    def advance(self, now: float) -> None:
        """A file, or a source's work, is at its end: that is progress, however small it was."""
        self._since, self._begun_bytes = now, self._total_bytes

    def overdue(self, now: float) -> bool:
        """Whether the present window has ended without progress."""
        return now - self._since > self._pace.floor_s
