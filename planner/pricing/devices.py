"""The figures of a device and its links: peaks, efficiencies, overheads and memory.

Peaks come from the makers' data sheets. A GPU without a data sheet here is estimated from its own properties;
`prefect-rlhf profile` measures it. Efficiencies and host overheads, which no data sheet has, are given with their
source, so that the cost model has no constants of its own. A preset is a device with our engine, which decodes by
CUDA graphs. Another engine's figures belong in a cluster file: that of deployments/examples/plan-cluster-eager.yaml
is fitted to a system without them.
"""

import math
import re
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field

from prefect_rlhf.rlhf_tasks.profiling.measurements import MOST_BYTES, MOST_S
from prefect_rlhf.rlhf_tasks.spec import Frozen
from prefect_rlhf.rlhf_tasks.system.reading import shown


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
    """The data sheet of a GPU, by its name and approximate memory; None where there is none here."""
    name = gpu.name.removeprefix("NVIDIA ")
    for sheet in SHEETS:
        if sheet.driver_name == name and abs(gpu.memory_bytes / sheet.size - 1) <= SAME_SIZE:
            return sheet
    return None


def estimated_sheet(gpu: Gpu) -> DataSheet:
    """A data sheet of a GPU, estimated from its own properties within ESTIMATE. Links are assumed to be PCIe 4."""
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


Rate = Annotated[float, Field(ge=1, le=1e30)]
Seconds = Annotated[float, Field(ge=0, le=MOST_S)]
Efficiency = Annotated[float, Field(ge=1e-6, le=1)]
"""Figures outside these ranges are errors, under which times would overflow. The ranges of plausible figures are
narrower: planner/pricing/device_classes.py warns of others."""


class DeviceLink(Frozen):
    """A connection of one device. bytes_per_s: in one direction; latency_s: seconds of one message."""

    model_config = ConfigDict(allow_inf_nan=False)

    bytes_per_s: Rate
    latency_s: Seconds


GROUPS = 10
"""Process groups that memory is kept for on a device of several. In the plans found for PPO and GRPO of 7B to 72B a
device is in 5 to 10 (rlhf_tasks/rank/plan_nodes.py, `plan_device_sets`)."""


class Reserve(NamedTuple):
    """Bytes of a device's memory that no tensor can have."""

    context: float
    communicators: float
    fragmentation: float

    @property
    def total_bytes(self) -> float:
        return sum(self)

    def __str__(self) -> str:
        """As in `context 0.5 GB, communicators 6.9 GB, fragmentation 2.4 GB`."""
        return ", ".join(f"{name} {size / 1e9:.2g} GB" for name, size in self._asdict().items())


