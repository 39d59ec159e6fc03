"""Figures of devices: what is refused, and what the slowest figures that are allowed come to."""

import math

import pytest
from pydantic import ValidationError

from planner.plan.mesh import Cluster
from planner.pricing.devices import GROUPS, DeviceLink, DeviceProfile, preset
from planner.pricing.plans import shortfall
from planner.search.baselines import heuristic_plan

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
    price = heuristic_plan(graph, ppo_cost(cluster, device=free)).price
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
    price = heuristic_plan(graph, model).price
    assert math.isfinite(price.iteration_time_s)
    assert all(map(math.isfinite, price.duration_s.values()))
