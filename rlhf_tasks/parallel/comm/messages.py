"""Point-to-point messages between ranks: one flat buffer of bytes per pair, for tensors of any dtypes and shapes."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]


class Blank(NamedTuple):
    """Dtype and shape of a tensor to be received."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def exchange(
    outgoing: Mapping[int, Sequence[Tensor]],
    incoming: Mapping[int, Sequence[Blank]],
    group: ProcessGroup | None,
    device: torch.device,
) -> dict[int, list[Tensor]]:
    """Send each peer its tensors and receive from each peer, all at once (`batch_isend_irecv`).

    outgoing  peer (global rank) -> tensors of any dtypes and shapes
    incoming  peer -> blanks: the dtypes and shapes that this peer sends, in the same order
    group     contains this rank and all its peers; ranks without messages need not call
    Returns peer -> tensors, which are views of the peer's message. Bits are never converted.
    """
    packed = {peer: _pack(tensors) for peer, tensors in sorted(outgoing.items())}
    buffers = {
        peer: torch.empty(sum(blank.size_bytes for blank in blanks), dtype=torch.uint8, device=device)
        for peer, blanks in sorted(incoming.items())
    }
    operations = [dist.P2POp(dist.isend, data, peer, group) for peer, data in packed.items() if data.numel()]
    operations += [
        dist.P2POp(dist.irecv, data, peer, group) for peer, data in buffers.items() if data.numel()
    ]
    if operations:
        assert group is not None, "messages without a group"
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return {peer: _unpack(buffer, incoming[peer]) for peer, buffer in buffers.items()}


def broadcast_json(value: Any, source: int, group: ProcessGroup | None, device: torch.device) -> Any:
    """Broadcast the JSON-able value of rank `source` to a group and return it; without a group, `value` itself."""
    if group is None:
        return value
    encoded = json.dumps(value).encode() if dist.get_rank() == source else b""
    size = torch.tensor([len(encoded)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=source, group=group)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    if encoded:
        data.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
    dist.broadcast(data, src=source, group=group)
    return json.loads(bytes(data.tolist()))


def _order(dtypes: Sequence[torch.dtype]) -> list[int]:
    """Indices in the order of a message: wider elements first, so that every tensor is aligned for its dtype."""
    return sorted(range(len(dtypes)), key=lambda index: -dtypes[index].itemsize)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of some tensors, one after the other: [bytes] uint8."""
    order = _order([tensor.dtype for tensor in tensors])
    return torch.cat([tensors[index].contiguous().view(-1).view(torch.uint8) for index in order])


def _unpack(buffer: Tensor, blanks: Sequence[Blank]) -> list[Tensor]:
    """The tensors of a message [bytes] uint8, as views."""
    tensors: list[Tensor] = [buffer] * len(blanks)
    offset = 0
    for index in _order([blank.dtype for blank in blanks]):
        blank = blanks[index]
        data = buffer[offset : offset + blank.size_bytes]
        tensors[index] = data.view(blank.dtype).view(blank.shape)
        offset += blank.size_bytes
    return tensors
