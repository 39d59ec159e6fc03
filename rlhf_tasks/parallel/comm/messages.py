"""Point-to-point messages between ranks: one flat buffer of bytes per pair, whatever tensors are in it."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]


class Blank(NamedTuple):
    """A tensor to come: what its receiver must know."""

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
    """Sends each peer its tensors and receives what it announced, all at once (`batch_isend_irecv`).

    outgoing, incoming  peer (global rank) -> tensors, blanks; both ends of a pair list the same, in one order
    group               holds this rank and all its peers; ranks without messages need not call
    Returns peer -> tensors as views of the peer's message. Bits are never converted.
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
    """Gives every rank of a group the JSON-able value of rank `source`; the value itself without a group."""
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
    """Wider elements first, so that every tensor in a message is aligned for its dtype."""
    return sorted(range(len(dtypes)), key=lambda index: -dtypes[index].itemsize)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of some tensors one behind the other."""
    order = _order([tensor.dtype for tensor in tensors])
    return torch.cat([tensors[index].contiguous().view(-1).view(torch.uint8) for index in order])


def _unpack(buffer: Tensor, blanks: Sequence[Blank]) -> list[Tensor]:
    """Views of a message as the tensors that it was packed from."""
    tensors: list[Tensor] = [buffer] * len(blanks)
    offset = 0
    for index in _order([blank.dtype for blank in blanks]):
        blank = blanks[index]
        data = buffer[offset : offset + blank.size_bytes]
        tensors[index] = data.view(blank.dtype).view(blank.shape)
        offset += blank.size_bytes
    return tensors
