"""Frozen parameters that are kept in host memory and are on the device only during their calls.

Frozen weights never change, so offloading only frees the device's memory. Onloading copies the weights from host
memory while the device computes other things. On CUDA the host memory is pinned and the copies have their own stream.
On the CPU the "device" is a second buffer that a background thread fills, so that order and waits are the same.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor, nn


class Arrival(Protocol):
    """A copy in progress."""

    def wait(self) -> None:
        """Everything computed after this call sees the complete copy. Raises the copy's error."""
        ...


class Copier(Protocol):
    """Copies from host memory to one device, one copy after the other, in the order in which they are started."""

    def kept(self, parameter: Tensor) -> Tensor:
        """The parameter's values in host memory: same shape and dtype."""
        ...

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
        """Start to copy pairs (values in host memory, tensor of the same shape on the device); returns at once."""
        ...

    def close(self) -> None:
        """Wait for the copy in progress, and drop copies that have not begun."""
        ...


def copier(device: torch.device) -> Copier:
    """The copier to a device."""
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()


class ThreadCopier:
    """A `Copier` between buffers in host memory, on a background thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="onload")

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


class StreamCopier:
    """A `Copier` from pinned memory to a CUDA device, on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def kept(self, parameter: Tensor) -> Tensor:
        """A copy in pinned memory: same shape and dtype."""
        return torch.empty_like(parameter, device="cpu", pin_memory=True).copy_(parameter)

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
        """Queue the copies of pairs of the same shape on the stream."""
        # Kernels queued earlier may still read the memory that the new tensors have been given.
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


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for values, there in pairs:
        there.copy_(values, non_blocking=True)


class HostCopy:
    """A frozen module whose parameters are kept in host memory. At first they are only there, not on the device.

    Using the module while its parameters are offloaded raises an error in torch, because they have no elements. Call
    `wait` before using the module.
    """

    def __init__(self, module: nn.Module, copies: Copier) -> None:
        self._parameters = dict(module.named_parameters())
        self._copies = copies
        self._arrival: Arrival | None = None
        with torch.no_grad():
            self._kept: Mapping[str, Tensor] = {
                name: copies.kept(parameter.data) for name, parameter in self._parameters.items()
            }
        self.offload()

    @property
    def is_away(self) -> bool:
        """Whether the parameters are offloaded: no onload was started since the last offload."""
        return self._arrival is None

    def onload(self) -> None:
        """Start the copy to the device, into new tensors."""
        assert self.is_away, "the parameters are on the device already"
        pairs = []
        for name, parameter in self._parameters.items():
            parameter.data = torch.empty_like(self._kept[name], device=parameter.device, pin_memory=False)
            pairs.append((self._kept[name], parameter.data))
        self._arrival = self._copies.start(pairs)

    def wait(self) -> None:
        """Everything computed after this call sees the parameters on the device."""
        assert self._arrival is not None, "the parameters are in host memory: no onload was started"
        self._arrival.wait()

    def offload(self) -> None:
        """Free the device's tensors. Waits for a copy in progress first, because it still writes to them."""
        if self._arrival is not None:
            self._arrival.wait()
        self._arrival = None
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)
