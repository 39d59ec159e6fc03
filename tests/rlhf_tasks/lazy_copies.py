"""The most awkward copies that are allowed: until somebody waits for them, they have not begun, and what they write
to is not a number."""

import math
from collections.abc import Sequence

from torch import Tensor

from rlhf_tasks.parallel.comm.host_memory import ThreadCopier


class LazyCopier(ThreadCopier):
    """Copies at the last moment: when somebody waits. started: the number of copies."""

    started = 0

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> "LazyArrival":
        self.started += 1
        for _, there in pairs:
            there.fill_(math.nan)
        return LazyArrival(pairs)


class LazyArrival:
    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pairs = pairs

    def wait(self) -> None:
        for values, there in self._pairs:
            there.copy_(values)
        self._pairs = ()

    finish = wait
