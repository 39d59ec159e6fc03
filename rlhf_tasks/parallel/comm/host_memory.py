"""Copies between host memory and a device, beside what the device computes.

On CUDA the host memory is pinned and the copies have their own stream. On the CPU the "device" is a second buffer,
and a background thread copies, so that order and waits are the same.

Parameters may be kept in host memory and be on the device only while something needs them (`HostCopy`). Frozen ones
never change, so offloading only frees the device's memory. What trains is copied back to host memory first. Onloading
copies the weights from host memory while the device computes other things.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from mmap import MADV_DONTFORK, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from prefect_rlhf.rlhf_tasks.parallel.comm.checksums import checksums, require_same


class Arrival(NamedTuple):
    """A copy in progress.

    wait    everything that the device computes after this call sees the complete copy; raises the copy's error
    finish  as `wait`, and the host sees the complete copy when this call returns
    """

    wait: Callable[[], None]
    finish: Callable[[], None]


class Copier(Protocol):
    """Copies between host memory and one device, one after the other, in the order in which they are started."""

    def on_host(self, parameter: Tensor) -> Tensor:
        """The parameter's values in host memory: same shape and dtype."""
        ...

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
        """Start to copy pairs (values, tensor of the same shape); returns at once.

        Of each pair one is in the host memory of `on_host` or `host_zeros`, the other on the device, in either order.
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
    if device.type != "cuda" or not elements:
        return torch.zeros(elements, dtype=dtype)
    return torch.frombuffer(_PinnedPages(elements * dtype.itemsize), dtype=dtype, count=elements)


def host_copies(values: Sequence[Tensor], into: Sequence[Tensor] = ()) -> list[Tensor]:
    """Complete copies in host memory, same shapes and dtypes, pinned where the values are on a CUDA device.

    into  results of an earlier call for the same shapes, dtypes and devices, to be used again: pinning takes longer
          than copying
    """
    copies = [
        host_zeros(one.numel(), one.dtype, one.device).view(one.shape)
        if one.is_cuda
        else torch.empty_like(one)
        for one in (() if into else values)
    ] or list(into)
    for copy, one in zip(copies, values, strict=True):
        copy.copy_(one.detach(), non_blocking=True)
    if any(one.is_cuda for one in values):
        torch.cuda.current_stream().synchronize()
    return copies


class _PinnedPages(mmap):
    """Zeros that a CUDA device copies from and to. Their size is exact: torch pins the next power of two of bytes."""

    _address: int | None = None

    def __new__(cls, size_bytes: int) -> Self:
        pages = super().__new__(cls, -1, size_bytes, MAP_PRIVATE | MAP_ANONYMOUS)
        # Written after a fork, a page would move away from where the device looks.
        pages.madvise(MADV_DONTFORK)
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        try:
            torch.cuda.check_error(_cuda().cudaHostRegister(address, size_bytes, 0))
        except torch.cuda.CudaError as error:
            raise MemoryError(
                f"CUDA does not pin {size_bytes / 1e9:.2g} GB of host memory for copies to and from the device: "
                f"{error}. Raise the limit of locked memory (`ulimit -l unlimited`; of a container "
                "`--ulimit memlock=-1`), or give the host more memory."
            ) from error
        pages._address = address
        return pages

    def __del__(self) -> None:
        if self._address is not None:
            torch.cuda.synchronize()  # a copy from here may be under way
            torch.cuda.check_error(_cuda().cudaHostUnregister(self._address))


def _cuda() -> Any:
    return torch.cuda.cudart()


class ThreadCopier:
    """A `Copier` between buffers in host memory, on a background thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")

    def on_host(self, parameter: Tensor) -> Tensor:
        """The parameter itself, same shape: it is in host memory already."""
        return parameter

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
        result = self._thread.submit(_copy, pairs).result
        return Arrival(wait=result, finish=result)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


class StreamCopier:
    """A `Copier` between pinned memory and a CUDA device, on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def on_host(self, parameter: Tensor) -> Tensor:
        """A copy in pinned memory: same shape and dtype."""
        return host_copies([parameter])[0]

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
        # Kernels queued earlier may still write the values, or read the memory that the new tensors have been given.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            _copy(pairs)
        event = torch.cuda.Event()
        event.record(self._stream)
        return Arrival(lambda: torch.cuda.current_stream().wait_event(event), event.synchronize)

    def close(self) -> None:
        self._stream.synchronize()


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for values, there in pairs:
        there.copy_(values, non_blocking=True)


class HostCopy:
    """Tensors on the device that are kept in host memory. At first they are only there, not on the device.

    held     the tensors
    use      lets their owner use others of the same shapes; those without elements mean that they are offloaded
    changes  their values change while they are on the device
    what     they are, for the error where other bits come back than went
    named    gives what is on the device, by name; default: the tensors by their numbers

    The checksums of what leaves the device are compared with those of what comes back, so that both copies and host
    memory itself are covered, and nothing is read twice on the host.

    Using parameters while they are offloaded raises an error in torch, because they have no elements. Call `wait`
    before using them.
    """

    def __init__(
        self,
        held: Sequence[Tensor],
        use: Callable[[Sequence[Tensor]], None],
        copies: Copier,
        changes: bool = False,
        what: str = "parameters",
        named: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._held = list(held)
        self._what = what
        self._named = named or (lambda: {str(number): one for number, one in enumerate(self._held)})
        self._use = use
        self._copies = copies
        self._changes = changes
        self._arrival: Arrival | None = None
        self._on_host = [copies.on_host(tensor) for tensor in held]
        self._device = self._held[0].device if self._held else torch.device("cpu")
        self._left = self._sums()
        self._is_checked = False
        self._free()

    @classmethod
    def of_module(cls, module: nn.Module, copies: Copier, what: str = "parameters") -> "HostCopy":
        """Of a frozen module's parameters."""
        parameters = list(module.parameters())

        def use(tensors: Sequence[Tensor]) -> None:
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.data = tensor

        return cls(
            [parameter.data for parameter in parameters],
            use,
            copies,
            what=what,
            named=lambda: {name: parameter.data for name, parameter in module.named_parameters()},
        )

    @property
    def is_away(self) -> bool:
        """Whether the tensors are offloaded: no onload was started since the last offload."""
        return self._arrival is None

    def onload(self) -> None:
        """Start the copy to the device, into new tensors."""
        assert self.is_away, "the parameters are on the device already"
        self._held = [
            torch.empty_like(copy, device=away.device, pin_memory=False)
            for copy, away in zip(self._on_host, self._held, strict=True)
        ]
        self._arrival = self._copies.start(list(zip(self._on_host, self._held, strict=True)))
        self._is_checked = False
        self._use(self._held)

    def wait(self) -> None:
        """Everything computed after this call sees the parameters on the device.

        Raises InvariantError, the first time after an onload, where they are not those that left it.
        """
        assert self._arrival is not None, "the parameters are in host memory: no onload was started"
        self._arrival.wait()
        if not self._is_checked:
            self._is_checked = True
            require_same(f"{self._what}, from host memory", self._named(), self._left, self._sums())

    def offload(self) -> None:
        """Free the device's tensors. Waits for a copy in progress first, because it still writes to them. Where they
        change, host memory has their values when this call returns."""
        self.wait()
        if self._changes:
            self._left = self._sums()
            host_copies(self._held, self._on_host)
        self._free()

    def _sums(self) -> Tensor:
        return checksums(self._named().values(), self._device)

    def _free(self) -> None:
        self._arrival = None
        self._held = [tensor.new_empty(0) for tensor in self._held]
        self._use(self._held)
