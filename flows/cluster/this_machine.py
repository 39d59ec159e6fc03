"""This machine: its GPUs, the kind of its devices, and the memory of a CPU slot. Loads no torch."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import takewhile
from math import inf
from pathlib import Path

from prefect_rlhf.flows.cluster import cuda_driver
from prefect_rlhf.planner.pricing.devices import DeviceProfile, Gpu, device_of, preset
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError

DEVICES = Path("/dev")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of a container: version 2, version 1
CPU_SLOT = "cpu-slot"
VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""torch takes the lesser of the first two. A nanny sets to 1 each of the three that its process lacks."""
CPU_RANKS = 2  # faster than one rank of all threads in every work that was compared, on two cores
FILES, FILES_OF_A_RANK = 128, 16
"""Open files of the process of a run, and of its ranks: 2 ranks take 74, 4 take 98. A rank itself takes about 40."""
FILES_WANTED = 4096  # where more than the limit are needed, and may be had
DRIVER_S = 60.0  # that CUDA's driver may take to describe the GPUs; mostly it takes one


def device_here(slots: int) -> DeviceProfile:
    """The device of this machine's ranks, with an equal share of the machine's memory: the GPU of each, or a CPU slot
    where no GPU is visible.

    slots  number of ranks of this machine
    Raises ConfigError where the driver does not answer, and where the ranks would have GPUs of several kinds.
    """
    if gpus_here():
        device = _alike(described_gpus(os.environ)[:slots])
        return device.model_copy(update={"host_memory_bytes": memory_bytes() // slots})
    slot = preset(CPU_SLOT)
    return slot.model_copy(update={"memory_bytes": max(1, memory_bytes() // slots - slot.process_bytes)})


def ranks_here() -> int:
    """The number of ranks of this machine, if nobody states it: one for each visible GPU, up to the first of another
    kind, or `CPU_RANKS` that share the cores. Raises ConfigError where CUDA's driver does not answer."""
    if not gpus_here():
        return min(CPU_RANKS, cores_here())
    kinds = [device_of(gpu).name for gpu in described_gpus(os.environ)]
    return len(list(takewhile(lambda kind: kind == kinds[0], kinds)))


def gpus_here() -> tuple[str, ...]:
    """The name of each visible NVIDIA GPU of this machine in CUDA_VISIBLE_DEVICES, found without loading torch."""
    return visible_gpus(os.environ.get(VISIBLE), len(list(DEVICES.glob("nvidia[0-9]*"))))


def visible_gpus(stated: str | None, n_gpus: int) -> tuple[str, ...]:
    """The names of the GPUs that CUDA shows, in its order, each as a rank's own CUDA_VISIBLE_DEVICES must name it.

    stated  value of CUDA_VISIBLE_DEVICES: indices or UUIDs (GPU-..., MIG-...), separated by commas. CUDA shows the
            entries before the first invalid one, such as -1 or an empty one. None: it is not set, all are visible
    n_gpus  GPUs of this machine
    Raises ConfigError for an index that no GPU has, and for a repeated one, for which CUDA would show none.
    """
    if stated is None:
        return tuple(map(str, range(n_gpus)))
    if not n_gpus:
        return ()
    names: list[str] = []
    for name in map(str.strip, stated.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", name):
            break
        names.append(str(int(name)) if name.isdigit() else name)
    outside = next((name for name in names if name.isdigit() and int(name) >= n_gpus), None)
    if outside is not None:
        raise ConfigError(
            f"{VISIBLE}={stated}: this machine has {n_gpus} GPUs, and none has the index {outside}. Name some of "
            f"0 to {n_gpus - 1}, or leave the variable out."
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"{VISIBLE}={stated} names a GPU twice, and CUDA then shows none. Name each once.")
    return tuple(names)


def described_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The visible GPUs as CUDA's driver describes them, at least one. Raises ConfigError where it does not."""
    named = tuple((name, environment[name]) for name in (VISIBLE, "CUDA_DEVICE_ORDER") if name in environment)
    return _described(named)


@cache
def _described(named: tuple[tuple[str, str], ...]) -> tuple[Gpu, ...]:
    """named  the variables that choose and order GPUs"""
    command = [sys.executable, "-I", str(Path(cuda_driver.__file__))]
    try:
        asked = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DRIVER_S,
            env={**os.environ, **dict(named)},
            check=False,
        )
        fault = asked.stderr.strip().rpartition("\n")[2] if asked.returncode else ""
        found = [] if fault else [json.loads(line) for line in asked.stdout.splitlines()]
    except subprocess.TimeoutExpired:
        fault, found = f"it took longer than {DRIVER_S:g} s", []
    if not found:
        raise ConfigError(
            f"CUDA's driver does not describe this machine's GPUs: {fault or 'it shows none'}. Repair the "
            f"driver, correct {VISIBLE}, or leave that empty to run on CPUs."
        )
    return tuple(Gpu(**{**one, "capability": tuple(one["capability"])}) for one in found)


def _alike(gpus: Sequence[Gpu]) -> DeviceProfile:
    """The device of GPUs of one kind: the one with the least memory. Raises ConfigError where they differ in kind."""
    devices = [device_of(gpu) for gpu in gpus]
    kinds = list(dict.fromkeys(device.name for device in devices))
    if len(kinds) > 1:
        raise ConfigError(
            f"the ranks of this machine would have GPUs of several kinds ({', '.join(kinds)}). Name those of one "
            f"kind by {VISIBLE}."
        )
    return min(devices, key=lambda device: device.memory_bytes)


def cores_here() -> int:
    """CPU cores that this process may use: those of its affinity mask, or as many as its container has time for."""
    return max(1, int(min(len(os.sched_getaffinity(0)), _quota())))


def _quota() -> float:
    """Cores whose time a container may use; infinite where there is no limit."""
    with suppress(OSError, ValueError):  # version 2: "200000 100000", or "max 100000"
        limit, period = (CONTROL_GROUPS / "cpu.max").read_text().split()
        return int(limit) / int(period)
    with suppress(OSError, ValueError):  # version 1: -1 without a limit
        limit, period = (
            int((CONTROL_GROUPS / "cpu" / f"cpu.cfs_{what}_us").read_text()) for what in ("quota", "period")
        )
        if limit > 0:
            return limit / period
    return inf


def allow_open_files(n_ranks: int) -> None:
    """Raise this process's limit of open files where `n_ranks` ranks of this machine need it, also for the processes
    that it starts. Raises ConfigError where the limit may not be raised so far."""
    needed = FILES + FILES_OF_A_RANK * n_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, most = (inf if n == resource.RLIM_INFINITY else n for n in (soft, hard))
    if limit >= needed:
        return
    if most < needed:
        raise ConfigError(
            f"this process may open {most:.0f} files, and a run of {n_ranks} ranks needs {needed}. Raise the limit, "
            f"for example by `ulimit -n {max(needed, FILES_WANTED)}` as root, or use fewer ranks."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(min(most, max(needed, FILES_WANTED))), hard))


def threads_environment(n_ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that give each of `n_ranks` ranks on this machine an equal share of its cores.

    environment  of this process: a user's OMP_NUM_THREADS counts instead of the share, and a user's OMP_WAIT_POLICY
                 is left alone. Without one, threads that wait for each other sleep: those that spin would take the
                 cores from the controller, the server and other ranks
    """
    threads = environment.get("OMP_NUM_THREADS", str(max(1, cores_here() // n_ranks)))
    return {
        **dict.fromkeys(THREADS, threads),
        "OMP_WAIT_POLICY": environment.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


def threads_of_ranks(n_ranks: int) -> int:
    """Threads of each of `n_ranks` ranks of a cluster of our own on this machine."""
    stated = re.match(r"\d+", threads_environment(n_ranks, os.environ)[THREADS[0]])
    return 1 if stated is None else int(stated[0])


def memory_bytes() -> int:
    """Bytes of memory that this machine has, or that its container may use."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in LIMITS:
        with suppress(OSError, ValueError):  # no such control group, or no limit ("max")
            sizes.append(int((CONTROL_GROUPS / name).read_text()))
    return min(sizes)
