"""The layers of Gemma 4, which differ from each other: some share the keys and values of an earlier layer, each may
have a further input of its own for every token, and experts stand beside its MLP.

What passes from layer to layer besides hidden states is an input and an output of each layer here, so that a layer
can be recomputed, and be on another stage than the one whose keys and values it attends to.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Message
from prefect_rlhf.rlhf_tasks.parallel.model.norms import UnscaledNorm
from prefect_rlhf.rlhf_tasks.parallel.model.products import linear
from prefect_rlhf.rlhf_tasks.parallel.model.tensor_parallel import Experts, copy_to_ranks, sum_over_ranks


class ScaledRouter(nn.Module):
    """Chooses experts by the largest probabilities of a softmax over all, in float32 or wider. Hidden states are
    normalised and scaled first; the weights of a token's experts are divided by their sum, and multiplied by a factor
    of each expert."""

    def __init__(self, experts: int, hidden: int, per_token: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.per_token = per_token
        self.norm = UnscaledNorm(eps)
        self.proj = nn.Linear(hidden, experts, bias=False, device=device)
        self.scale = nn.Parameter(torch.empty(hidden, device=device))
        self.per_expert_scale = nn.Parameter(torch.empty(experts, device=device))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> (numbers of the chosen experts [T, per_token], their weights, of the same shape)."""
        scaled = self.norm(x) * self.scale * x.shape[-1] ** -0.5
        wide = torch.promote_types(x.dtype, torch.float32)
        probabilities = linear(scaled, self.proj.weight).softmax(-1, dtype=wide)
        weights, chosen = probabilities.topk(self.per_token, dim=-1)
        # not by an index, whose backward pass adds rows in an order that differs from pass to pass
        factors = self.per_expert_scale.expand_as(probabilities).gather(-1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * factors


class VariedLayer(nn.Module):
    """A layer of Gemma 4: the modules of transformers' layer under their names, and our experts.

    theirs   transformers' layer; its linear modules and norms are replaced as in every family
    experts  the router and experts that stand beside the MLP; None: there are none
    """

    self_attn: Any
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    pre_feedforward_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module
    # of experts
    post_feedforward_layernorm_1: nn.Module
    pre_feedforward_layernorm_2: nn.Module
    post_feedforward_layernorm_2: nn.Module
    # of the layer's input
    act_fn: nn.Module
    per_layer_input_gate: nn.Module
    per_layer_projection: nn.Module
    post_per_layer_input_norm: nn.Module

    def __init__(
        self, theirs: Any, experts: tuple[ScaledRouter, Experts] | None, group: ProcessGroup | None
    ) -> None:
        super().__init__()
        for name, child in theirs.named_children():
            if name not in ("router", "experts"):
                self.add_module(name, child)
        self.group = group
        self.router, self.experts = (None, None) if experts is None else experts
        self.has_input = hasattr(theirs, "per_layer_input_gate")
        self.layer_scalar = nn.Parameter(torch.empty(1, device="meta"))

    def forward(self, hidden: Tensor, *along: Tensor, **how: Any) -> tuple[Tensor, ...]:
        """One layer.

        hidden  [1, T, hidden]
        along   the layer's input [1, T, columns], if layers have one; keys and values [1, KV heads, T, head_dim] of
                an earlier layer, if it attends to these
        Returns the new hidden states and, where later layers may attend to its keys and values, these.
        """
        attention = self.self_attn
        kind, shared = attention.layer_type, along[-2:] if attention.is_kv_shared_layer else None
        states = {} if shared is None else {kind: shared}
        output, _ = attention(hidden_states=self.input_layernorm(hidden), shared_kv_states=states, **how)
        hidden = hidden + self.post_attention_layernorm(output)
        output = self.mlp(self.pre_feedforward_layernorm(hidden))
        if self.router is not None:
            output = self.post_feedforward_layernorm_1(output) + self._of_experts(hidden)
        hidden = hidden + self.post_feedforward_layernorm(output)
        if self.has_input:
            gated = self.act_fn(self.per_layer_input_gate(hidden)) * along[0]
            hidden = hidden + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        hidden = hidden * self.layer_scalar.detach()
        return (hidden, *states[kind]) if attention.store_full_length_kv else (hidden,)

    def _of_experts(self, hidden: Tensor) -> Tensor:
        """What experts give. hidden [1, T, hidden] -> the same shape, equal on all ranks."""
        assert self.router is not None
        assert self.experts is not None
        chosen = self.router(copy_to_ranks(hidden, self.group).flatten(0, -2))
        x = copy_to_ranks(self.pre_feedforward_layernorm_2(hidden), self.group).flatten(0, -2)
        part = self.experts(x, *chosen)
        return self.post_feedforward_layernorm_2(sum_over_ranks(part, self.group).view_as(hidden))


def inputs_of_layers(decoder: Any, shape: ModelShape, hidden: Tensor, embedded: Tensor) -> Tensor:
    """The further inputs of all layers: [1, T, layers, columns].

    decoder   has the projection of hidden states and its norm
    hidden    embeddings of tokens [1, T, hidden]
    embedded  their embeddings for these inputs [1, T, layers * columns]
    """
    assert shape.varied is not None
    sizes = (shape.layers, shape.varied.inputs)
    projected = linear(hidden, decoder.per_layer_model_projection.weight) * shape.hidden**-0.5
    projected = decoder.per_layer_projection_norm(projected.unflatten(-1, sizes))
    return (projected + embedded.unflatten(-1, sizes)) * 2**-0.5


class Along:
    """What goes with the hidden states of a pass, from layer to layer and from stage to stage.

    shape  of the model
    """

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self.inputs = dict[int, Tensor]()
        self._keys = dict[int, tuple[Tensor, Tensor]]()  # layer -> what later ones share of it

    def receive(self, x: Tensor, message: Message) -> Tensor:
        """Take apart what came from the stage before, [1, T, columns]. Returns the hidden states."""
        hidden, inputs, rest = x.split(
            [message.hidden, n := message.inputs * len(message.later), x.shape[-1] - message.hidden - n], -1
        )
        if message.inputs:
            self.inputs = dict(zip(message.later, inputs.split(message.inputs, -1), strict=True))
        widths = [heads.kv * heads.dim for heads in message.keys.values() for _ in range(2)]
        parts = iter(rest.split(widths, -1))
        for layer, heads in message.keys.items():
            keys, values = (
                next(parts).unflatten(-1, (heads.kv, heads.dim)).transpose(1, 2) for _ in range(2)
            )
            self._keys[layer] = keys, values
        return hidden

    def send(self, hidden: Tensor, message: Message) -> Tensor:
        """Hidden states and what the next stage needs besides: [1, T, columns]."""
        inputs = [self.inputs[layer] for layer in message.later if message.inputs]
        keys = [x.transpose(1, 2).flatten(2) for layer in message.keys for x in self._keys[layer]]
        return torch.cat([hidden, *inputs, *keys], -1)

    def of(self, layer: int) -> tuple[Tensor, ...]:
        """What a layer is given besides hidden states."""
        source = self._shape.keys_of(layer)
        inputs = (self.inputs[layer],) if self.inputs else ()
        return inputs if source == layer else (*inputs, *self._keys[source])

    def take(self, layer: int, output: tuple[Tensor, ...]) -> Tensor:
        """Keep what a layer gives besides hidden states, and return these."""
        hidden, *keys = output
        if keys:
            self._keys[layer] = keys[0], keys[1]
        return hidden
