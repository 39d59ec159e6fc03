"""Figures of devices that are hardly true: mostly right numbers in another unit."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from planner.pricing.devices import DeviceProfile

BYTES_PER_S: Mapping[str, float] = {
    "GB/s": 1e9,
    "Gb/s": 1e9 / 8,
    "bits per second": 1 / 8,
    "TB/s": 1e12,
    "MB/s": 1e6,
}
FLOPS_PER_S: Mapping[str, float] = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "PFLOP/s": 1e15}
BYTES: Mapping[str, float] = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
SECONDS: Mapping[str, float] = {"microseconds": 1e-6, "milliseconds": 1e-3}


class Range(NamedTuple):
    """What a figure is today, from a slow host's to several times a large GPU's.

    unit   of the figure; others: units that are taken for it, the likeliest first, and their size
    """

    low: float
    high: float
    unit: str
    others: Mapping[str, float]

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


BETWEEN_HOSTS = 9.9e10
"""bytes_per_s of the fastest link of one device to another host: an 800 Gb/s adapter (ConnectX-8) for each GPU sends
nearly 100e9, the 400 Gb/s one of DGX H100, H200 and B200 (8 for 8 GPUs) 50e9. From 100e9 on stand 100, 200, 400 and
800 Gb/s in bits, which are by far the more likely."""

RANGES: Mapping[str, Range] = {
    "flops_per_s": Range(1e9, 1e16, "FLOP/s", FLOPS_PER_S),
    "memory_bytes_per_s": Range(1e8, 5e13, "bytes per second", BYTES_PER_S),
    "memory_bytes": Range(1e8, 1e13, "bytes", BYTES),
    "inside_host.bytes_per_s": Range(1e7, 2e12, "bytes per second", BYTES_PER_S),
    "inside_host.latency_s": Range(1e-7, 1e-2, "seconds", SECONDS),
    "between_hosts.bytes_per_s": Range(1e7, BETWEEN_HOSTS, "bytes per second", BYTES_PER_S),
    "between_hosts.latency_s": Range(1e-7, 1e-2, "seconds", SECONDS),
    "host_copy_bytes_per_s": Range(1e7, 1e12, "bytes per second", BYTES_PER_S),
    "layer_overhead_s": Range(1e-7, 1e-1, "seconds", SECONDS),
    "decode_overhead_s": Range(1e-7, 1e-1, "seconds", SECONDS),
    "optimizer_overhead_s": Range(1e-7, 1.0, "seconds", SECONDS),
    "dispatch_s": Range(1e-7, 1.0, "seconds", SECONDS),
}
"""Figure of a DeviceProfile -> its range. 0 s, where something is to cost nothing, is no mistake."""


def implausible(device: DeviceProfile, where: str) -> Iterator[str]:
    """A sentence for each figure outside its range, with the unit that it is likely in.

    where  what the sentences begin with: the file
    """
    for name, known in RANGES.items():
        value = _figure(device, name)
        if known.holds(value) or (value == 0 and known.unit == "seconds"):
            continue
        sentence = (
            f"{where}: {name}={value:g} is hardly true: it is in {known.unit}, "
            f"of which devices have {known.low:g} to {known.high:g}"
        )
        likely = [
            f"in {unit}, write {value * size:.6g}"
            for unit, size in known.others.items()
            if known.holds(value * size)
        ]
        if likely:
            sentence += f"; if it is {', if '.join(likely[:2])}"
        yield f"{sentence}."


def _figure(device: DeviceProfile, name: str) -> float:
    """A figure by its name, that of a link by link and name."""
    found: object = device
    for part in name.split("."):
        found = getattr(found, part)
    assert isinstance(found, int | float), f"{name} is no figure"
    return float(found)
