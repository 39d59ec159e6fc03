"""Which blocks of the cache's memory each row has. Loads no torch: all ranks of a replica count alike.

A block has room for BLOCK tokens. A row has a block for each BLOCK of its columns; rows that began with the same
tokens have the blocks that these fill in common. Block 0 belongs to nobody: what no row keeps is written there.
"""

from collections import deque
from collections.abc import Sequence

from prefect_rlhf.rlhf_tasks.parallel.layout.work import BLOCK, blocks_of


class Blocks:
    """The blocks 1 .. count, and those of each row.

    rows  [blocks] of each row, in the order of its columns
    peak  most blocks that rows had at a time
    """

    def __init__(self, count: int) -> None:
        self.rows: list[list[int]] = []
        self.peak = 0
        self.count = count
        self._free = list(range(count, 0, -1))  # the last one is taken first: memory once used is used again
        self._users = [0] * (count + 1)  # rows that have a block

    @property
    def free(self) -> int:
        return len(self._free)

    def enter(self, columns: int, source: int | None, shared: int) -> None:
        """Give a sequence the next row, with room for its columns. The blocks that its first `shared` tokens fill are
        those of the row `source`; None: it has none in common."""
        common = [] if source is None else self.rows[source][: shared // BLOCK]
        for block in common:
            self._users[block] += 1
        self.rows.append(list(common))
        assert self.grow(len(self.rows) - 1, columns), "a sequence enters only where it has room"

    def grow(self, row: int, columns: int) -> bool:
        """Let a row have room for its columns. Returns whether there was enough; if not, nothing changes."""
        more = blocks_of(columns) - len(self.rows[row])
        if more > self.free:
            return False
        for _ in range(more):
            block = self._free.pop()
            self._users[block] = 1
            self.rows[row].append(block)
        self.peak = max(self.peak, self.count - self.free)
        return True

    def release(self, row: int) -> None:
        """Take a row's blocks away. Those that no other row has are free."""
        for block in reversed(self.rows[row]):
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
        self.rows[row] = []

    def extend(self, wanted: Sequence[tuple[int, int]]) -> list[int]:
        """Let rows have room for their columns, (row, columns) each. Where there is not enough for all, the last ones
        lose their blocks to those before. Returns the rows that lost theirs."""
        waiting, without = deque(wanted), list[int]()
        while waiting:
            row, columns = waiting.popleft()
            while not self.grow(row, columns):
                last, _ = waiting.pop() if waiting else (row, 0)
                self.release(last)
                without.append(last)
                if last == row:
                    break
        return without

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        for row in set(range(len(self.rows))).difference(rows):
            self.release(row)
        self.rows = [self.rows[row] for row in rows]
