"""Moves the samples of an iteration from the heads of one placement to the heads of another, and from a head to all
ranks of its replica."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch, SampleStore
from prefect_rlhf.rlhf_tasks.parallel.comm.checksums import checksum, checksums, require_same
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import Blank, ProcessGroups, exchange, pack, unpack
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import Side, plan_redistribution, shares
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_MAX_DIMS = 3  # most dims of one row of a key
_HEADER = 2 + _MAX_DIMS
_ABSENT = -1


def heads_set(source: Side, destination: Side) -> tuple[int, ...]:
    """The set of devices in which a redistribution communicates. It must be among the sets of `ProcessGroups`."""
    return tuple(sorted({*source.placement.heads, *destination.placement.heads}))


class Holdings(NamedTuple):
    """The data of one key that some heads hold.

    dtype, row_shape  of the key's data; a row is e.g. one token, byte or score
    held              head device -> ids of the samples it holds
    rows              sample id -> number of rows, over all heads
    """

    dtype: torch.dtype
    row_shape: tuple[int, ...]
    held: Mapping[int, Sequence[int]]
    rows: Mapping[int, int]

    def blank(self, samples: Sequence[int]) -> Blank:
        """Dtype and shape of some samples' packed values, which their receiver must know."""
        return Blank(self.dtype, (sum(self.rows[sample] for sample in samples), *self.row_shape))


def survey(
    store: SampleStore, ids: Sequence[int], keys: Sequence[str], heads: Sequence[int], groups: ProcessGroups
) -> dict[str, Holdings]:
    """All-gather which samples each head holds: key -> holdings. Collective over `heads`, which include this rank.

    Raises LookupError naming a key that no head holds for any sample.
    """
    ours = torch.full((len(keys), _HEADER + len(ids)), _ABSENT, dtype=torch.int64)
    for number, key in enumerate(keys):
        held = [i for i, sample in enumerate(ids) if store.has(sample, key)]
        if held:
            values = store.get([ids[held[0]]], [key])[key].values
            assert values.ndim - 1 <= _MAX_DIMS, f"key {key!r}: rows of {values.ndim - 1} dims"
            header = [_DTYPES.index(values.dtype), values.ndim - 1, *values.shape[1:]]
            ours[number, : len(header)] = torch.tensor(header)
            lengths = torch.tensor([store.length(ids[i], key) for i in held])
            ours[number, _HEADER + torch.tensor(held)] = lengths
    tables = _all_gather(ours, heads, groups)
    return {key: _holdings(key, number, ids, tables) for number, key in enumerate(keys)}


def redistribute(
    source: Side,
    destination: Side,
    ids: Sequence[int],
    keys: Sequence[str],
    store: SampleStore,
    groups: ProcessGroups,
    devices_per_host: int,
    token_key: str = "",
) -> int:
    """Bring `keys` of each head's samples in the destination into its store. Returns the bytes that this rank sent.

    ids        the iteration's sample ids
    token_key  the key whose lengths are balanced where `destination.balance == "tokens"`, else unused; each sample
               must have it on one of the heads
    groups     must have the group of `heads_set`

    Collective over the heads of both sides; any other rank returns at once. The heads first tell each other which
    samples they hold; then each computes the same list of messages. A head does not receive what it already holds.
    Sources keep what they send. A message ends with the checksums of its tensors. Raises InvariantError naming the
    key and both ranks where other bits arrive.
    """
    heads = heads_set(source, destination)
    if groups.rank not in heads:
        return 0
    by_tokens = destination.balance == "tokens"
    all_keys = list(dict.fromkeys([*keys, token_key])) if by_tokens else list(keys)
    holdings = survey(store, ids, all_keys, heads, groups)
    reach(Point.TRANSFER)
    wanted = shares(destination, ids, holdings[token_key].rows if by_tokens else None)
    outgoing: dict[int, list[Tensor]] = {}
    expected: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for key in keys:
        for transfer in plan_redistribution(holdings[key].held, wanted, devices_per_host, key):
            if transfer.source == groups.rank:
                values = store.get(transfer.ids, [key])[key].values
                outgoing.setdefault(transfer.destination, []).append(values)
            elif transfer.destination == groups.rank:
                expected.setdefault(transfer.source, []).append((key, transfer.ids))
    sent = sum(tensor.nbytes for tensors in outgoing.values() for tensor in tensors)
    for tensors in outgoing.values():
        tensors.append(checksums(tensors, groups.device))
    blanks = {
        peer: [*(holdings[key].blank(samples) for key, samples in e), Blank(torch.int64, (len(e),))]
        for peer, e in expected.items()
    }
    for peer, (*tensors, sums) in exchange(outgoing, blanks, groups[heads], groups.device).items():
        what = f"transfer from rank {peer} to rank {groups.rank}"
        require_same(what, [key for key, _ in expected[peer]], sums, checksums(tensors, groups.device))
        for (key, samples), values in zip(expected[peer], tensors, strict=True):
            packed = Packed(values, tuple(holdings[key].rows[sample] for sample in samples))
            store.put(SampleBatch(samples, {key: packed}))
    return sent


