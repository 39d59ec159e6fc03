"""Memory of one rank: anonymous memory of the process on the CPU, torch's own account on CUDA."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)


class OutOfMemory(RuntimeError):
    """A device, or the host, has no memory left for what a rank was told to do."""


@contextlib.contextmanager
def told_when_out(what: str, device: torch.device) -> Iterator[None]:
    """Where memory runs out inside, say what needed it and what makes it less.

    Raises:
        OutOfMemory: from torch's error, or Python's
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has a class for devices alone; its allocator on the CPU raises a RuntimeError.
        if not isinstance(
            error, (MemoryError, torch.OutOfMemoryError)
        ) and "can't allocate memory" not in str(error):
            raise
        held = process_bytes(device) / 2**30
        raise OutOfMemory(
            f"{what} has no memory left on {device} (this rank holds {held:.1f} GiB): give it more micro_batches, "
            f"more devices (tp, pp) or shorter sequences, or say plan: auto ({str(error).partition(chr(10))[0]})"
        ) from error


def process_bytes(device: torch.device) -> int:
    """What this rank holds now. On the CPU without the mapped pages of weight files (RssAnon, not RSS)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status("RssAnon")


def give_back() -> None:
    """Return free memory to the kernel and to the devices, so that it does not count as held. Does nothing to the
    former where libc cannot."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` count from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _CLEAR.write_text(_RESET_PEAK)


def peak_bytes(device: torch.device) -> int:
    """The most that this rank has held since the last reset.

    On the CPU the kernel keeps the peak of all resident pages; files and shared pages are taken off as they are
    now, since they hardly change.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM") - _status("RssFile") - _status("RssShmem")


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_STATUS} has no {field}: this kernel does not tell.")
