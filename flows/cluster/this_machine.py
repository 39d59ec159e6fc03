"""This machine: the kind of its devices and the memory of a CPU slot. Loads no torch."""

import os
from contextlib import suppress
from pathlib import Path

from planner.pricing.devices import DeviceProfile, preset, preset_of_gpu

GPUS = Path("/proc/driver/nvidia/gpus")  # the driver's descriptions, which need no torch
CONTROL_GROUPS = Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of a container: version 2, version 1
CPU_SLOT = "cpu-slot"


def device_here(slots: int) -> DeviceProfile:
    """The preset of this machine's devices: that of its GPU, if there is a known one, else that of a CPU slot.

    slots  number of CPU slots that share this machine's memory
    """
    described = (path.read_text() for path in sorted(GPUS.glob("*/information")))
    models = [line for text in described for line in text.splitlines() if line.startswith("Model:")]
    known = next((name for name in map(preset_of_gpu, models) if name is not None), None)
    if known is not None:
        return preset(known)
    slot = preset(CPU_SLOT)
    return slot.model_copy(update={"memory_bytes": max(1, memory_bytes() // slots - slot.process_bytes)})


def gpus_here() -> int:
    """Number of NVIDIA GPUs of this machine, found without loading torch."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def memory_bytes() -> int:
    """Bytes of memory that this machine has, or that its container may use."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in LIMITS:
        with suppress(OSError, ValueError):  # no such control group, or no limit ("max")
            sizes.append(int((CONTROL_GROUPS / name).read_text()))
    return min(sizes)
