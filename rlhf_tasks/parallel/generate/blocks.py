"""Which blocks of the cache's memory each row has. Loads no torch: all ranks of a replica count alike.

A block has room for BLOCK tokens. A row has a block for each BLOCK of its columns; rows that began with the same
tokens have the blocks that these fill in common. Block 0 belongs to nobody: what no row keeps is written there.

A sequence that leaves its row to come back parks its blocks. They are its own until others have no room without them.
"""

from collections import Counter, deque
from collections.abc import Sequence

from prefect_rlhf.rlhf_tasks.parallel.layout.work import BLOCK, blocks_of


class Blocks:
    """The blocks 1 .. count, and those of each row.

    rows    [blocks] of each row, in the order of its columns
    parked  [blocks] of each sequence that has left its row to come back, by its place
    peak    most blocks that rows, or parked sequences, had at a time
    """

    def __init__(self, count: int) -> None:
        self.rows: list[list[int]] = []
        self.parked: dict[int, list[int]] = {}
        self.peak = 0
        self.count = count
        self._free = list(range(count, 0, -1))  # the last one is taken first: memory once used is used again
        self._users = [0] * (count + 1)  # rows that have a block

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def reclaimable(self) -> int:
        """Blocks that only parked sequences have."""
        users = Counter(block for blocks in self.parked.values() for block in blocks)
        return sum(self._users[block] == count for block, count in users.items())

    def pinned(self, place: int) -> int:
        """Of the blocks that a sequence has parked, those that a row has too."""
        in_rows = {block for blocks in self.rows for block in blocks}
        return sum(block in in_rows for block in self.parked.get(place, ()))

    def enter(self, columns: int, source: int | None, shared: int, own: Sequence[int] = ()) -> None:
        """Give a sequence the next row, with room for its columns.

        The blocks that its first `shared` tokens fill are those of the row `source`; None: it has none in common.
        own: those that it had parked
        """
        common = [] if source is None else self.rows[source][: shared // BLOCK]
        for block in common:
            self._users[block] += 1
        self.rows.append([*common, *own])
        assert self.grow(len(self.rows) - 1, columns), "a sequence enters only where it has room"

    def grow(self, row: int, columns: int) -> bool:
        """Let a row have room for its columns. Sequences lose what they have parked for it, the last places first.
        Returns whether there was enough; if not, the row is as it was."""
        more = blocks_of(columns) - len(self.rows[row])
        while more > self.free and self.parked:
            self.unpark(max(self.parked))
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
        self._let_go(self.rows[row])
        self.rows[row] = []

    def park(self, row: int, place: int) -> None:
        """Take a row's blocks away, and have them ready for the sequence at a place."""
        self.parked[place], self.rows[row] = self.rows[row], []

    def unpark(self, place: int) -> None:
        """Let a sequence have nothing parked."""
        self._let_go(self.parked.pop(place, []))

    def _let_go(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)

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
