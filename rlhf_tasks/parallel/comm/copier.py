"""Copies between host memory and a device, beside what the device computes.

On CUDA the host memory is pinned and the copies have their own stream. On the CPU the "device" is a second buffer,
and a background thread copies, so that order and waits are the same.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor


class Arrival(Protocol):
    """A copy in progress."""

    def wait(self) -> None:
        """Everything that the device computes after this call sees the complete copy. Raises the copy's error."""
        ...

    def finish(self) -> None:
        """As `wait`, and the host sees the complete copy when this call returns."""
        ...


class Copier(Protocol):
    """Copies between host memory and one device, one after the other, in the order in which they are started."""

    def kept(self, parameter: Tensor) -> Tensor:
        """The parameter's values in host memory: same shape and dtype."""
        ...

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
        """Start to copy pairs (values, tensor of the same shape); returns at once.

        Of each pair one is in the host memory of `kept` or `host_zeros`, the other on the device, either way round.
        The values are those that all that was computed before this call leaves.
        """
        ...

    def close(self) -> None:
        """Wait for the copy in progress, and drop copies that have not begun."""
        ...


def copier(device: torch.device) -> Copier:
    """The copier to and from a device."""
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()


def host_zeros(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[elements] zeros in host memory, pinned where a CUDA device copies from it and to it."""
    return torch.zeros(elements, dtype=dtype, pin_memory=device.type == "cuda")


class ThreadCopier:
    """A `Copier` between buffers in host memory, on a background thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")

    def kept(self, parameter: Tensor) -> Tensor:
        """The parameter itself, same shape: it is in host memory already."""
        return parameter

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
        """Queue the copies of pairs of the same shape on the thread."""
        return _Running(self._thread.submit(_copy, pairs))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


class _Running:
    """A copy on a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    finish = wait


class StreamCopier:
    """A `Copier` between pinned memory and a CUDA device, on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def kept(self, parameter: Tensor) -> Tensor:
        """A copy in pinned memory: same shape and dtype."""
        return torch.empty_like(parameter, device="cpu", pin_memory=True).copy_(parameter)

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
        """Queue the copies of pairs of the same shape on the stream."""
        # Kernels queued earlier may still write the values, or read the memory that the new tensors have been given.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            _copy(pairs)
        event = torch.cuda.Event()
        event.record(self._stream)
        return _Queued(event)

    def close(self) -> None:
        self._stream.synchronize()


class _Queued:
    """A copy on a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def finish(self) -> None:
        self._event.synchronize()


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for values, there in pairs:
        there.copy_(values, non_blocking=True)