class DeviceProfile(Frozen):
    """One kind of device.

    flops_per_s         peak of matrix multiplications in the data type of training
    memory_bytes_per_s  peak bandwidth of device memory; memory_bytes: its size
    host_memory_bytes   the device's share of its host's memory; 0: memory_bytes is that share already, as on CPUs;
                        None: nobody knows it, and nothing is refused for it
    inside_host         link to a device of the same host; between_hosts: to a device of another host
    host_copy_bytes_per_s  bandwidth that a large copy reaches between device and host memory, in one direction
    matmul_efficiency, memory_efficiency, link_efficiency  share of the peaks that large operations reach
    exchange_overlap    share of a backward pass that hides the reduction of gradients; 0 where the cores that compute
                        also send
    layer_overhead_s    host time per layer and forward or backward pass
    decode_overhead_s   host time per layer and decoding step; small on GPUs, where our engine captures a step as a
                        CUDA graph
    expert_overhead_s   host time per expert and pass, where experts are launched one by one
    optimizer_overhead_s  host time per optimizer step
    reallocation_overhead_s  time per layer of a reallocated model besides its messages: copies and checks of each
                        parameter
    transfer_overhead_s  time per sample and key of a transfer besides its messages: ranks tell what they hold
    dispatch_s          seconds of a plan node besides its work
    process_bytes       memory of a rank's process besides tensors; not part of memory_bytes
    context_bytes       memory_bytes that CUDA's context and libraries take
    communicator_bytes  memory_bytes that NCCL takes for one process group
    fragmentation       share of memory_bytes that torch's allocator cannot use
    has_bfloat16        whether it multiplies bfloat16
    sources             where the figures come from
    """

    model_config = ConfigDict(allow_inf_nan=False)

    name: str
    flops_per_s: Rate
    memory_bytes_per_s: Rate
    memory_bytes: int = Field(gt=0, le=MOST_BYTES)
    host_memory_bytes: int | None = Field(default=None, ge=0, le=MOST_BYTES)
    inside_host: DeviceLink
    between_hosts: DeviceLink
    host_copy_bytes_per_s: Rate
    matmul_efficiency: Efficiency
    memory_efficiency: Efficiency
    link_efficiency: Efficiency
    exchange_overlap: float = Field(default=0.0, ge=0, le=1)
    layer_overhead_s: Seconds
    decode_overhead_s: Seconds
    expert_overhead_s: Seconds = 0.0
    optimizer_overhead_s: Seconds
    reallocation_overhead_s: Seconds = 0.0
    transfer_overhead_s: Seconds = 0.0
    dispatch_s: Seconds
    process_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    context_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    communicator_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    fragmentation: float = Field(default=0.0, ge=0, le=0.5)
    has_bfloat16: bool = True
    sources: tuple[str, ...] = ()

    @property
    def is_on_host(self) -> bool:
        """Whether its memory is its host's: a CPU slot. Others are GPUs."""
        return self.host_memory_bytes == 0

    @property
    def host_room_bytes(self) -> float:
        """Bytes of its share of its host's memory besides its process; infinite where no figure bounds them."""
        return max(1, self.host_memory_bytes - self.process_bytes) if self.host_memory_bytes else math.inf

    def reserve(self, n_devices: int) -> Reserve:
        """What is kept of a device's memory in a cluster of n_devices devices."""
        groups = GROUPS if n_devices > 1 else 0
        return Reserve(
            self.context_bytes, groups * self.communicator_bytes, self.fragmentation * self.memory_bytes
        )

    def room_bytes(self, n_devices: int) -> int:
        """Bytes for tensors on a device in a cluster of n_devices devices, at least one."""
        return max(1, int(self.memory_bytes - self.reserve(n_devices).total_bytes))

    def compute_s(self, flops: float, traffic_bytes: float) -> float:
        """Seconds of an operation by the roofline: the longer of arithmetic (FLOPs) and memory traffic (bytes)."""
        return max(
            flops / (self.flops_per_s * self.matmul_efficiency),
            traffic_bytes / (self.memory_bytes_per_s * self.memory_efficiency),
        )

    def link(self, crosses_hosts: bool) -> DeviceLink:
        """The link between two devices."""
        return self.between_hosts if crosses_hosts else self.inside_host

    def send_s(self, size_bytes: float, crosses_hosts: bool) -> float:
        """Seconds of one message of size_bytes bytes."""
        link = self.link(crosses_hosts)
        return link.latency_s + size_bytes / (link.bytes_per_s * self.link_efficiency)

    def gather_s(self, size_bytes: float, ranks: int, crosses_hosts: bool) -> float:
        """Seconds of a ring all-gather or reduce-scatter; size_bytes: bytes of the whole tensor."""
        if ranks == 1:
            return 0.0
        link = self.link(crosses_hosts)
        moved = size_bytes * (ranks - 1) / ranks
        return (ranks - 1) * link.latency_s + moved / (link.bytes_per_s * self.link_efficiency)

    def all_reduce_s(self, size_bytes: float, ranks: int, crosses_hosts: bool) -> float:
        """Seconds of a ring all-reduce (a reduce-scatter and an all-gather) of size_bytes bytes."""
        return 2 * self.gather_s(size_bytes, ranks, crosses_hosts)


_EFFICIENCIES = (
    "matmul_efficiency: model FLOP utilisation that Megatron-LM reports (arXiv:2104.04473)",
    "memory_efficiency, link_efficiency: estimates, about what STREAM and NCCL tests reach",
    "exchange_overlap: estimate; NCCL's kernels take a few of the multiprocessors",
    "layer_overhead_s, optimizer_overhead_s: estimates for eager kernels; decode_overhead_s: for CUDA graphs",
    "communicator_bytes: 688 MB on four A100s with NVLink (github.com/NVIDIA/nccl/issues/964); an estimate on PCIe, "
    "where NCCL has fewer channels",
    "context_bytes: .96 GB on an H200 (bench/results/gpu.md); fragmentation: an estimate, for a process of one "
    "run; one that ran several models in turn left 11.5% of the allocator's memory unused",
)
_STATED = (
    "peaks: NVIDIA data sheets (dense bf16, memory); NVLink per direction; one NIC per GPU as in DGX systems",
    "host_memory_bytes: an eighth of a DGX system's; of a GH200 its CPU's; none for cards, which any host may have",
    *_EFFICIENCIES,
)
_ESTIMATED = (
    f"peaks: from the GPU's own multiprocessors, clocks and width of bus, within {ESTIMATE:.0%}; links: PCIe 4",
    *_EFFICIENCIES,
)


