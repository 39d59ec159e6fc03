"""State that is kept in host memory and passes through the device piece by piece."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlhf_tasks.parallel.comm.copier import Arrival, Copier


def streamed(
    state: Sequence[Tensor], ranges: Sequence[tuple[int, int]], device: torch.device, copies: Copier
) -> Iterator[list[Tensor]]:
    """For each range (start, stop) of elements: its pieces of all tensors on the device, [stop - start] each.

    state  tensors [elements] in host memory. What is in the pieces when the next ones are asked for goes back there

    There are two buffers: while one piece is used, the next one arrives. When the iterator is exhausted, host memory
    is complete.
    """
    most = max(stop - start for start, stop in ranges)
    buffers = [[torch.empty(most, dtype=held.dtype, device=device) for held in state] for _ in range(2)]
    returning: list[Arrival | None] = [None, None]

    def pairs(number: int) -> list[tuple[Tensor, Tensor]]:
        """(in host memory, on the device) of a range."""
        start, stop = ranges[number]
        return [
            (held[start:stop], buffer[: stop - start])
            for held, buffer in zip(state, buffers[number % 2], strict=True)
        ]

    arriving = copies.start(pairs(0))
    for number in range(len(ranges)):
        here = arriving
        if number + 1 < len(ranges):
            leaves = returning[(number + 1) % 2]
            if leaves is not None:
                leaves.wait()
            arriving = copies.start(pairs(number + 1))
        here.wait()
        yield [piece for _, piece in pairs(number)]
        returning[number % 2] = copies.start([(piece, held) for held, piece in pairs(number)])
    for leaves in returning:
        if leaves is not None:
            leaves.finish()
