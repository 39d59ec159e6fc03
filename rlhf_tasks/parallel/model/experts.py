"""Mixtures of experts: a router gives each token to the best few of a layer's MLPs, and weighs what they give.

Every tp rank holds a slice of the columns of every expert, as of an MLP (`tensor_parallel.py`): whatever the router
says, all ranks compute and hold equally much, and no token moves. Each rank routes all tokens, from the same bits.
What it computes is a part of each expert's output, so the gradient of the router, and of its input, is a part too:
the block's `copy_to_ranks` sums the input's, `SharedSums` (train/gradients.py) the router's, as those of norms
inside heads. No expert has a capacity, and no token is dropped. There is no loss that balances the load (transformers
adds one only where `output_router_logits` asks for it).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from rlhf_tasks.parallel.model.products import linear
from rlhf_tasks.parallel.model.tensor_parallel import copy_to_ranks, sum_over_ranks


class Router(nn.Module):
    """Chooses experts by the largest probabilities of a softmax over all, in float32 or wider.

    normalised  the weights of a token's experts are divided by their sum
    """

    def __init__(
        self, experts: int, hidden: int, per_token: int, normalised: bool, device: torch.device
    ) -> None:
        super().__init__()
        self.per_token = per_token
        self.normalised = normalised
        self.weight = nn.Parameter(torch.empty(experts, hidden, device=device))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> (numbers of the chosen experts [T, per_token], their weights, of the same shape)."""
        logits = linear(x, self.weight)
        probabilities = logits.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
        weights, chosen = probabilities.topk(self.per_token, dim=-1)
        return chosen, weights / weights.sum(-1, keepdim=True) if self.normalised else weights


def can_group(device: torch.device, dtype: torch.dtype, hidden: int, columns: int) -> bool:
    """Whether torch has one kernel for the products of all experts: on GPUs, of rows of multiples of 16 bytes."""
    aligned = all(size * dtype.itemsize % 16 == 0 for size in (hidden, columns))
    return device.type == "cuda" and dtype == torch.bfloat16 and aligned


class Experts(nn.Module):
    """Gated MLPs side by side, of each of which a rank holds the same columns.

    activation  of the gate
    grouped     the products of all experts are one kernel (`can_group`)
    rows        if they are not: an expert's product has a multiple of so many rows if it has more of them; those
                after are zeros
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        columns: int,
        activation: Callable[[Tensor], Tensor],
        device: torch.device,
        grouped: bool = False,
        rows: int = 1,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.grouped = grouped
        self.rows = rows
        self.gate_proj = nn.Parameter(torch.empty(experts, columns, hidden, device=device))
        self.up_proj = nn.Parameter(torch.empty(experts, columns, hidden, device=device))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, columns, device=device))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of what each token's experts give, of which this rank's columns are a part.

        x [T, hidden]; chosen, weights [T, k] -> [T, hidden]
        """
        of_pairs = chosen.flatten()
        order = of_pairs.argsort(stable=True)  # numbers of pairs of a token and an expert, expert by expert
        tokens, places = (order // chosen.shape[1]).to(torch.int32), order.argsort().view_as(chosen)
        counts = of_pairs.new_zeros(len(self.gate_proj)).index_add_(0, of_pairs, torch.ones_like(of_pairs))
        rows, factors = _spread(x, tokens, places), weights.flatten()[order, None]
        given = (
            self._together(rows, factors, counts) if self.grouped else self._in_turn(rows, factors, counts)
        )
        return _collect(given, tokens, places)

    # The factor comes before the last product, whose input has fewer columns than its output on most ranks.

    def _together(self, rows: Tensor, factors: Tensor, counts: Tensor) -> Tensor:
        """What experts give for their rows, one kernel a product. rows [T k, hidden], factors [T k, 1] -> as rows."""
        ends = counts.cumsum(0, dtype=torch.int32)

        def product(x: Tensor, weights: Tensor) -> Tensor:
            return F.grouped_mm(x, weights.transpose(-2, -1), offs=ends)

        inner = self.activation(product(rows, self.gate_proj)) * product(rows, self.up_proj)
        return product((inner * factors).to(rows.dtype), self.down_proj)

    def _in_turn(self, rows: Tensor, factors: Tensor, counts: Tensor) -> Tensor:
        """The same, expert by expert."""
        sizes = counts.tolist()
        matrices = zip(self.gate_proj.unbind(), self.up_proj.unbind(), self.down_proj.unbind(), strict=True)
        given = [
            self._expert(part, factor, *of_expert)
            for part, factor, of_expert in zip(rows.split(sizes), factors.split(sizes), matrices, strict=True)
            if len(part)
        ]
        return torch.cat(given)

    def _expert(self, x: Tensor, factor: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """One expert's output for its tokens. x [n, hidden], factor [n, 1] -> [n, hidden]."""
        n = len(x)
        if n > self.rows and n % self.rows:
            padding = (0, 0, 0, self.rows - n % self.rows)
            x, factor = F.pad(x, padding), F.pad(factor, padding)
        inner = self.activation(linear(x, gate)) * linear(x, up)
        return linear((inner * factor).to(x.dtype), down)[:n]


class MixtureOfExperts(nn.Module):
    """A router and its experts, in place of a layer's MLP."""

    def __init__(self, gate: Router, experts: Experts, group: ProcessGroup | None) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.group = group

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., hidden] -> the same shape, equal on all ranks."""
        x = copy_to_ranks(hidden_states, self.group).flatten(0, -2)
        return sum_over_ranks(self.experts(x, *self.gate(x)), self.group).view_as(hidden_states)


# Each of these two is the other's transpose, and so its backward pass. torch's own backward pass of an index adds
# rows in an order that differs from pass to pass.


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _summed(gradients[0], places), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        # Not among the saved tensors: full recomputation, which ends with the last of these, spares the last product.
        ctx.tokens = tokens
        return _summed(y, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.tokens), None, None


def _summed(y: Tensor, places: Tensor) -> Tensor:
    return y.index_select(0, places.flatten()).view(*places.shape, y.shape[-1]).sum(1)


def _spread(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """The row of each pair's token. x [T, hidden] -> [T k, hidden].

    tokens  [T k] int32: the token of each pair of a token and an expert
    places  [T, k]: where in `tokens` those of each token are
    """
    return _Spread.apply(x, tokens, places)  # pyright: ignore[reportReturnType]


def _collect(y: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """The sum of the rows of each token's pairs. y [T k, hidden] -> [T, hidden]."""
    return _Collect.apply(y, tokens, places)  # pyright: ignore[reportReturnType]
