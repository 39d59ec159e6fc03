"""The figures of a device and its links: peaks, efficiencies, overheads and memory.

Peaks come from data sheets. Efficiencies and host overheads, which no data sheet has, are given here with their
source, so that the cost model has no constants of its own.
"""

from typing import Annotated

from pydantic import ConfigDict, Field

from rlhf_tasks.profiling.measurements import MOST_BYTES, MOST_S
from rlhf_tasks.spec import Frozen
from rlhf_tasks.system.reading import shown

Rate = Annotated[float, Field(ge=1, le=1e30)]
Seconds = Annotated[float, Field(ge=0, le=MOST_S)]
Efficiency = Annotated[float, Field(ge=1e-6, le=1)]
"""Figures outside these ranges are errors, under which times would overflow. The ranges of plausible figures are
narrower: planner/pricing/cluster_file.py warns of others."""


class Link(Frozen):
    """A connection of one device. bytes_per_s: in one direction; latency_s: seconds of one message."""

    model_config = ConfigDict(allow_inf_nan=False)

    bytes_per_s: Rate
    latency_s: Seconds


class DeviceProfile(Frozen):
    """One kind of device.

    flops_per_s         peak of matrix multiplications in the data type of training
    memory_bytes_per_s  peak bandwidth of device memory; memory_bytes: its size
    inside_host         link to a device of the same host; between_hosts: to a device of another host
    host_copy_bytes_per_s  bandwidth that a large copy reaches between device and host memory, in one direction
    matmul_efficiency, memory_efficiency, link_efficiency  share of the peaks that large operations reach
    exchange_overlap    share of a backward pass that hides the reduction of gradients; 0 where the cores that compute
                        also send
    layer_overhead_s    host time per layer and forward or backward pass
    decode_overhead_s   host time per layer and decoding step
    optimizer_overhead_s  host time per optimizer step
    reallocation_overhead_s  time per layer of a reallocated model besides its messages: copies and checks of each
                        parameter
    transfer_overhead_s  time per sample and key of a transfer besides its messages: ranks tell what they hold
    dispatch_s          seconds of a plan node besides its work
    process_bytes       memory of a rank's process besides tensors; not part of memory_bytes
    sources             where the figures come from
    """

    model_config = ConfigDict(allow_inf_nan=False)

    name: str
    flops_per_s: Rate
    memory_bytes_per_s: Rate
    memory_bytes: int = Field(gt=0, le=MOST_BYTES)
    inside_host: Link
    between_hosts: Link
    host_copy_bytes_per_s: Rate
    matmul_efficiency: Efficiency
    memory_efficiency: Efficiency
    link_efficiency: Efficiency
    exchange_overlap: float = Field(default=0.0, ge=0, le=1)
    layer_overhead_s: Seconds
    decode_overhead_s: Seconds
    optimizer_overhead_s: Seconds
    reallocation_overhead_s: Seconds = 0.0
    transfer_overhead_s: Seconds = 0.0
    dispatch_s: Seconds
    process_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    sources: tuple[str, ...] = ()

    def compute_s(self, flops: float, traffic_bytes: float) -> float:
        """Seconds of an operation by the roofline: the longer of arithmetic (FLOPs) and memory traffic (bytes)."""
        return max(
            flops / (self.flops_per_s * self.matmul_efficiency),
            traffic_bytes / (self.memory_bytes_per_s * self.memory_efficiency),
        )

    def link(self, crosses_hosts: bool) -> Link:
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


_GPU_SOURCES = (
    "peaks: NVIDIA data sheets (dense bf16, HBM); NVLink per direction; one NIC per GPU as in DGX systems",
    "matmul_efficiency: model FLOP utilisation that Megatron-LM reports (arXiv:2104.04473)",
    "host_copy_bytes_per_s: pinned memory, about 80% of PCIe x16, whose generation 4 (A100) has 31.5 GB/s in each "
    "direction and generation 5 (H100, H200) 63",
    "memory_efficiency, link_efficiency: estimates, about what STREAM and NCCL tests reach",
    "exchange_overlap: estimate; NCCL's kernels take a few of the multiprocessors",
    "layer_overhead_s, optimizer_overhead_s: estimates for eager kernels; decode_overhead_s: for CUDA graphs",
)


def _gpu(
    name: str, flops: float, memory: float, size: float, nvlink: float, nic: float, host: float
) -> DeviceProfile:
    return DeviceProfile(
        name=name,
        flops_per_s=flops,
        memory_bytes_per_s=memory,
        memory_bytes=int(size),
        inside_host=Link(bytes_per_s=nvlink, latency_s=5e-6),
        between_hosts=Link(bytes_per_s=nic, latency_s=15e-6),
        host_copy_bytes_per_s=host,
        matmul_efficiency=0.5,
        memory_efficiency=0.8,
        link_efficiency=0.8,
        exchange_overlap=0.8,
        layer_overhead_s=2e-4,
        decode_overhead_s=2e-5,
        optimizer_overhead_s=2e-3,
        dispatch_s=5e-3,
        sources=_GPU_SOURCES,
    )


PRESETS: dict[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        _gpu("a100-80g-sxm", 312e12, 2.039e12, 80e9, 300e9, 25e9, 25e9),
        _gpu("h100-sxm", 989e12, 3.35e12, 80e9, 450e9, 50e9, 50e9),
        _gpu("h200-sxm", 989e12, 4.8e12, 141e9, 450e9, 50e9, 50e9),
        DeviceProfile(
            name="cpu-slot",
            flops_per_s=171e9,
            memory_bytes_per_s=10e9,
            memory_bytes=4 * 10**9,
            inside_host=Link(bytes_per_s=1e9, latency_s=3e-4),
            between_hosts=Link(bytes_per_s=1e8, latency_s=1e-3),
            host_copy_bytes_per_s=5e9,
            matmul_efficiency=0.5,
            memory_efficiency=0.8,
            link_efficiency=0.8,
            layer_overhead_s=5e-4,
            decode_overhead_s=5e-4,
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
                "process_bytes: RssAnon of ranks with torch and transformers, 336 to 370 MB",
                "all other figures: estimates",
            ),
        ),
    )
}


def preset_of_gpu(model: str) -> str | None:
    """The preset for a GPU's model name such as "NVIDIA H100 80GB HBM3"; None if there is none."""
    return next((name for name in PRESETS if name.split("-")[0].upper() in model.upper()), None)


def preset(name: str) -> DeviceProfile:
    """A preset by name. Raises ValueError, which names the known presets."""
    if name not in PRESETS:
        raise ValueError(f"There is no device preset {shown(name)}; known are {', '.join(PRESETS)}.")
    return PRESETS[name]


def described(device: DeviceProfile) -> str:
    """Where a device's figures come from, as in `changed preset of cpu-slot`.

    A changed memory size does not count as a change: it is the machine's own.
    """
    known = PRESETS.get(device.name)
    if known is None:
        return f"stated figures of {device.name}"
    same = device.model_copy(update={"memory_bytes": known.memory_bytes}) == known
    return f"{'preset' if same else 'changed preset'} of {device.name}"
