"""A checksum of a model's parameters that does not depend on how they are laid out."""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf_tasks.parallel.layout.slices import Layout

_BITS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # itemsize -> what its bits are read as


def digest(slices: Mapping[str, Tensor], layout: Layout, device: int) -> Tensor:
    """This device's summand of the digest of its dp rank's model: one int64 on the tensors' device.

    The bit patterns of each row are summed, then weighted by the row's number and the parameter's name, so
    that exchanged rows or parameters show. Sums wrap around at 2**64. The sum over a replica's devices is the
    digest: each row counts on one device only (`Layout.primary`).
    """
    held, summands = layout.held(device), []
    for name, rows in layout.primary(device).items():
        if rows.size:
            spec, tensor = layout.specs[name], slices[name].detach()
            mine = tensor.narrow(spec.dim, rows.start - held[name].start, rows.size)
            bits = mine.view(_BITS[tensor.dtype.itemsize]).movedim(spec.dim, 0)
            sums = bits.flatten(1).sum(1, dtype=torch.int64) if bits.ndim > 1 else bits.to(torch.int64)
            numbers = torch.arange(rows.start, rows.stop, device=tensor.device)
            summands.append((sums * (2 * numbers + 1)).sum() * (2 * zlib.crc32(name.encode()) + 1))
    tensors_on = next(iter(slices.values())).device
    return torch.stack(summands).sum() if summands else torch.zeros((), dtype=torch.int64, device=tensors_on)
