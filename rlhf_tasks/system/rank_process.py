"""The process of a rank: its memory and its threads.

Memory is on the CPU the process's anonymous memory, on CUDA the memory that torch has allocated.
"""

import contextlib
import ctypes
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
LARGE_BYTES = 1 << 20
"""Bytes from which a block is mapped: smaller ones would be mapped too often, larger ones come and go."""


class OutOfMemory(RuntimeError):
    """A device, or the host, has too little memory for a rank's work."""


def require_gpu() -> None:
    """Raises RuntimeError where torch cannot use this rank's GPU: it would compute on the CPU instead."""
    try:
        torch.cuda.init()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # torch's words for no driver, an old one, a build for CPUs
        raise RuntimeError(
            f"this worker offers a GPU, and torch {torch.__version__} cannot use it: {error}. Install a torch for "
            "the host's driver, or leave CUDA_VISIBLE_DEVICES empty to run on CPUs."
        ) from error


@contextlib.contextmanager
def told_when_out(what: str, device: torch.device) -> Iterator[None]:
    """Raises OutOfMemory when memory runs out inside, with what needed it and how to need less.

    what  the start of the sentence: what needed the memory
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch.OutOfMemoryError is for devices only; torch's allocator on the CPU raises RuntimeError.
        if not isinstance(
            error, (MemoryError, torch.OutOfMemoryError)
        ) and "can't allocate memory" not in str(error):
            raise
        held = process_bytes(device) / 2**30
        raise OutOfMemory(
            f"{what} has no memory left on {device} (this rank holds {held:.1f} GiB): give it more micro_batches, "
            f"more devices (tp, pp) or shorter sequences, or set plan: auto ({str(error).partition(chr(10))[0]})"
        ) from error


def process_bytes(device: torch.device) -> int:
    """Bytes that this rank holds now. On the CPU without the mapped pages of weight files (RssAnon, not RSS)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status("RssAnon")


def give_back() -> None:
    """Return unused memory to the kernel (where libc can) and to the devices, so that it does not count as held."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def map_large_blocks() -> None:
    """From now on have malloc map each large block by itself, and unmap it when it is freed (where libc can).

    By itself glibc raises its limit with the largest block that was freed, and then keeps such blocks in its heap.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, LARGE_BYTES)


def reset_peak(device: torch.device) -> None:
    """Make `peak_bytes` count from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _CLEAR.write_text(_RESET_PEAK)


def peak_bytes(device: torch.device) -> int:
    """Most bytes that this rank has held since the last reset.

    On the CPU the kernel records the peak of all resident pages. The present bytes of file and shared pages are
    subtracted, because they hardly change.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM") - _status("RssFile") - _status("RssShmem")


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_STATUS} has no {field}: this kernel does not report it.")


def take_stated_threads() -> None:
    """Give torch as many threads as the environment states now.

    torch reads the environment when it is loaded. In a fork, a fork server has loaded it, perhaps for other ranks.
    """
    stated = [re.match(r"\d+", os.environ.get(name, "")) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
    if numbers := [int(number[0]) for number in stated if number]:
        torch.set_num_threads(min(numbers))
