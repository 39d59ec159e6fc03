"""Tensor parallelism inside one stage, after Megatron-LM (arXiv:1909.08053, section 3).

The input of a block (attention or MLP) passes `copy_to_ranks` (the paper's *f*). The block's first linear modules
(`ColumnParallelLinear`) hold a slice of the output columns. Its last linear module (`RowParallelLinear`) holds a
slice of the input columns, and its output passes `sum_over_ranks` (the paper's *g*). That makes two all-reduces
forward and two backward per layer.

A group is None where tp is 1. Every function here then does the same as its plain counterpart.

Experts are split as MLPs are (second half).
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import all_reduce
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval
from prefect_rlhf.rlhf_tasks.parallel.model.products import linear


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        # A gradient tensor may be shared with other branches of the graph: reduce a copy.
        return all_reduce(gradients[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def copy_to_ranks(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Forward the identity, backward an all-reduce of the gradient (*f* in the paper).

    x  any shape, equal on all ranks of the group; each rank's gradient is the contribution of its slice
    """
    return x if group is None else _CopyToRanks.apply(x, group)  # pyright: ignore[reportReturnType]


def sum_over_ranks(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Forward an all-reduce *in place*, backward the identity (*g* in the paper).

    x  any shape, contiguous: this rank's contribution to the sum
    """
    return x if group is None else _SumOverRanks.apply(x, group)  # pyright: ignore[reportReturnType]


class AdaptableLinear(nn.Linear):
    """A linear module that may have an adapter: W x + scaling * B (A x) (LoRA, arXiv:2106.09685)."""

    def __init__(self, in_features: int, out_features: int, bias: bool, device: torch.device) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device)
        self.lora_A: nn.Linear | None = None
        self.lora_B: nn.Linear | None = None
        self.scaling = 0.0

    def adapt(self, lora: Lora) -> None:
        """Add the adapter, of the module's local size, under peft's names: lora_A [rank, in], lora_B [out, rank]."""
        device = self.weight.device
        self.lora_A = nn.Linear(self.in_features, lora.rank, bias=False, device=device)
        self.lora_B = nn.Linear(lora.rank, self.out_features, bias=False, device=device)
        self.scaling = lora.scaling

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in_features] -> [..., out_features], adapter included."""
        output = linear(x, self.weight, bias)
        if self.lora_A is None or self.lora_B is None:
            return output
        low = linear(x, self.lora_A.weight)
        return output.add(linear(low, self.lora_B.weight), alpha=self.scaling)


class ColumnParallelLinear(AdaptableLinear):
    """A linear module that holds a slice of the output columns, or all of them."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., local columns]."""
        return self.product(input, self.bias)


class PackedColumns(nn.ModuleDict):
    """Column-parallel linear modules side by side by name, in place of one that a family packs them in."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., local columns of the first part, of the second, ...]."""
        return torch.cat([part(input) for part in self.values()], -1)


class RowParallelLinear(AdaptableLinear):
    """A linear module that holds a slice of the input columns; its output is summed over the tp group.

    in_features is the local number of columns. Every rank holds the whole bias and adds it after the sum. Of an
    adapter, A x is a part of a sum too. B is linear, so the one sum completes both.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: ProcessGroup | None,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, out_features, bias, device)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        """input [..., local columns] -> [..., out_features], equal on all ranks."""
        if self.group is None:
            return self.product(input, self.bias)
        total = sum_over_ranks(self.product(input, None), self.group)
        return total if self.bias is None else total + self.bias


@cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    """A number rounded to a dtype. Cached, because a forward pass captured in a CUDA graph must not make a tensor."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()


class VocabParallelEmbedding(nn.Module):
    """Token embeddings of which a rank holds the rows `vocab`; an all-reduce brings the other ranks' embeddings.

    scale        factor on the result (Gemma's square root of the hidden size), rounded to its dtype as Gemma does
    padding_idx  the token whose row gets no gradient from here, as in `nn.Embedding`; None: no such token
    """

    def __init__(
        self,
        vocab: Interval,
        hidden: int,
        group: ProcessGroup | None,
        device: torch.device,
        scale: float = 1.0,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.group = group
        self.scale = scale
        inside = padding_idx is not None and vocab.start <= padding_idx < vocab.stop
        self.padding_row = padding_idx - vocab.start if padding_idx is not None and inside else None
        self.weight = nn.Parameter(torch.empty(vocab.size, hidden, device=device))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [T] int64 -> embeddings [T, hidden], equal on all ranks."""
        if self.group is None:
            embedded = F.embedding(tokens, self.weight, self.padding_row)
        else:
            foreign = (tokens < self.vocab.start) | (tokens >= self.vocab.stop)
            rows = (tokens - self.vocab.start).masked_fill(foreign, 0)
            local = F.embedding(rows, self.weight, self.padding_row).masked_fill(foreign[:, None], 0.0)
            embedded = sum_over_ranks(local, self.group)
        if self.scale == 1.0:
            return embedded
        return embedded * _rounded(self.scale, embedded.dtype)


# Mixtures of experts: a router gives each token to the best few of a layer's MLPs, and weighs what they give. Every
# tp rank holds a slice of the columns of every expert, as of an MLP: whatever the router says, all ranks compute and
# hold equally much, and no token moves. Each rank routes all tokens, from the same bits. What it computes is a part
# of each expert's output, so the gradient of the router, and of its input, is a part too: the block's
# `copy_to_ranks` sums the input's, `SharedSums` (train/gradients.py) the router's, as those of norms inside heads.
# No expert has a capacity, and no token is dropped. There is no loss that balances the load (transformers adds one
# only where `output_router_logits` asks for it).


class Router(nn.Module):
    """Chooses experts by the largest probabilities of a softmax over all, in float32 or wider.

    normalised  the weights of a token's experts are divided by their sum
    biased      a bias is added before the softmax
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        experts: int,
        hidden: int,
        per_token: int,
        normalised: bool,
        device: torch.device,
        biased: bool = False,
    ) -> None:
        super().__init__()
        self.per_token = per_token
        self.normalised = normalised
        self.weight = nn.Parameter(torch.empty(experts, hidden, device=device))
        self.bias = nn.Parameter(torch.empty(experts, device=device)) if biased else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> (numbers of the chosen experts [T, per_token], their weights, of the same shape)."""
        logits = linear(x, self.weight, self.bias)
        probabilities = logits.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
        weights, chosen = probabilities.topk(self.per_token, dim=-1)
        return chosen, weights / weights.sum(-1, keepdim=True) if self.normalised else weights


class Grouping(NamedTuple):
    """How a router with groups chooses: the best groups of neighbouring experts, then the best experts of these.

    chosen  groups that a token may choose experts of
    factor  of the weights
    least   added to the sum by which weights are divided
    """

    groups: int
    chosen: int
    factor: float
    least: float


class GroupedRouter(Router):
    """Scores experts by sigmoids, in float32 or wider (arXiv:2412.19437, section 2.1.2).

    What chooses is an expert's score plus its correction, which no gradient changes; what weighs is the score.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        per_token: int,
        normalised: bool,
        device: torch.device,
        grouping: Grouping,
    ) -> None:
        super().__init__(experts, hidden, per_token, normalised, device)
        self.grouping = grouping
        self.e_score_correction_bias = nn.Parameter(torch.empty(experts, device=device))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As of `Router`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = linear(x.to(wide), self.weight.to(wide)).sigmoid()
        chosen = self._chosen(scores.detach() + self.e_score_correction_bias.detach())
        weights = scores.gather(1, chosen)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + self.grouping.least)
        return chosen, weights * self.grouping.factor

    def _chosen(self, merits: Tensor) -> Tensor:
        """merits [T, experts] -> numbers of the chosen experts [T, per_token]. The merit of a group is the sum of its
        two best."""
        groups, chosen, *_ = self.grouping
        if chosen < groups:
            of_groups = merits.unflatten(-1, (groups, -1))
            best = of_groups.topk(2, dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
            open_to = torch.zeros_like(of_groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            merits = of_groups.masked_fill(~open_to[..., None], -torch.inf).flatten(-2)
        return merits.topk(self.per_token, dim=-1).indices


def can_group(device: torch.device, dtype: torch.dtype, hidden: int, columns: int) -> bool:
    """Whether torch has one kernel for the products of all experts: on GPUs, of rows of multiples of 16 bytes."""
    aligned = all(size * dtype.itemsize % 16 == 0 for size in (hidden, columns))
    return device.type == "cuda" and dtype == torch.bfloat16 and aligned


Inner = Callable[[Tensor, Tensor], Tensor]
"""(gate [n, columns], up [n, columns]) -> what an expert's last product is given, of the same shape."""


def gated(activation: Callable[[Tensor], Tensor]) -> Inner:
    """activation(gate) * up."""

    def inner(gate: Tensor, up: Tensor) -> Tensor:
        return activation(gate) * up

    return inner


def clamped(alpha: float, limit: float) -> Inner:
    """GPT-OSS's: (up + 1) * gate * sigmoid(alpha * gate), of a gate of at most `limit` and columns within +-limit."""

    def inner(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(alpha * gate))

    return inner


class Experts(nn.Module):
    """Gated MLPs side by side, of each of which a rank holds the same columns.

    inner       between the products
    grouped     the products of all experts are one kernel (`can_group`)
    rows        if they are not: an expert's product has a multiple of so many rows if it has more of them; those
                after are zeros
    biased      all products have biases. Every rank holds that of the outputs whole
    adds_bias   whether this rank adds the bias of the outputs: one of a tp group does, before the sum over them
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        columns: int,
        inner: Inner,
        device: torch.device,
        grouped: bool = False,
        rows: int = 1,
        biased: bool = False,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.inner = inner
        self.grouped = grouped
        self.rows = rows
        self.biased = biased
        self.share = 1.0 if adds_bias else 0.0  # a factor, so that the bias has a gradient on every rank
        self.gate_proj = nn.Parameter(torch.empty(experts, columns, hidden, device=device))
        self.up_proj = nn.Parameter(torch.empty(experts, columns, hidden, device=device))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, columns, device=device))
        if biased:
            self.gate_proj_bias = nn.Parameter(torch.empty(experts, columns, device=device))
            self.up_proj_bias = nn.Parameter(torch.empty(experts, columns, device=device))
            self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden, device=device))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of what each token's experts give, of which this rank's columns are a part.

        x [T, hidden]; chosen, weights [T, k] -> [T, hidden]
        """
        of_pairs = chosen.flatten()
        order = of_pairs.argsort(stable=True)  # numbers of pairs of a token and an expert, expert by expert
        tokens = (order // chosen.shape[1]).to(torch.int32)
        places = order.argsort().view_as(chosen)
        counts = of_pairs.new_zeros(len(self.gate_proj)).index_add_(0, of_pairs, torch.ones_like(of_pairs))
        rows: Any = _Spread.apply(x, tokens, places)
        factors = weights.flatten()[order, None]
        outputs = self._together if self.grouped else self._in_turn
        return _Collect.apply(outputs(rows, factors, counts), tokens, places)  # pyright: ignore[reportReturnType]

    # The factor comes before the last product, whose input has fewer columns than its output on most ranks.

    def _together(self, rows: Tensor, factors: Tensor, counts: Tensor) -> Tensor:
        """What experts give for their rows, one kernel a product. rows [T k, hidden], factors [T k, 1] -> as rows."""
        ends = counts.cumsum(0, dtype=torch.int32)

        def product(x: Tensor, weights: Tensor) -> Tensor:
            return F.grouped_mm(x, weights.transpose(-2, -1), offs=ends)

        gate, up = product(rows, self.gate_proj), product(rows, self.up_proj)
        if not self.biased:
            return product((self.inner(gate, up) * factors).to(rows.dtype), self.down_proj)
        experts = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
        biases = (self.gate_proj_bias, self.up_proj_bias, self.down_proj_bias)
        of_gate, of_up, of_output = (_OfExperts.apply(bias, experts, counts) for bias in biases)
        inner = self.inner(gate + of_gate, up + of_up) * factors
        output = product(inner.to(rows.dtype), self.down_proj)
        return output + (of_output * (factors * self.share)).to(rows.dtype)

    def _in_turn(self, rows: Tensor, factors: Tensor, counts: Tensor) -> Tensor:
        """The same, expert by expert."""
        sizes = counts.tolist()
        matrices = zip(self.gate_proj.unbind(), self.up_proj.unbind(), self.down_proj.unbind(), strict=True)
        biases: Any = [(None, None, None)] * len(sizes)
        if self.biased:
            each = (self.gate_proj_bias, self.up_proj_bias, self.down_proj_bias)
            biases = zip(*(bias.unbind() for bias in each), strict=True)
        experts = zip(rows.split(sizes), factors.split(sizes), matrices, biases, strict=True)
        return torch.cat([self._expert(*expert) for expert in experts if len(expert[0])])

    def _expert(
        self,
        x: Tensor,
        factor: Tensor,
        weights: tuple[Tensor, Tensor, Tensor],
        biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> Tensor:
        """One expert's output for its tokens. x [n, hidden], factor [n, 1] -> [n, hidden]."""
        n = len(x)
        if n > self.rows and n % self.rows:
            padding = (0, 0, 0, self.rows - n % self.rows)
            x, factor = F.pad(x, padding), F.pad(factor, padding)
        gate, up, down = weights
        of_gate, of_up, of_output = biases
        inner = self.inner(linear(x, gate, of_gate), linear(x, up, of_up))
        output = linear((inner * factor).to(x.dtype), down)
        if of_output is not None:
            output = output + (of_output * (factor * self.share)).to(x.dtype)
        return output[:n]


class SharedMLP(nn.Module):
    """The experts that every token passes: one gated MLP, whose output is this rank's part of a sum.

    The linear modules have this rank's columns; `down_proj` sums nothing.
    """

    def __init__(
        self,
        gate_proj: AdaptableLinear,
        up_proj: AdaptableLinear,
        down_proj: AdaptableLinear,
        inner: Inner,
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> the same shape."""
        return self.down_proj(self.inner(self.gate_proj(x), self.up_proj(x)))


class MixtureOfExperts(nn.Module):
    """A router and its experts, in place of a layer's MLP.

    The experts that every token passes, and their gate, are added under the family's names (`share`).

    in_pair  the layer expects a pair, whose second part it does not use (GPT-OSS)
    """

    def __init__(
        self, gate: Router, experts: Experts, group: ProcessGroup | None, in_pair: bool = False
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.group = group
        self.in_pair = in_pair
        self._shared: tuple[str, str | None] | None = None

    def share(self, block: str, mlp: SharedMLP, gate_name: str | None, gate: nn.Linear | None) -> None:
        """Add the experts that every token passes; of a gate [1, hidden], the sigmoid is a factor of their output."""
        self.add_module(block, mlp)
        if gate_name is not None:
            self.add_module(gate_name, gate)
        self._shared = block, gate_name

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, None]:
        """hidden_states [..., hidden] -> the same shape, equal on all ranks."""
        x = copy_to_ranks(hidden_states, self.group).flatten(0, -2)
        part = self.experts(x, *self.gate(x))
        if self._shared is not None:
            part = part + self._of_all(x, *self._shared)
        output = sum_over_ranks(part, self.group).view_as(hidden_states)
        return (output, None) if self.in_pair else output

    def _of_all(self, x: Tensor, block: str, gate_name: str | None) -> Tensor:
        """What the experts that every token passes give. x [T, hidden] -> the same shape."""
        output = self.get_submodule(block)(x)
        if gate_name is None:
            return output
        gate = self.get_submodule(gate_name).weight
        assert isinstance(gate, Tensor)
        return output * torch.sigmoid(linear(x, gate))


# Each of these two is the other's transpose, and so its backward pass. torch's own backward pass of an index adds
# rows in an order that differs from pass to pass. Both are told the pairs of a token and an expert:
#
# tokens  [T k] int32: the token of each pair
# places  [T, k]: where in `tokens` those of each token are


class _Spread(torch.autograd.Function):
    """The row of each pair's token. x [T, hidden] -> [T k, hidden]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _summed(gradients[0], places), None, None


class _Collect(torch.autograd.Function):
    """The sum of the rows of each token's pairs. y [T k, hidden] -> [T, hidden]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        # Not among the saved tensors: full recomputation, which ends with the last of these, spares the last product.
        ctx.tokens = tokens
        return _summed(y, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.tokens), None, None


class _OfExperts(torch.autograd.Function):
    """Each row's expert's bias. bias [experts, n], experts [rows] in order, counts [experts] -> [rows, n]."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return bias.index_select(0, experts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (counts,), gradient = ctx.saved_tensors, gradients[0]
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        # the sum of each expert's rows, in their order; an expert without rows has zeros
        return torch.segment_reduce(wide, "sum", lengths=counts, unsafe=True).to(gradient.dtype), None, None


def _summed(y: Tensor, places: Tensor) -> Tensor:
    return y.index_select(0, places.flatten()).view(*places.shape, y.shape[-1]).sum(1)
