"""Figures in the wrong unit are told from slow and fast devices' own."""

import pytest

from planner.pricing.cluster_file import RANGES, implausible
from planner.pricing.devices import PRESETS, DeviceLink, preset


def with_figure(name: str, value: float):
    """An A100 with one figure changed."""
    device, (part, *inner) = preset("a100-80g-sxm"), name.split(".")
    if inner:
        value = getattr(device, part).model_copy(update={inner[0]: value})
    return device.model_copy(update={part: value})


@pytest.mark.parametrize("device", PRESETS.values(), ids=PRESETS)
def test_presets_are_plausible(device):
    assert [*implausible(device, "here")] == []


@pytest.mark.parametrize("name", ["b200", "b300", "slow host"])
def test_faster_and_slower_devices_than_the_presets_are_plausible(name):
    figures = {
        "b200": {
            "flops_per_s": 2.25e15,
            "memory_bytes_per_s": 8e12,
            "memory_bytes": 192 * 10**9,
            "inside_host": DeviceLink(bytes_per_s=9e11, latency_s=3e-6),
            "between_hosts": DeviceLink(bytes_per_s=5e10, latency_s=0),  # 8 x 400 Gb/s for a host's 8 GPUs
        },
        "b300": {
            "between_hosts": DeviceLink(bytes_per_s=9.7e10, latency_s=0)
        },  # what 800 Gb/s for each GPU reach
        "slow host": {
            "flops_per_s": 1e10,
            "memory_bytes_per_s": 2e9,
            "memory_bytes": 10**9,
            "between_hosts": DeviceLink(bytes_per_s=1.25e7, latency_s=5e-3),
        },
    }[name]
    assert [*implausible(preset("h100-sxm").model_copy(update=figures), "here")] == []


@pytest.mark.parametrize(
    ("name", "value", "unit", "meant"),
    [
        ("flops_per_s", 312, "TFLOP/s", "3.12e+14"),
        ("flops_per_s", 312_000, "GFLOP/s", "3.12e+14"),
        ("memory_bytes_per_s", 2039, "GB/s", "2.039e+12"),
        ("memory_bytes", 80, "GB", "8e+10"),
        ("memory_bytes", 81_920, "MB", "8.192e+10"),
        ("inside_host.bytes_per_s", 300, "GB/s", "3e+11"),
        ("inside_host.bytes_per_s", 2.4e12, "bits per second", "3e+11"),
        ("inside_host.latency_s", 5, "microseconds", "5e-06"),
        ("between_hosts.bytes_per_s", 25, "GB/s", "2.5e+10"),
        ("between_hosts.bytes_per_s", 200, "Gb/s", "2.5e+10"),
        ("between_hosts.bytes_per_s", 100e9, "bits per second", "1.25e+10"),
        ("between_hosts.bytes_per_s", 200e9, "bits per second", "2.5e+10"),
        ("between_hosts.bytes_per_s", 400e9, "bits per second", "5e+10"),
        ("between_hosts.latency_s", 15, "microseconds", "1.5e-05"),
        ("between_hosts.latency_s", 0.05, "milliseconds", "5e-05"),
        ("host_copy_bytes_per_s", 25, "GB/s", "2.5e+10"),
        ("decode_overhead_s", 20, "microseconds", "2e-05"),
    ],
)
def test_a_figure_in_another_unit_is_told_with_it(name, value, unit, meant):
    [sentence] = implausible(with_figure(name, value), "cluster.yaml")
    assert sentence.startswith(f"cluster.yaml: {name}={value:g} is implausible: it is in {RANGES[name].unit}")
    hint = sentence.partition("; if it is ")[2]
    assert f"in {unit}, write {meant}" in hint


def test_a_figure_in_no_known_unit_is_told_with_its_range():
    [sentence] = implausible(with_figure("flops_per_s", 1e40), "device.yaml")
    assert sentence == (
        "device.yaml: flops_per_s=1e+40 is implausible: it is in FLOP/s, and devices have 1e+09 to 1e+16."
    )
