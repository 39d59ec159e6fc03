"""Recalibration finds the constants of a device again from what such a device would have shown."""

import pytest

from planner.pricing.calibrate import recalibrated, with_measured_moves
from planner.pricing.device_share import sizes
from planner.pricing.devices import DeviceLink, preset
from planner.pricing.measured import MeasuredProfile
from planner.pricing.rooflines import Roofline
from rlhf_tasks.profiling.measurements import Measurements, Timed, TimedExchange

TOKENS = (256, 1024, 4096)


@pytest.fixture
def slow():
    """A device that reaches less than the preset says, with slower links and a slower host."""
    return preset("cpu-slot").model_copy(
        update={
            "matmul_efficiency": 0.2,
            "memory_bytes_per_s": 1e12,
            "layer_overhead_s": 3e-3,
            "decode_overhead_s": 2e-3,
            "optimizer_overhead_s": 5e-3,
            "inside_host": DeviceLink(bytes_per_s=3e8, latency_s=2e-3),
        }
    )


@pytest.fixture
def measured(slow, llama) -> MeasuredProfile:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    shape = llama(hidden_size=512, num_hidden_layers=4, intermediate_size=1024, **heads)
    timing = Roofline(slow, sizes(shape, "lm", 1), "lm", 1, False, 4)
    operations = [
        Timed(operation="layer/forward", tp=1, tokens=n, context=64, seconds=timing.layer_s("forward", n, 64))
        for n in TOKENS
    ]
    operations += [
        Timed(operation="layer/decode", tp=1, tokens=n, context=64, seconds=timing.layer_s("decode", n, 64))
        for n in (1, 4)
    ]
    operations += [
        Timed(operation="optimizer", tp=1, tokens=n, context=0, seconds=timing.update_s(n, 1))
        for n in (10**5, 10**6)
    ]
    sends = [
        TimedExchange(
            kind="send",
            ranks=2,
            crosses_hosts=False,
            size_bytes=n,
            seconds=slow.send_s(n, crosses_hosts=False),
        )
        for n in (2**10, 2**20, 2**24)
    ]
    found = Measurements(operations=tuple(operations), exchanges=tuple(sends), process_bytes=7)
    return MeasuredProfile.of("cpu-slot", 1, 2, shape, 4, [found], dispatch_s=0.125)


def test_constants_come_back(slow, measured):
    fitted = recalibrated(preset("cpu-slot").model_copy(update={"memory_bytes_per_s": 1e12}), measured)
    for field in ("layer_overhead_s", "decode_overhead_s", "optimizer_overhead_s", "matmul_efficiency"):
        assert getattr(fitted, field) == pytest.approx(getattr(slow, field), rel=0.02), field
    for size_bytes in (1e3, 1e7):
        assert fitted.send_s(size_bytes, False) == pytest.approx(slow.send_s(size_bytes, False))
    assert (fitted.dispatch_s, fitted.process_bytes) == (0.125, 7)


def test_what_a_move_takes_beyond_its_message_counts_per_layer_or_per_sample_and_key(measured):
    before = preset("cpu-slot")
    exchanges = tuple(
        TimedExchange(kind="redistribute", ranks=2, crosses_hosts=False, size_bytes=n, seconds=1e-3 + n / 5e8)
        for n in (2**10, 2**24)
    )
    moved = tuple(
        Timed(operation="reallocation", tp=1, tokens=n, context=c, seconds=1e-3 + 4 * n / 5e8 + c * 0.25)
        for n, c in ((10**5, 1), (10**6, 4))
    )
    sent = Timed(operation="transfer", tp=1, tokens=1000, context=0, seconds=1e-3 + 4000 / 5e8 + 1000 * 2e-6)
    others = [o for o in measured.operations if o.operation not in ("reallocation", "transfer")]
    update = {"exchanges": exchanges, "operations": (*others, *moved, sent)}
    after = with_measured_moves(before, measured.model_copy(update=update))
    assert after.transfer_overhead_s == pytest.approx(2e-6)
    assert after.reallocation_overhead_s == pytest.approx(0.25)
    assert after.send_s(2**20, False) == pytest.approx(1e-3 + 2**20 / 5e8)
    assert with_measured_moves(before, measured).reallocation_overhead_s == before.reallocation_overhead_s


def test_what_was_not_measured_stays(measured):
    before = preset("cpu-slot")
    after = recalibrated(before, measured)
    assert after.between_hosts == before.between_hosts
    assert after.memory_bytes == before.memory_bytes


@pytest.mark.parametrize(
    ("left_out", "field"),
    [
        ("layer/forward", "layer_overhead_s"),
        ("layer/decode", "decode_overhead_s"),
        ("optimizer", "optimizer_overhead_s"),
    ],
)
def test_an_overhead_that_was_not_measured_stays(measured, left_out, field):
    operations = tuple(o for o in measured.operations if o.operation != left_out)
    before = preset("cpu-slot")
    after = recalibrated(before, measured.model_copy(update={"operations": operations}))
    assert getattr(after, field) == getattr(before, field) > 0
    assert getattr(recalibrated(before, measured), field) != getattr(before, field)


def test_a_device_faster_than_its_data_sheet_gets_a_higher_peak(measured):
    before = preset("cpu-slot").model_copy(update={"flops_per_s": 1e9, "memory_bytes_per_s": 1e12})
    after = recalibrated(before, measured)
    assert after.matmul_efficiency == 1
    assert after.flops_per_s == pytest.approx(0.2 * preset("cpu-slot").flops_per_s, rel=0.02)


def test_passes_that_memory_traffic_bounds_say_nothing_of_arithmetic(slow, measured):
    """Were they taken for arithmetic, the overhead would hold the seconds of reading weights."""
    starved = slow.model_copy(update={"memory_bytes_per_s": 4e9})
    timing = Roofline(starved, sizes(measured.model, "lm", 1), "lm", 1, False, 4)
    passes = tuple(
        Timed(operation="layer/forward", tp=1, tokens=n, context=64, seconds=timing.layer_s("forward", n, 64))
        for n in (1, 4, 16, 64, 256, 1024, 4096)
    )
    weights_s = starved.compute_s(0, sizes(measured.model, "lm", 1).layer * 4)
    assert passes[0].seconds > starved.layer_overhead_s + weights_s > 1.5 * starved.layer_overhead_s
    before = preset("cpu-slot").model_copy(update={"memory_bytes_per_s": 4e9})
    after = recalibrated(before, measured.model_copy(update={"operations": passes}))
    assert after.layer_overhead_s == pytest.approx(starved.layer_overhead_s)
    assert after.matmul_efficiency == pytest.approx(starved.matmul_efficiency)
    few = recalibrated(before, measured.model_copy(update={"operations": passes[:3]}))
    assert few.layer_overhead_s == pytest.approx(starved.layer_overhead_s)
    assert few.matmul_efficiency == before.matmul_efficiency, "arithmetic does not show"
