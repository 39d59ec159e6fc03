"""Checksums by which both ends of a movement know that the bits are the same, computed where the tensors are.

Integers that stand for the bits are summed in rows, and each row's sum is weighted by an odd number of its place, all
modulo 2**64. So one flipped bit always changes the checksum, and rows that change places do; numbers that
change places within a row of 4,096 do not. On the CPU it reads
about as fast as memory is copied, on a GPU faster than anything arrives (docs/adr/0037-digests.md).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.system.invariants import InvariantError

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Item size in bytes -> the integer dtype that its bits are read as."""

_ROW = 4096
_BLOCK = 1 << 18
"""Integers that a CPU widens at a time: they stay in its cache. torch's own sum of narrower integers is 20 times
slower."""


def row_sums(bits: Tensor) -> Tensor:
    """The sums of integers [rows, columns]: [rows] int64."""
    if bits.device.type != "cpu":
        return bits.sum(1, dtype=torch.int64)
    if bits.numel() <= _BLOCK:
        return bits.to(torch.int64).sum(1)
    n_rows = max(1, _BLOCK // max(1, bits.shape[1]))
    return torch.cat([part.to(torch.int64).sum(1) for part in bits.split(n_rows)])


def checksum(values: Tensor) -> Tensor:
    """Of a tensor of any shape and dtype: one int64 scalar on its device."""
    bits = values.detach().contiguous().view(-1).view(BITS[values.dtype.itemsize])
    n_rows = len(bits) // _ROW
    if not n_rows:
        return bits.sum(dtype=torch.int64)
    whole, rest = bits[: n_rows * _ROW].view(n_rows, _ROW), bits[n_rows * _ROW :]
    sums = torch.cat([row_sums(whole), rest.to(torch.int64).sum()[None]])
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()


def checksums(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Of each tensor: [n] int64 on a device."""
    sums = [checksum(one).to(device) for one in tensors]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)


def require_same(what: str, names: Iterable[str], sent: Tensor, arrived: Tensor) -> None:
    """Raises InvariantError naming the first tensor whose checksums differ.

    what  was moved, between which ranks
    """
    if torch.equal(sent, arrived):
        return
    name = next(
        n for n, one, other in zip(names, sent.tolist(), arrived.tolist(), strict=True) if one != other
    )
    raise InvariantError(f"{what}: {name!r} has other bits than before")
