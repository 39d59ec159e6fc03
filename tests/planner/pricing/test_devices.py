"""Figures of devices: what is refused, what the slowest allowed ones come to, and GPUs by their data sheets."""

import math

import pytest
from pydantic import ValidationError

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.devices import (
    ESTIMATE,
    GROUPS,
    PCIE_4,
    PRESETS,
    SHEETS,
    DeviceLink,
    DeviceProfile,
    Gpu,
    described,
    device_of,
    estimated,
    estimated_sheet,
    preset,
    sheet_of,
)
from prefect_rlhf.planner.pricing.plans import shortfall
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.search.baselines import heuristic_plan

A100 = preset("a100-80g-sxm")
RATES = ("flops_per_s", "memory_bytes_per_s", "host_copy_bytes_per_s")
EFFICIENCIES = ("matmul_efficiency", "memory_efficiency", "link_efficiency")
OVERHEADS = tuple(
    f"{what}_overhead_s" for what in ("layer", "decode", "optimizer", "reallocation", "transfer")
)


def with_figures(**figures) -> DeviceProfile:
    return DeviceProfile.model_validate({**A100.model_dump(), **figures})


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        *((name, value) for name in RATES for value in (0, 5e-324, 1e300, math.inf)),
        *((name, value) for name in EFFICIENCIES for value in (0, 5e-324, 1.5)),
        *((name, value) for name in (*OVERHEADS, "dispatch_s") for value in (-1, 1e308)),
        *(("memory_bytes", value) for value in (0, 10**30)),
        ("process_bytes", 10**30),
        ("inside_host", {"bytes_per_s": 5e-324, "latency_s": 1e-6}),
        ("between_hosts", {"bytes_per_s": 1e9, "latency_s": 1e308}),
    ],
)
def test_figures_under_which_times_would_overflow_are_refused(figure, value):
    with pytest.raises(ValidationError, match=figure):
        with_figures(**{figure: value})


def test_memory_is_kept_for_context_communicators_and_fragmentation():
    kept = with_figures(
        memory_bytes=10**10, context_bytes=10**9, communicator_bytes=10**8, fragmentation=0.05
    )
    assert kept.reserve(8) == (10**9, GROUPS * 10**8, 0.05 * 10**10)
    assert kept.room_bytes(8) == 10**10 - 10**9 - GROUPS * 10**8 - 5 * 10**8
    assert kept.room_bytes(1) == 10**10 - 10**9 - 5 * 10**8, "a device alone is in no group"
    assert str(kept.reserve(8)) == "context 1 GB, communicators 1 GB, fragmentation 0.5 GB"
    assert preset("cpu-slot").reserve(8).total_bytes == 0
    assert with_figures(memory_bytes=1).room_bytes(8) == 1


def test_a_plan_that_fits_only_without_what_is_kept_lacks_memory(make_graph, ppo_cost):
    graph, cluster = make_graph(), Cluster(1, 8)
    free = with_figures(context_bytes=0, communicator_bytes=0, fragmentation=0)
    price = heuristic_plan(Problem(graph, ppo_cost(cluster, device=free))).price
    needed = max(peak.total_bytes for peak in price.peaks.values())
    tight = free.model_copy(update={"memory_bytes": int(needed) + 1})
    assert shortfall(price, ppo_cost(cluster, device=tight)) is None
    kept = shortfall(price, ppo_cost(cluster, device=tight.model_copy(update={"context_bytes": 10**9})))
    assert kept is not None
    assert f"of its {int(needed) + 1} (context 1 GB, communicators 0 GB, fragmentation 0 GB)" in kept


def test_under_the_slowest_figures_times_are_finite(make_graph, ppo_cost):
    slowest = with_figures(
        **dict.fromkeys(RATES, 1),
        **dict.fromkeys(EFFICIENCIES, 1e-6),
        **dict.fromkeys((*OVERHEADS, "dispatch_s"), 1e6),
        memory_bytes=2**60,
        inside_host=DeviceLink(bytes_per_s=1, latency_s=1e6),
        between_hosts=DeviceLink(bytes_per_s=1, latency_s=1e6),
    )
    graph, model = make_graph(n_seqs=2**20, mini_batches=4), ppo_cost(Cluster(2, 8), device=slowest)
    price = heuristic_plan(Problem(graph, model)).price
    assert math.isfinite(price.iteration_time_s)
    assert all(map(math.isfinite, price.duration_s.values()))


def gpu(
    name="NVIDIA H100 80GB HBM3",
    memory=79.2,
    capability=(9, 0),
    multiprocessors=132,
    clock=1.98,
    bandwidth=3.352,
) -> Gpu:
    """memory in GiB, clock in GHz, bandwidth in TB/s"""
    return Gpu(name, int(memory * 2**30), capability, multiprocessors, clock * 1e9, bandwidth * 1e12)


