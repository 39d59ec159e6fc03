"""Context parallelism inside one stage, after DeepSpeed-Ulysses (arXiv:2309.14509, section 3).

The ranks of a cp group divide the tokens of a micro-batch. Each computes embeddings, norms, MLPs and the head for its
share, which is neighbouring tokens of whichever samples. For attention, an all-to-all gives each rank all tokens of a
share of the heads; a second one gives each rank its tokens' outputs of all heads. Heads are cut as over tp, so cp
need not divide them. A KV head goes to every rank whose query heads use it.

What a loss reads of each token is gathered over the group, in the order of the tokens. Every rank computes the same
loss, and its backward pass takes only its own tokens' part: the gradients of the group's ranks add up to the whole.
"""

from copy import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout, split
from prefect_rlhf.rlhf_tasks.parallel.model.attention import kv_index


class ContextRanks:
    """This rank's place among those that divide the tokens of its samples. cp = their number.

    heads     the query heads of its tp rank with which this rank attends
    kv_index  as the function gives it, of these heads and of the KV heads that come with them
    """

    def __init__(self, layout: Layout, groups: ProcessGroups) -> None:
        placement, at = layout.placement, layout.placement.coordinate(groups.rank)
        devices = placement.cp_group(groups.rank)
        self._rank, self._cp = at.cp, len(devices)
        self._group: ProcessGroup | None = groups[devices]
        self._in_group = [
            devices.index(device) for device in sorted(devices)
        ]  # cp ranks, as the group numbers them
        self._numbers = [self._in_group.index(rank) for rank in range(self._cp)]  # the reverse
        self._layout, self._tp_rank, self._device = layout, at.tp, groups.device
        self._divide_heads(layout.kv_head_map(at.tp))

    def _divide_heads(self, kv_of: tuple[int, ...]) -> None:
        """kv_of: the local KV head of each query head."""
        self._heads = [split(len(kv_of), self._cp, rank) for rank in range(self._cp)]
        self._kv_heads = [Interval(kv_of[h.start], kv_of[h.stop - 1] + 1) for h in self._heads]
        mine, kv = self._heads[self._rank], self._kv_heads[self._rank]
        self.heads = slice(*mine)
        self.kv_index = kv_index(tuple(kv_of[head] - kv.start for head in range(*mine)), self._device)

    def of_layer(self, layer: int) -> "ContextRanks":
        """The same in a layer, whose KV heads may be other ones (Gemma 4)."""
        divided = copy(self)
        divided._divide_heads(self._layout.kv_head_map(self._tp_rank, layer))
        return divided

    @classmethod
    def of(cls, layout: Layout, groups: ProcessGroups) -> "ContextRanks | None":
        """None where cp is 1."""
        return cls(layout, groups) if layout.placement.strategy.cp > 1 else None

    def rows(self, micro: MicroBatch) -> int:
        """Rows of a rank's share of the tokens that a micro-batch computes: as many on all ranks. Those after the
        last token are padding."""
        return -(-micro.computed_tokens // self._cp)

    def share(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """This rank's rows of what has a number for each computed token: [C] -> [rows]."""
        rows = self.rows(micro)
        return F.pad(x, (0, self._cp * rows - len(x)))[self._rank * rows : (self._rank + 1) * rows]

    # Attention. S = rows of a share, or more: those after it are left out. C = tokens that are computed

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor, micro: MicroBatch) -> tuple[Tensor, ...]:
        """From all heads of this rank's tokens to this rank's heads of all tokens.

        query, key, value  [1, heads, S, head_dim]
        Returns the same, [1, own heads, C, head_dim]; a key or value head that several ranks use goes to all of them.
        """
        states, rows = (query, key, value), self.rows(micro)
        heads = [(q, kv, kv) for q, kv in zip(self._heads, self._kv_heads, strict=True)]
        of_row = [state[0, :, :rows].transpose(0, 1) for state in states]  # [rows, heads, head_dim]
        parts = [
            torch.cat([x[:, slice(*part)].flatten(1) for x, part in zip(of_row, heads[rank], strict=True)], 1)
            for rank in self._in_group
        ]
        widths = [part.size * state.shape[3] for part, state in zip(heads[self._rank], states, strict=True)]
        received = _all_to_all(
            torch.cat([part.flatten() for part in parts]),
            [part.numel() for part in parts],
            [rows * sum(widths)] * self._cp,
            self._group,
        ).view(self._cp, rows, -1)
        whole = _in(self._numbers, received).flatten(0, 1)[: micro.computed_tokens]
        return tuple(
            part.unflatten(1, (-1, state.shape[3])).transpose(0, 1)[None]
            for part, state in zip(whole.split(widths, 1), states, strict=True)
        )

    def to_tokens(self, output: Tensor, micro: MicroBatch, size: int) -> Tensor:
        """The reverse, of what attention gives: [1, C, own heads, head_dim] -> [1, S, heads, head_dim]. size: S"""
        rows, head_dim = self.rows(micro), output.shape[3]
        whole = F.pad(output[0].flatten(1), (0, 0, 0, self._cp * rows - output.shape[1]))
        counts = [rows * self._heads[rank].size * head_dim for rank in self._in_group]
        sent = _in(self._in_group, whole.unflatten(0, (self._cp, rows)))
        received = _all_to_all(sent.flatten(), [sent[0].numel()] * self._cp, counts, self._group).split(
            counts
        )
        of_rank = [received[number].view(rows, -1) for number in self._numbers]
        return F.pad(torch.cat(of_rank, 1), (0, 0, 0, size - rows)).unflatten(1, (-1, head_dim))[None]

    # The head

    def own_rows(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Of the rows that pass the head (`micro.rows`), those of this rank's tokens: (their positions among the T
        tokens, their numbers among this rank's rows), both [R of this rank] int64."""
        places, owners = self._places(micro)
        mine = owners == self._rank
        assert micro.rows is not None
        return micro.rows[mine], places[mine] - self._rank * self.rows(micro)

    def gather_rows(self, values: Tensor, micro: MicroBatch) -> Tensor:
        """All ranks' results for the rows of `own_rows`, in the order of `micro.rows`: [R of this rank, ...] ->
        [R, ...]."""
        owners = self._places(micro)[1]
        counts = torch.bincount(owners, minlength=self._cp).tolist()
        order = owners.argsort(stable=True)
        return _gather(values, self._rank, counts, self._numbers, self._group)[order.argsort()]

    def gather_tokens(self, values: Tensor, micro: MicroBatch) -> Tensor:
        """All ranks' results for their shares: [rows] -> [C]."""
        counts = [len(values)] * self._cp
        whole = _gather(values, self._rank, counts, self._numbers, self._group)
        return whole[: micro.computed_tokens]

    def _places(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Of each row that passes the head: (its number among the computed tokens, the cp rank that has it)."""
        rows = micro.rows
        assert rows is not None, "with cp, the rows that pass the head are named"
        if micro.shared is not None:
            rows = micro.shared.whole(torch.arange(micro.computed_tokens, device=rows.device), 0)[rows]
        return rows, rows // self.rows(micro)


def _in(order: list[int], x: Tensor) -> Tensor:
    """The rows of a tensor in an order; nothing is copied where they are in it."""
    return x if order == sorted(order) else x[order]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.exchange = received, sent, group
        result = x.new_empty(sum(received))
        dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(gradients[0], *ctx.exchange), None, None, None  # pyright: ignore[reportReturnType]


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup | None) -> Tensor:
    """Elements of a flat tensor for each rank of the group, and from each, in the group's order."""
    return _AllToAll.apply(x, sent, received, group)  # pyright: ignore[reportReturnType]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mine: Tensor, rank: int, counts: list[int], numbers: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.slice = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        padded = F.pad(mine, (0, 0) * (mine.ndim - 1) + (0, max(counts) - len(mine)))
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([parts[number][:count] for number, count in zip(numbers, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gradients[0][ctx.slice].contiguous(), None, None, None, None


def _gather(
    mine: Tensor, rank: int, counts: list[int], numbers: list[int], group: ProcessGroup | None
) -> Tensor:
    """All cp ranks' rows after each other. Every rank has the same gradient of the result, and takes its part.

    counts   rows of each cp rank's; numbers: each one's number in the group
    """
    return _Gather.apply(mine, rank, counts, numbers, group)  # pyright: ignore[reportReturnType]
