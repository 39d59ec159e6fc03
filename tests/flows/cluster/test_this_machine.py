"""The devices that are assumed where a configuration names none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_rlhf.flows.cluster import this_machine
from prefect_rlhf.flows.cluster.this_machine import (
    cores_here,
    described_gpus,
    device_here,
    gpus_here,
    memory_bytes,
    ranks_here,
    threads_environment,
    threads_of_ranks,
    visible_gpus,
)
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError

# A library with the driver's interface. It shows as many GPUs as SHOWN says, the first under the name in FIRST.
DRIVER = """
#include <stdlib.h>
#include <string.h>
static int count(void) { return atoi(getenv("SHOWN")); }
int cuInit(unsigned flags) { return count() ? 0 : 100; }
int cuDeviceGetCount(int *found) { *found = count(); return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
  strncpy(name, device ? "NVIDIA H100 80GB HBM3" : getenv("FIRST"), size); return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = device ? 85017755648 : 85520809984; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 13: *value = 1980000; return 0;
    case 16: *value = 132; return 0;
    case 36: *value = 2619000; return 0;
    case 37: *value = 5120; return 0;
    case 75: *value = 9; return 0;
    case 76: *value = 0; return 0;
  }
  return 1;
}
"""


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine has its devices; there are no GPUs yet, and nothing is said of which are visible."""
    monkeypatch.setattr(this_machine, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    this_machine._described.cache_clear()
    return tmp_path


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler, which a stand-in for CUDA's driver needs")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    made = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "driver.c")]
    subprocess.run(made, check=True, timeout=60)
    return folder


@pytest.fixture
def two_gpus(gpus: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (gpus / name).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("FIRST", "NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("SHOWN", "2")
    return monkeypatch


@pytest.mark.parametrize(
    ("stated", "visible"),
    [
        (None, ("0", "1", "2", "3")),
        ("2,0", ("2", "0")),
        (" 3 , 1", ("3", "1")),
        ("", ()),
        ("-1", ()),
        ("1,-1,2", ("1",)),
        ("NoDevFiles", ()),
        ("GPU-8932f937-d72c,GPU-3f1", ("GPU-8932f937-d72c", "GPU-3f1")),
        ("MIG-GPU-8932f937/1/0", ("MIG-GPU-8932f937/1/0",)),
    ],
)
def test_the_users_choice_of_gpus_counts_as_cuda_reads_it(stated, visible):
    assert visible_gpus(stated, 4) == visible


def test_where_there_are_no_gpus_none_is_visible():
    assert visible_gpus("0", 0) == visible_gpus(None, 0) == ()


@pytest.mark.parametrize(
    ("stated", "words"),
    [("0,4", "has 4 GPUs, and none has the index 4"), ("1,1", "CUDA_VISIBLE_DEVICES=1,1 names a GPU twice")],
)
def test_gpus_that_cuda_would_hide_by_mistake_are_refused(stated, words):
    with pytest.raises(ConfigError, match=words):
        visible_gpus(stated, 4)


def test_the_driver_describes_the_visible_gpus(two_gpus):
    assert gpus_here() == ("0", "1")
    first, second = described_gpus({})
    assert first.memory_bytes == 85520809984
    assert second == first._replace(memory_bytes=85017755648)
    assert (first.capability, first.multiprocessors, first.clock_hz) == ((9, 0), 132, 1.98e9)
    assert first.memory_bytes_per_s == pytest.approx(3.352e12, rel=1e-3)


def test_a_host_of_gpus_has_the_device_with_the_least_memory(two_gpus):
    device = device_here(2)
    assert (device.name, device.memory_bytes) == ("h100-sxm", 85017755648)
    assert device_here(1).memory_bytes == 85520809984
    assert device.host_memory_bytes == memory_bytes() // 2, "each has its share of the host's"


def test_an_empty_choice_leaves_cpu_slots(two_gpus):
    two_gpus.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_here(2).name == "cpu-slot"


def test_without_a_stated_number_each_gpu_of_the_first_kind_has_a_rank(two_gpus):
    assert ranks_here() == 2
    this_machine._described.cache_clear()
    two_gpus.setenv("FIRST", "NVIDIA L40S")
    assert ranks_here() == 1


def test_without_a_gpu_or_a_stated_number_two_ranks_share_the_cores(gpus, monkeypatch):
    for cores, ranks in ((1, 1), (2, 2), (64, 2)):
        monkeypatch.setattr("prefect_rlhf.flows.cluster.this_machine.cores_here", lambda cores=cores: cores)
        assert ranks_here() == ranks


def test_gpus_of_several_kinds_are_refused(two_gpus):
    two_gpus.setenv("FIRST", "NVIDIA L40S")
    with pytest.raises(ConfigError, match=r"several kinds \(l40s-86g, h100-sxm\)"):
        device_here(2)


def test_gpus_without_a_driver_are_never_taken_for_cpu_slots(gpus, monkeypatch):
    (gpus / "nvidia0").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(gpus))
    with pytest.raises(ConfigError, match=r"driver does not describe.*libcuda\.so\.1.*leave that empty"):
        device_here(1)


def test_gpus_that_the_driver_does_not_show_are_missed(two_gpus):
    two_gpus.setenv("CUDA_VISIBLE_DEVICES", "GPU-unknown")
    two_gpus.setenv("SHOWN", "0")
    with pytest.raises(ConfigError, match="it shows none"):
        device_here(1)


def test_without_a_gpu_cpu_slots_share_the_memory(gpus, monkeypatch):
    monkeypatch.setattr(this_machine, "memory_bytes", lambda: 10 * 10**9)
    slot = device_here(4)
    assert slot.name == "cpu-slot"
    assert slot.memory_bytes + slot.process_bytes == 10**10 // 4


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_ranks_share_the_cores_that_a_container_has_time_for(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(this_machine, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cores_here() == cores
    assert threads_environment(1, {})["OMP_NUM_THREADS"] == str(cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of_ranks(2) == max(1, cores // 2)


@pytest.mark.parametrize(("limit", "bounds"), [("1000000\n", True), ("max\n", False), (None, False)])
def test_a_container_has_the_memory_that_it_may_use(tmp_path, monkeypatch, limit, bounds):
    monkeypatch.setattr(this_machine, "CONTROL_GROUPS", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert (memory_bytes() == 10**6) is bounds


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [("64:1000", "1000"), ("64:8000", "4096"), ("200:1000", "200"), ("4097:5000", "4097")],
)
def test_a_limit_of_open_files_is_raised_as_far_as_it_may_be_where_ranks_need_it(limits, allowed):
    soft, hard = limits.split(":")
    code = (
        f"import resource; of = resource.RLIMIT_NOFILE; resource.setrlimit(of, ({soft}, {hard}))\n"
        "from prefect_rlhf.flows.cluster.this_machine import allow_open_files; allow_open_files(2)\n"
        "print(*resource.getrlimit(of))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.split() == [allowed, hard], ended.stderr