def _all_gather(ours: Tensor, heads: Sequence[int], groups: ProcessGroups) -> dict[int, Tensor]:
    """Head device -> its table, int64 of the shape of `ours`."""
    group = groups[heads]
    if group is None:
        return {groups.rank: ours}
    sent = ours.to(groups.device)
    tables = [torch.empty_like(sent) for _ in heads]
    dist.all_gather(tables, sent, group=group)
    return {head: table.cpu() for head, table in zip(sorted(heads), tables, strict=True)}


def _holdings(key: str, number: int, ids: Sequence[int], tables: Mapping[int, Tensor]) -> Holdings:
    headers = set()
    samples_of = {}
    rows = {}
    for head, table in tables.items():
        of_key = table[number].tolist()
        lengths = {i: n for i, n in zip(ids, of_key[_HEADER:], strict=True) if n != _ABSENT}
        if lengths:
            headers.add(tuple(of_key[:_HEADER]))
        samples_of[head] = tuple(lengths)
        rows.update(lengths)
    if not headers:
        raise LookupError(f"key {key!r}: none of the heads {sorted(tables)} holds a sample of it")
    assert len(headers) == 1, f"key {key!r} has several dtypes or row shapes: {headers}"
    code, dims, *shape = headers.pop()
    return Holdings(_DTYPES[code], tuple(shape[:dims]), samples_of, rows)


def share_batch(batch: SampleBatch | None, placement: Placement, groups: ProcessGroups) -> SampleBatch:
    """Broadcast the head's batch to all ranks of its replica, which call this together.

    batch  on the head; None on the other ranks of the replica
    There are two messages, both to the rank's device: two lengths and the checksum of the description; then a
    description of the batch, with checksums, and all tensors, bit for bit. Raises InvariantError naming the key and
    both ranks where other bits arrive.
    """
    dp_rank = placement.coordinate(groups.rank).dp
    group, head = groups[placement.replica(dp_rank)], placement.head(dp_rank)
    assert (batch is not None) == (groups.rank == head), (
        f"rank {groups.rank}: the batch comes from rank {head}"
    )
    if group is None:
        assert batch is not None
        return batch
    parts: list[Tensor] = []
    if batch is not None:
        values = [packed.values.to(groups.device) for packed in batch.data.values()]
        described_here = _described(batch, checksums(values, groups.device).tolist())
        parts = [described_here, pack(values) if values else torch.empty(0, dtype=torch.uint8)]
    numbers = [*(part.numel() for part in parts), int(checksum(parts[0]))] if parts else [0, 0, 0]
    lengths = torch.tensor(numbers, device=groups.device)
    dist.broadcast(lengths, src=head, group=group)
    described, packed, _ = lengths.tolist()
    message = torch.empty(described + packed, dtype=torch.uint8, device=groups.device)
    for part, into in zip(parts, message.split([described, packed]), strict=False):
        into.copy_(part)
    dist.broadcast(message, src=head, group=group)
    if batch is not None:
        return batch
    what, text = f"batch from rank {head} to rank {groups.rank}", message[:described]
    require_same(what, ["its description"], lengths[2:], checksum(text)[None])
    ids, keys = json.loads(text.cpu().numpy().tobytes())
    blanks = [Blank(getattr(torch, dtype), tuple(shape)) for _, dtype, shape, *_ in keys]
    values = unpack(message[described:], blanks)
    sums = torch.tensor([key[-1] for key in keys], dtype=torch.int64, device=groups.device)
    require_same(what, [key[0] for key in keys], sums, checksums(values, groups.device))
    return SampleBatch(
        tuple(ids),
        {key: Packed(of_key, tuple(n)) for (key, *_, n, _), of_key in zip(keys, values, strict=True)},
    )


def _described(batch: SampleBatch, sums: Sequence[int]) -> Tensor:
    """[n] uint8: JSON of a batch's ids, and of each key's name, dtype, shape, lengths and checksum. n is a multiple
    of 16, so that what follows is aligned for any dtype."""
    keys = [
        (
            key,
            str(of_key.values.dtype).removeprefix("torch."),
            tuple(of_key.values.shape),
            of_key.lengths,
            one,
        )
        for (key, of_key), one in zip(batch.data.items(), sums, strict=True)
    ]
    text = json.dumps([batch.ids, keys]).encode()
    return torch.frombuffer(bytearray(text + b" " * (-len(text) % 16)), dtype=torch.uint8)
