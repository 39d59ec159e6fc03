"""Frozen parameters that lie in host memory and come to the device for their calls only.

Frozen weights never change: offloading only frees the device's memory, and a copy from the host's brings them back,
beside whatever the device computes meanwhile. On CUDA the host's memory is pinned and copies have a stream of their
own; on the CPU the "device" is a second buffer, filled by a background thread, so that order and waits are the same.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor, nn


class Arrival(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """What is computed from now on finds the copy complete. Raises what went wrong with it."""
        ...


class Copier(Protocol):
    """Copies from host memory to one device; one copy after the other, in the order in which they are started."""

    def kept(self, parameter: Tensor) -> Tensor:
        """The parameter's values in host memory."""
        ...

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
        """Start to copy (values in host memory, tensor on the device); returns at once."""
        ...

    def close(self) -> None:
        """Returns when nothing is under way; copies that have not begun are dropped."""
        ...


def copier(device: torch.device) -> Copier:
    """The copier to a device."""
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()


class ThreadCopier:
    """Copies between buffers in host memory, on a background thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="onload")

    def kept(self, parameter: Tensor) -> Tensor:
        return parameter

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
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
    """Copies from pinned memory on a CUDA stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def kept(self, parameter: Tensor) -> Tensor:
        return torch.empty_like(parameter, device="cpu", pin_memory=True).copy_(parameter)

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
        # The memory of a new tensor may still be read by kernels that were queued before it was freed
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
    """A frozen module whose parameters are kept in host memory; they are there first, and on no device.

    Using the module while its parameters are away is an error of torch (they have no elements); whoever hands it out
    calls `wait` before.
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
        """Whether no onload was started since the last offload."""
        return self._arrival is None

    def onload(self) -> None:
        """Start the copy to the device, into fresh tensors."""
        assert self.is_away, "the parameters are on the device already"
        pairs = []
        for name, parameter in self._parameters.items():
            parameter.data = torch.empty_like(self._kept[name], device=parameter.device, pin_memory=False)
            pairs.append((self._kept[name], parameter.data))
        self._arrival = self._copies.start(pairs)

    def wait(self) -> None:
        """What is computed from now on finds the parameters on the device."""
        assert self._arrival is not None, "the parameters are in host memory: no onload was started"
        self._arrival.wait()

    def offload(self) -> None:
        """Free the device's tensors. A copy that nobody has waited for must not outlive them: it is waited for."""
        if self._arrival is not None:
            self._arrival.wait()
        self._arrival = None
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)