# Multiprocessors and highest clocks of the white papers, and memory as drivers report it.
KNOWN = {
    "a100-40g-sxm": gpu("NVIDIA A100-SXM4-40GB", 39.4, (8, 0), 108, 1.41, 1.555),
    "a100-40g-pcie": gpu(
        "A100-PCIE-40GB", 39.4, (8, 0), 108, 1.41, 1.555
    ),  # older drivers leave out the maker
    "a100-80g-sxm": gpu("NVIDIA A100-SXM4-80GB", 79.2, (8, 0), 108, 1.41, 2.039),
    "a100-80g-pcie": gpu("NVIDIA A100 80GB PCIe", 79.2, (8, 0), 108, 1.41, 1.935),
    "h100-sxm": gpu(),
    "h100-pcie": gpu("NVIDIA H100 PCIe", 79.2, (9, 0), 114, 1.755, 2.039),
    "h100-nvl": gpu("NVIDIA H100 NVL", 93.1, (9, 0), 132, 1.785, 3.94),
    "h200-sxm": gpu("NVIDIA H200", 139.8, (9, 0), 132, 1.98, 4.9),
    "h200-nvl": gpu("NVIDIA H200 NVL", 139.8, (9, 0), 132, 1.785, 4.9),
    "gh200-96g": gpu("NVIDIA GH200 480GB", 94.5, (9, 0), 132, 1.98, 4.02),
    "gh200-144g": gpu("NVIDIA GH200 144G HBM3e", 139.8, (9, 0), 132, 1.98, 4.92),
    "b200-sxm": gpu("NVIDIA B200", 178.4, (10, 0), 148, 1.965, 7.7),
    "l4": gpu("NVIDIA L4", 22.0, (8, 9), 58, 2.04, 0.3),
    "l40s": gpu("NVIDIA L40S", 44.4, (8, 9), 142, 2.52, 0.864),
    "a40": gpu("NVIDIA A40", 44.4, (8, 6), 84, 1.74, 0.696),
    "rtx-3090": gpu("NVIDIA GeForce RTX 3090", 23.7, (8, 6), 82, 1.695, 0.936),
    "rtx-4090": gpu("NVIDIA GeForce RTX 4090", 23.6, (8, 9), 128, 2.52, 1.008),
    "rtx-5090": gpu("NVIDIA GeForce RTX 5090", 31.4, (12, 0), 170, 2.407, 1.792),
}


def test_every_data_sheet_is_found_by_its_gpus_name_and_memory():
    assert {sheet.name for sheet in SHEETS} == KNOWN.keys()
    for name, known in KNOWN.items():
        found = sheet_of(known)
        assert found is not None
        assert found.name == name
        assert device_of(known) == PRESETS[name].model_copy(update={"memory_bytes": known.memory_bytes})
        assert described(device_of(known)) == f"preset of {name}"
        assert estimated(device_of(known)) is None


@pytest.mark.parametrize("name", KNOWN)
def test_estimated_peaks_are_as_near_to_the_data_sheet_as_they_say(name):
    sheet, guess = sheet_of(KNOWN[name]), estimated_sheet(KNOWN[name])
    assert sheet is not None
    assert guess.flops == pytest.approx(sheet.flops, rel=ESTIMATE)
    assert guess.memory == pytest.approx(sheet.memory, rel=ESTIMATE)


@pytest.mark.parametrize(
    ("unlike", "name"),
    [
        (gpu("NVIDIA A100-SXM-64GB", 63.4, (8, 0), 124, 1.395, 1.64), "a100-sxm-64gb"),
        (gpu("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5, (9, 0), 60), "h100-80gb-hbm3-mig-3g-40gb"),
        (
            gpu("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, (8, 9), 76, 2.04, 0.576),
            "geforce-rtx-4090-laptop-gpu",
        ),
        (gpu("NVIDIA H200", 70.0), "h200"),  # a name alone does not do
        (gpu("NVIDIA L4", 44.0), "l4-47g"),
        (gpu("NVIDIA X1", 500.0, (13, 0), 200, 2.0, 20.0), "x1"),
    ],
)
def test_an_unknown_gpu_is_described_by_its_own_properties_and_said_to_be(unlike, name):
    device = device_of(unlike)
    assert device.name == name not in PRESETS
    assert device.memory_bytes == unlike.memory_bytes
    assert device.memory_bytes_per_s == unlike.memory_bytes_per_s
    assert device.inside_host.bytes_per_s == PCIE_4
    assert described(device) == f"estimated figures of {name}"
    warning = estimated(device)
    assert warning is not None
    assert name in warning
    assert "prefect-rlhf profile" in warning


def test_a_gpu_of_a_newer_capability_is_estimated_as_the_newest_known_one():
    assert device_of(gpu("X", capability=(13, 0))).flops_per_s == 132 * 1.98e9 * 1024
    assert device_of(gpu("X", capability=(9, 1))).flops_per_s == 132 * 1.98e9 * 4096


def test_gpus_before_compute_capability_8_have_no_bfloat16():
    assert not device_of(gpu("Tesla V100-SXM2-32GB", 31.7, (7, 0), 80, 1.53, 0.9)).has_bfloat16
    assert device_of(gpu()).has_bfloat16
