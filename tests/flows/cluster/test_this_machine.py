"""The devices that are assumed where a configuration names none."""

from pathlib import Path

import pytest

from flows.cluster import this_machine
from flows.cluster.this_machine import device_here, memory_bytes
from planner.pricing.devices import preset


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine's GPUs are described; there are none yet."""
    monkeypatch.setattr(this_machine, "GPUS", tmp_path)
    return tmp_path


def test_a_gpu_is_known_by_its_model(gpus):
    (gpus / "0000:1b:00.0").mkdir()
    (gpus / "0000:1b:00.0" / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 45\n")
    assert device_here(8) == preset("h100-sxm")


def test_without_a_gpu_cpu_slots_share_the_memory(gpus, monkeypatch):
    monkeypatch.setattr(this_machine, "memory_bytes", lambda: 10 * 10**9)
    slot = device_here(4)
    assert slot.name == "cpu-slot"
    assert slot.memory_bytes + slot.process_bytes == 10**10 // 4


@pytest.mark.parametrize(("limit", "bounds"), [("1000000\n", True), ("max\n", False), (None, False)])
def test_a_container_has_the_memory_that_it_may_use(tmp_path, monkeypatch, limit, bounds):
    monkeypatch.setattr(this_machine, "CONTROL_GROUPS", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert (memory_bytes() == 10**6) is bounds
