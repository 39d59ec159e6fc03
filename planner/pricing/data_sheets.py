"""GPUs as their makers' data sheets describe them, and as they describe themselves.

A GPU without a data sheet here is estimated from its own properties; `prefect-rlhf profile` measures it.
"""

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU's own description, as CUDA's driver gives it (flows/cluster/this_machine.py).

    capability          compute capability, (major, minor)
    multiprocessors     their number; clock_hz: their highest clock
    memory_bytes_per_s  twice the memory clock times the width of the bus, as double data rate memories have it
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    clock_hz: float
    memory_bytes_per_s: float

    @property
    def has_bfloat16(self) -> bool:
        """Whether it multiplies bfloat16: from compute capability 8.0 on."""
        return self.capability >= (8, 0)


class DataSheet(NamedTuple):
    """What the price of a GPU needs; all rates are per second and in one direction.

    driver_name      as CUDA names it, without the maker's
    flops            dense products in bfloat16, summed in float32
    memory, size     bandwidth and bytes of its memory
    inside, between  links to a GPU of the same host and of another one
    host             copies to and from the host's memory
    host_memory      bytes of the host's memory for each of its GPUs; None where GPUs of this kind are in all kinds of
                     hosts
    """

    name: str
    driver_name: str
    flops: float
    memory: float
    size: float
    inside: float
    between: float
    host: float
    host_memory: float | None = None


PCIE_4, PCIE_5 = 25e9, 50e9
"""Bytes per second that a large copy of pinned memory reaches: about 80% of the 31.5 and 63e9 of 16 lanes."""
NIC_200, NIC_400 = 25e9, 50e9
"""One network adapter for each GPU, of 200 and 400 Gb/s, as in DGX systems."""

SHEETS = (
    DataSheet("a100-40g-sxm", "A100-SXM4-40GB", 312e12, 1.555e12, 40e9, 300e9, NIC_200, PCIE_4, 128e9),
    DataSheet("a100-40g-pcie", "A100-PCIE-40GB", 312e12, 1.555e12, 40e9, PCIE_4, NIC_200, PCIE_4),
    DataSheet("a100-80g-sxm", "A100-SXM4-80GB", 312e12, 2.039e12, 80e9, 300e9, NIC_200, PCIE_4, 256e9),
    DataSheet("a100-80g-pcie", "A100 80GB PCIe", 312e12, 1.935e12, 80e9, PCIE_4, NIC_200, PCIE_4),
    DataSheet("h100-sxm", "H100 80GB HBM3", 989e12, 3.35e12, 80e9, 450e9, NIC_400, PCIE_5, 256e9),
    DataSheet("h100-pcie", "H100 PCIe", 756e12, 2e12, 80e9, PCIE_5, NIC_400, PCIE_5),
    DataSheet("h100-nvl", "H100 NVL", 835e12, 3.9e12, 94e9, PCIE_5, NIC_400, PCIE_5),
    DataSheet("h200-sxm", "H200", 989e12, 4.8e12, 141e9, 450e9, NIC_400, PCIE_5, 256e9),
    DataSheet("h200-nvl", "H200 NVL", 835e12, 4.8e12, 141e9, PCIE_5, NIC_400, PCIE_5),
    # Its link to its own CPU's memory is NVLink-C2C. A host has one; where it has two, NVLink joins them.
    DataSheet("gh200-96g", "GH200 480GB", 989e12, 4e12, 96e9, 450e9, NIC_400, 450e9, 480e9),
    DataSheet("gh200-144g", "GH200 144G HBM3e", 989e12, 4.9e12, 144e9, 450e9, NIC_400, 450e9, 480e9),
    DataSheet("b200-sxm", "B200", 2250e12, 8e12, 180e9, 900e9, NIC_400, PCIE_5, 256e9),
    DataSheet("l4", "L4", 121e12, 300e9, 24e9, PCIE_4, NIC_200, PCIE_4),
    DataSheet("l40s", "L40S", 362e12, 864e9, 48e9, PCIE_4, NIC_200, PCIE_4),
    DataSheet("a40", "A40", 149.7e12, 696e9, 48e9, PCIE_4, NIC_200, PCIE_4),
    DataSheet("rtx-3090", "GeForce RTX 3090", 71e12, 936e9, 24e9, PCIE_4, NIC_200, PCIE_4),
    DataSheet("rtx-4090", "GeForce RTX 4090", 165.2e12, 1.008e12, 24e9, PCIE_4, NIC_200, PCIE_4),
    DataSheet("rtx-5090", "GeForce RTX 5090", 209.5e12, 1.792e12, 32e9, PCIE_5, NIC_200, PCIE_5),
)
"""NVIDIA's data sheets and architecture white papers; hosts' memory as in DGX systems, 1 or 2 TB for 8 GPUs. NVL and
PCIe cards are priced without NVLink bridges, which join only pairs."""

SAME_SIZE = 0.1
"""Share by which memory may differ from a data sheet's: drivers report gibibytes, of which some are kept back."""

FLOPS_PER_CYCLE = {
    (0, 0): 256,  # no tensor cores: 128 lanes
    (7, 0): 1024,
    (8, 0): 2048,
    (8, 6): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (12, 0): 1024,
}
"""From this compute capability on: dense 16-bit products and sums of a multiprocessor in a cycle (NVIDIA's
architecture white papers). GeForce cards sum in float32 at half the rate."""

ESTIMATE = 0.2
"""Share by which the estimated peaks of the GPUs in SHEETS differ from their data sheets, at most: those of cards
with a low power limit are too high. A compute capability that is not in the table may differ more."""


def sheet_of(gpu: Gpu) -> DataSheet | None:
    """The data sheet of a GPU: its name and about its memory; None where there is none here."""
    name = gpu.name.removeprefix("NVIDIA ")
    for sheet in SHEETS:
        if sheet.driver_name == name and abs(gpu.memory_bytes / sheet.size - 1) <= SAME_SIZE:
            return sheet
    return None


def estimated_sheet(gpu: Gpu) -> DataSheet:
    """What a data sheet would say of a GPU, from its own properties, within ESTIMATE. Links are taken for PCIe 4."""
    known = max(one for one in FLOPS_PER_CYCLE if one <= gpu.capability)
    cycle = FLOPS_PER_CYCLE[known] / (2 if "GeForce" in gpu.name else 1)
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.removeprefix("NVIDIA ").lower()).strip("-")
    if not name or any(sheet.name == name for sheet in SHEETS):  # the name of one, but not its memory
        name = f"{name or 'gpu'}-{gpu.memory_bytes / 1e9:.0f}g"
    return DataSheet(
        name,
        gpu.name,
        gpu.multiprocessors * gpu.clock_hz * cycle,
        gpu.memory_bytes_per_s,
        gpu.memory_bytes,
        PCIE_4,
        NIC_200,
        PCIE_4,
    )