def _gpu(sheet: DataSheet, sources: tuple[str, ...]) -> DeviceProfile:
    return DeviceProfile(
        name=sheet.name,
        flops_per_s=sheet.flops,
        memory_bytes_per_s=sheet.memory,
        memory_bytes=int(sheet.size),
        host_memory_bytes=None if sheet.host_memory is None else int(sheet.host_memory),
        inside_host=DeviceLink(bytes_per_s=sheet.inside, latency_s=5e-6),
        between_hosts=DeviceLink(bytes_per_s=sheet.between, latency_s=15e-6),
        host_copy_bytes_per_s=sheet.host,
        matmul_efficiency=0.5,
        memory_efficiency=0.8,
        link_efficiency=0.8,
        exchange_overlap=0.8,
        layer_overhead_s=2e-4,
        decode_overhead_s=2e-5,
        optimizer_overhead_s=2e-3,
        dispatch_s=5e-3,
        context_bytes=1_000_000_000,
        communicator_bytes=690_000_000 if sheet.inside > PCIE_5 else 200_000_000,
        fragmentation=0.03,
        sources=sources,
    )


PRESETS: dict[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        *(_gpu(sheet, _STATED) for sheet in SHEETS),
        DeviceProfile(
            name="cpu-slot",
            flops_per_s=171e9,
            memory_bytes_per_s=10e9,
            memory_bytes=4 * 10**9,
            host_memory_bytes=0,
            inside_host=DeviceLink(bytes_per_s=1e9, latency_s=3e-4),
            between_hosts=DeviceLink(bytes_per_s=1e8, latency_s=1e-3),
            host_copy_bytes_per_s=5e9,
            matmul_efficiency=0.5,
            memory_efficiency=0.8,
            link_efficiency=0.8,
            layer_overhead_s=5e-4,
            decode_overhead_s=5e-4,
            expert_overhead_s=6e-5,
            optimizer_overhead_s=2e-3,
            reallocation_overhead_s=2e-3,
            transfer_overhead_s=1.6e-6,
            dispatch_s=5e-3,
            process_bytes=370_000_000,
            sources=(
                "flops_per_s: half of 342 GFLOP/s fp32 measured on two threads",
                "latency: an all-reduce of one hidden state over two gloo ranks took 0.6 ms",
                "reallocation_overhead_s: reallocations of small models took 7 to 13 ms more than their messages",
                "transfer_overhead_s: 4 keys of 256 samples between two gloo ranks took 2.1 ms, 1 of 32 .5 ms",
                "expert_overhead_s: .12 of a layer's time, on one thread at a hidden size of 24, 2 to 32 experts",
                "process_bytes: RssAnon of ranks with torch and transformers, 336 to 370 MB",
                "all other figures: estimates",
            ),
        ),
    )
}


def device_of(gpu: Gpu) -> DeviceProfile:
    """The device that a GPU is: by its data sheet where there is one, else estimated from its properties.

    Its memory is its own.
    """
    sheet = sheet_of(gpu)
    found = _gpu(estimated_sheet(gpu), _ESTIMATED) if sheet is None else PRESETS[sheet.name]
    return found.model_copy(update={"memory_bytes": gpu.memory_bytes, "has_bfloat16": gpu.has_bfloat16})


def estimated(device: DeviceProfile) -> str | None:
    """A warning where a device's peaks are estimates from its own properties; else None."""
    if device.sources[:1] != _ESTIMATED[:1]:
        return None
    return (
        f"{device.name}, this machine's GPU, has no data sheet here: its peaks are estimated from its clocks and "
        f"multiprocessors, within about {ESTIMATE:.0%}, and its links taken for PCIe 4. Measure it with prefect-rlhf "
        "profile, or state its figures by planning.device."
    )


def preset(name: str) -> DeviceProfile:
    """A preset by name. Raises ValueError, which names the known presets."""
    if name not in PRESETS:
        raise ValueError(f"There is no device preset {shown(name)}; known are {', '.join(PRESETS)}.")
    return PRESETS[name]


def described(device: DeviceProfile) -> str:
    """Where a device's figures come from, as in `changed preset of cpu-slot`.

    Changed memory sizes do not count as a change: they are the machine's own.
    """
    known = PRESETS.get(device.name)
    if known is None:
        return f"{'estimated' if estimated(device) else 'stated'} figures of {device.name}"
    own = {name: getattr(known, name) for name in ("memory_bytes", "host_memory_bytes")}
    same = device.model_copy(update=own) == known
    return f"{'preset' if same else 'changed preset'} of {device.name}"
