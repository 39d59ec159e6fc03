"""One pipeline stage of a decoder on one rank: Hugging Face's layers, their slices, our attention.

The decoder layers are the classes of transformers with their real layer numbers, because some behaviour depends on
the number (sliding window or full attention). The `Layout` says which modules are split, and which rows a rank holds.
"""

import re
from collections.abc import Mapping
from copy import copy, deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.activations import ACT2FN, NewGELUActivation
from transformers.pytorch_utils import Conv1D

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.families import FAMILIES
from prefect_rlhf.rlhf_tasks.parallel.layout.family import Family
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Recompute
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import parts_of_backward
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Coordinate
from prefect_rlhf.rlhf_tasks.parallel.model.attention import PACKED, Cache, kv_index
from prefect_rlhf.rlhf_tasks.parallel.model.context_parallel import ContextRanks
from prefect_rlhf.rlhf_tasks.parallel.model.convolutions import Channels, ShortConvolution
from prefect_rlhf.rlhf_tasks.parallel.model.delta_rule import GatedDeltaNet, GatedNorm
from prefect_rlhf.rlhf_tasks.parallel.model.gemma4 import Along, ScaledRouter, VariedLayer, inputs_of_layers
from prefect_rlhf.rlhf_tasks.parallel.model.norms import NormOverRanks, norm_offset, own_norm
from prefect_rlhf.rlhf_tasks.parallel.model.products import linear
from prefect_rlhf.rlhf_tasks.parallel.model.recomputation import recomputing
from prefect_rlhf.rlhf_tasks.parallel.model.shares import Shares
from prefect_rlhf.rlhf_tasks.parallel.model.tensor_parallel import (
    ColumnParallelLinear,
    Experts,
    GroupedRouter,
    Grouping,
    Inner,
    MixtureOfExperts,
    PackedColumns,
    Router,
    RowParallelLinear,
    SharedMLP,
    VocabParallelEmbedding,
    can_group,
    clamped,
    copy_to_ranks,
    gated,
)

ROWS = 32
"""On the CPU, passes that read no cache have a multiple of so many rows; those after the last token are zeros.

oneDNN compiles code for every new number of rows: 5.6 ms of CPU for a product of 0.3 million weights and its
gradients, and .6 MB that it keeps for each shape. Micro-batches of natural lengths have a new number in every step.
"""

_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce")

_OURS = (ShortConvolution, GatedDeltaNet, Channels, GatedNorm)
"""Modules with parameters that are this rank's from the start; linear modules inside are split as others are."""


def _plan(config: PreTrainedConfig) -> Mapping[str, str]:
    """transformers' plan: module, as in `layers.*.mlp.up_proj` -> how tensor parallelism splits it."""
    return config.base_model_tp_plan or {}


def check_model(config: PreTrainedConfig) -> None:
    """Raises ValueError, with a sentence for the user, when a model cannot be split faithfully.

    Models that the config file alone rules out have been refused by `ModelShape` before. How tested families are
    split, their layout says; of others, transformers' plan must agree with it.
    """
    family = config.model_type
    if family in FAMILIES:
        return
    plan = _plan(config)
    if not plan:
        raise ValueError(f"{family} declares no base_model_tp_plan, so it is unknown how to split it.")
    for pattern, style in plan.items():
        if pattern.startswith("layers.") and style not in _STYLES:
            raise ValueError(
                f"{family}: the tensor-parallel plan says {style!r} for {pattern!r}. "
                f"Known: {', '.join(_STYLES)}."
            )


class _Decoder(nn.Module):
    """The parts of a stage under the model's prefix `model.`; a stage has only those that it needs."""

    embed_tokens: VocabParallelEmbedding
    embed_positions: nn.Embedding
    embed_tokens_per_layer: VocabParallelEmbedding
    per_layer_model_projection: nn.Linear
    per_layer_projection_norm: nn.Module
    layers: nn.ModuleDict
    norm: nn.Module
    rotary_emb: nn.Module


class Stage(nn.Module):
    """The decoder layers of one coordinate; on the first stage also the embedding, on the last norm and head.

    config         the model's, from `AutoConfig`
    layout         of the same model; its head ("lm" or "scalar") is this stage's head, its `lora` the adapters
    coordinate     the coordinate whose slices this stage holds
    tp_group       the ranks of the same dp and pp rank; None where tp is 1
    device, dtype  of parameters and activations; the parameters' memory is allocated, not filled (weights.py)
    recompute      what each layer's backward pass computes again: "full" keeps only the layer's input,
                   "selective" also the results of products and attention
    shared         tensors of another stage by name, which are this stage's too: both must never change them
    context        the ranks that divide the tokens of its samples; None where cp is 1
    shares         where the weights are sharded: this rank's shares of all parameters but those that adapters train

    `layout` (attribute) is of the whole model, `trained` of what training changes: with adapters, of these.

    Parameters have their Hugging Face names; with tp > 1 they are slices. Dropout is never applied, so that a
    policy's log-probabilities are the same in every pass.
    Raises ValueError when the model cannot be computed faithfully (`check_model`).
    """

    model: _Decoder
    lm_head: nn.Linear
    score: nn.Linear

    def __init__(
        self,
        config: PreTrainedConfig,
        layout: Layout,
        coordinate: Coordinate,
        tp_group: ProcessGroup | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        recompute: Recompute = "none",
        shared: Mapping[str, Tensor] | None = None,
        context: ContextRanks | None = None,
        shares: Shares | None = None,
    ) -> None:
        super().__init__()
        check_model(config)
        assert config.model_type == layout.shape.family, (config.model_type, layout.shape.family)
        assert (tp_group is None) == (layout.placement.strategy.tp == 1), "tp_group does not fit the strategy"
        assert (context is None) == (layout.placement.strategy.cp == 1), "context does not fit the strategy"
        self.config = config
        self.context = context
        self.coordinate = coordinate
        self.tp_group = tp_group
        self.layout = layout.whole
        self.trained = layout
        self.device = device
        self.dtype = dtype
        self.recompute: Recompute = recompute
        self.is_first = coordinate.pp == 0
        self.is_last = coordinate.pp == layout.placement.strategy.pp - 1
        self.layers = layout.stage_layers(coordinate.pp)
        self.holder = layout.placement.device(coordinate.dp, coordinate.tp, coordinate.pp, coordinate.cp)
        with torch.device("meta"):
            # a copy, because from_config writes the name of the attention function into it
            skeleton = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=PACKED)
        self.shares = shares
        self._back = parts_of_backward(layout)
        self._build(skeleton)
        self._allocate(shared or {} if shares is None else self._sharded())
        self.eval()

    def forward(
        self, x: Tensor, micro: MicroBatch, cache: Cache | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Run one micro-batch of T tokens through this stage.

        Of tokens that samples share (`micro.shared`), hidden states are computed and passed on once: [C, hidden].
        With cp > 1, this rank computes and passes on its share (`ContextRanks`); with a cache, every rank all.

        x      first stage: token ids [T] int64; later stages: what the stage before gave, [T, columns]
        micro  which tokens belong together, and their positions
        cache  the KV cache to fill (prefill) or to extend by one token per sequence (decoding); None: no cache
        rows   last stage: positions [R] int64 of the tokens that pass the final norm and the head; None: all
        Returns hidden states, and what goes with them (`Message`): [T, columns]; on the last stage this rank's logits
        [R, vocabulary / tp] or, with the scalar head, values [R]. Values are at least float32, because returns and
        margins are computed from them.
        With cp > 1 logits are of this rank's rows alone (`ContextRanks.own_rows`), and `rows` are those of the
        micro-batch; values are of all tokens.
        """
        trains = torch.is_grad_enabled()
        if self.shares is not None:
            self.shares.enter_forward(0, trains)
        shared, positions = micro.shared, micro.position_ids
        if shared is not None:
            x, positions = x[shared.computed] if self.is_first else x, positions[shared.computed]
        context = self.context if cache is None else None
        if context is not None:
            x, positions = context.share(x, micro) if self.is_first else x, context.share(positions, micro)
        hidden = self.model.embed_tokens(x) if self.is_first else x
        if self.is_first and self.layout.shape.learned_positions:
            hidden = hidden + self.model.embed_positions(positions)
        tokens = len(x)
        reads = cache is not None and cache.continues
        padding = 0 if reads or self.device.type != "cpu" else -tokens % ROWS
        if padding:
            hidden, positions = F.pad(hidden, (0, 0, 0, padding)), F.pad(positions, (0, padding))
        hidden, positions = hidden[None], positions[None]
        along = self._along(hidden, x, padding) if self.layout.shape.varied else None
        hidden = hidden[..., : self.layout.shape.hidden]
        angles = self._angles(hidden, positions)
        rank_of_adapters = 0 if self.trained.lora is None else self.trained.lora.rank
        for number, layer in self.model.layers.items():
            step = partial(
                layer,
                attention_mask=None,
                position_ids=positions,
                position_embeddings=angles[int(number)],
                micro=micro,
                cache=cache,
            )
            if self.shares is not None:
                self.shares.enter_forward(1 + int(number), trains)
            inputs = () if along is None else along.of(int(number))
            output = recomputing(self.recompute, step, hidden, *inputs, adapter_rank=rank_of_adapters)
            hidden = output if along is None else along.take(int(number), output)
            if trains:
                self._tell_of_backward(1 + int(number), hidden)
        if self.shares is not None:
            self.shares.enter_forward(1 + len(self.layers), trains)
        if along is not None and not self.is_last:
            hidden = along.send(hidden, self.layout.message(self.coordinate.pp, self.coordinate.tp))
        hidden = hidden[0, :tokens]
        if not self.is_last:
            return hidden
        if context is not None and self.layout.head == "lm":
            return self._head(hidden[context.own_rows(micro)[1]])
        if context is not None:
            values = context.gather_tokens(self._head(hidden), micro)
            return values if shared is None else shared.whole(values, 0)
        if shared is not None:
            hidden = shared.whole(hidden, 0)
        return self._head(hidden if rows is None else hidden[rows])

    def passed_on(self, micro: MicroBatch) -> int:
        """Rows of hidden states that go from stage to stage for a micro-batch."""
        return micro.computed_tokens if self.context is None else self.context.rows(micro)

    @property
    def neutral_norm(self) -> float:
        """The stored weight of a norm that does not scale: 1.0; 0.0 for Gemma."""
        return 1.0 - self._norm_offset

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of what the stage before gives for each token, and of what this one gives the next."""
        pp, tp = self.coordinate.pp, self.coordinate.tp
        before = 0 if self.is_first else self.layout.message(pp - 1, tp).columns
        return before, 0 if self.is_last else self.layout.message(pp, tp).columns

    def named_slices(self) -> dict[str, nn.Parameter]:
        """Hugging Face name -> this rank's slice (the rows in `layout.held`, of shape `layout.slice_shape`)."""
        return {name: p for name, p in self.named_parameters() if name in self.layout.specs}

    def trained_slices(self) -> dict[str, nn.Parameter]:
        """The same for what training changes (`trained`): all of a model, or its adapters under peft's names."""
        return {name: p for name, p in self.named_parameters() if name in self.trained.specs}

    def held_weights(self) -> Mapping[str, Tensor]:
        """Name -> what this rank has of each trained parameter: its slice; of a sharded one a range, flattened."""
        shares = self.shares if self.trained.lora is None else None
        return self.trained_slices() if shares is None else shares.ranges()

    def hold_weights(self, weights: Mapping[str, Tensor] | None) -> None:
        """Set the trained parameters to these tensors, those of `held_weights`. None: they are emptied."""
        if self.shares is not None and self.trained.lora is None:
            self.shares.hold(weights)
            return
        for name, parameter in self.trained_slices().items():
            parameter.data = parameter.data.new_empty(0) if weights is None else weights[name]

    def fill(self, name: str, values: Tensor) -> None:
        """Set one parameter. values: of this rank's slice, or one number for all."""
        if self.shares is not None and name in self._sharded():
            self.shares.fill(name, values)
        else:
            with torch.no_grad():
                self.get_parameter(name).copy_(values)

    def _sharded(self) -> Mapping[str, Tensor]:
        """The slices of parameters that are sharded."""
        if self.shares is None:
            return {}
        adapted = self.trained.specs if self.trained.lora is not None else {}
        return {name: values for name, values in self.shares.slices.items() if name not in adapted}

    def _angles(self, hidden: Tensor, positions: Tensor) -> Mapping[int, Any]:
        """Number of each layer -> its rotary angles. Some families have others for each type of layer, some none."""
        if self.layout.shape.learned_positions:
            return dict.fromkeys(self.layers)
        rotary = self.model.rotary_emb
        if not hasattr(rotary, "layer_types"):
            return dict.fromkeys(self.layers, rotary(hidden, positions))
        types = {number: self.config.layer_types[number] for number in self.layers}
        of_type = {kind: rotary(hidden, positions, kind) for kind in sorted(set(types.values()))}
        return {number: of_type[kind] for number, kind in types.items()}

    def _along(self, hidden: Tensor, tokens: Tensor, padding: int) -> Along:
        """What goes with the hidden states of a pass at its first layer here.

        hidden  [1, T, columns]: embeddings, or what the stage before gave; tokens: their ids on the first stage
        """
        along, shape = Along(self.layout.shape), self.layout.shape
        if not self.is_first:
            along.receive(hidden, self.layout.message(self.coordinate.pp - 1, self.coordinate.tp))
        elif shape.varied and shape.varied.inputs:
            embedded = F.pad(self.model.embed_tokens_per_layer(tokens), (0, 0, 0, padding))
            inputs = inputs_of_layers(self.model, shape, hidden, embedded[None])
            if torch.is_grad_enabled():
                self._tell_of_backward(0, inputs)
            along.inputs = dict(enumerate(inputs.unbind(-2)))
        return along

    def _tell_of_backward(self, part: int, output: Tensor) -> None:
        """Let a part's weights be gathered when a backward pass comes to its output, if one does."""
        if self.shares is not None and part in self._back:
            output.register_hook(partial(_enter_backward, self.shares, part, self._back))

    def _head(self, hidden: Tensor) -> Tensor:
        hidden = self.model.norm(hidden)
        if self.layout.head == "scalar":
            wide = torch.promote_types(self.dtype, torch.float32)
            return linear(hidden.to(wide), self.score.weight.to(wide)).squeeze(-1)
        weight = self.model.embed_tokens.weight if self._tied else self.lm_head.weight
        logits = linear(copy_to_ranks(hidden, self.tp_group), weight)
        factor = self._factor(self._family.logits_factor) / self._factor(self._family.logits_divisor)
        logits = logits if factor == 1.0 else logits * factor
        cap: float | None = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # Building: on the meta device, then allocated

    @property
    def _family(self) -> Family:
        return FAMILIES.get(self.layout.shape.family, Family())

    def _factor(self, key: str | None) -> float:
        """The value of a config key; 1.0 where there is none."""
        value = None if key is None else getattr(self.config, key)
        return 1.0 if value is None else value

    @property
    def _tied(self) -> bool:
        return self.layout.specs["model.embed_tokens.weight"].place == "ends"

    def _build(self, skeleton: Any) -> None:
        """Take this stage's layers from the model's skeleton and replace the modules that we compute ourselves."""
        whole, config = skeleton.base_model, skeleton.config
        final_norm, layers = self._theirs(whole, "norm"), self._theirs(whole, "layers")
        self.model = _Decoder()
        self._norm_offset = norm_offset(final_norm)
        if not self.layout.shape.learned_positions:
            self.model.rotary_emb = type(self._theirs(whole, "rotary_emb"))(config).to(self.device)
        self.model.layers = nn.ModuleDict({str(i): layers[i] for i in self.layers})
        for i, layer in self.model.layers.items():
            if self.layout.shape.varied is not None:
                layer = self.model.layers[i] = VariedLayer(layer, self._experts_beside(), self.tp_group)
            elif self.layout.shape.has_experts(int(i)):
                name = self._family.names.mlp
                theirs = layer.get_submodule(name)
                setattr(layer, name, self._mixture_of_experts(theirs, f"model.layers.{i}.{name}"))
            kind = self.layout.shape.kind_of(int(i))
            if kind == "convolution":
                channels = self.layout.units("channel", self.coordinate.tp).size
                layer.conv = ShortConvolution(layer.conv, channels)
            elif kind == "delta":
                heads = self.layout.units("delta_head", self.coordinate.tp).size
                layer.linear_attn = GatedDeltaNet(layer.linear_attn, heads)
            self._split_layer(layer, f"model.layers.{i}")
        if self.is_first or (self.is_last and self._tied):
            # Gemma's classes of embeddings multiply by the root of the hidden size.
            self.model.embed_tokens = self._embedding(whole, "embed_tokens")
        if self.is_first and self.layout.shape.varied and self.layout.shape.varied.inputs:
            self.model.embed_tokens_per_layer = self._embedding(whole, "embed_tokens_per_layer")
            self.model.per_layer_model_projection = whole.per_layer_model_projection
            norm = whole.per_layer_projection_norm
            self.model.per_layer_projection_norm = own_norm(norm, self._norm_offset)
        if self.is_first and self.layout.shape.learned_positions:
            size = (self.layout.shape.context, self.layout.shape.hidden)
            self.model.embed_positions = nn.Embedding(*size, device="meta")
        if self.is_last:
            self.model.norm = own_norm(final_norm, self._norm_offset)
            if self.layout.head == "scalar":
                self.score = nn.Linear(self.layout.shape.hidden, 1, bias=False, device="meta")
            elif not self._tied:
                self.lm_head = self._column_parallel(skeleton.lm_head, "lm_head")

    def _embedding(self, whole: Any, name: str) -> VocabParallelEmbedding:
        theirs, spec = self._theirs(whole, name), self.layout.specs[f"model.{name}.weight"]
        scale = getattr(theirs, "scalar_embed_scale", self._factor(self._family.embedding_factor))
        vocab = self.layout.interval(spec, self.coordinate.tp)
        how = (self.tp_group, torch.device("meta"), scale, theirs.padding_idx)
        return VocabParallelEmbedding(vocab, spec.shape[1], *how)

    def _theirs(self, whole: Any, name: str) -> Any:
        """The part of transformers' decoder that Llama calls `name`."""
        files = self._family.files
        return getattr(whole, files.get(f"model.{name}.", f"model.{name}.").split(".")[1])

    def _mixture_of_experts(self, theirs: Any, path: str) -> MixtureOfExperts:
        shape, meta, config = self.layout.shape, torch.device("meta"), self.config
        mixture = FAMILIES[shape.family].mixture
        assert mixture is not None
        # Mixtral and GPT-OSS have no such key: they always normalise.
        normalised: bool = getattr(config, "norm_topk_prob", True)
        sizes = (shape.experts, shape.hidden, shape.experts_per_token)
        if mixture.grouped:
            groups, chosen = (getattr(config, key, 1) for key in ("n_group", "topk_group"))
            grouping = Grouping(groups, chosen, config.routed_scaling_factor, mixture.least_sum)
            router = GroupedRouter(*sizes, normalised, meta, grouping)
        else:
            router = Router(*sizes, normalised, meta, mixture.biased)
        inner = (
            clamped(config.swiglu_alpha, config.swiglu_limit)
            if mixture.clamped
            else gated(ACT2FN[getattr(config, "hidden_act", "silu")])
        )
        experts = self._experts(inner, mixture.biased)
        block = MixtureOfExperts(router, experts, self.tp_group, in_pair=mixture.clamped)
        if mixture.shared is not None and shape.shared_columns:
            name, gate = mixture.shared.block, mixture.shared.gate
            into_gate, up, down = (
                self._parallel_linear(theirs.get_submodule(name).get_submodule(part), f"{path}.{name}.{part}")
                for part in ("gate_proj", "up_proj", "down_proj")
            )
            down.group = None  # the block sums the output together with that of the experts
            of_gate = None if gate is None else nn.Linear(shape.hidden, 1, bias=False, device=meta)
            block.share(name, SharedMLP(into_gate, up, down, inner), gate, of_gate)
        return block

    def _experts_beside(self) -> tuple[ScaledRouter, Experts] | None:
        """The router and experts beside a layer's MLP; None where the model has none."""
        shape, config = self.layout.shape, self.config
        if not shape.experts:
            return None
        sizes = (shape.experts, shape.hidden, shape.experts_per_token)
        router = ScaledRouter(*sizes, config.rms_norm_eps, torch.device("meta"))
        return router, self._experts(gated(ACT2FN[config.hidden_activation]), biased=False)

    def _experts(self, inner: Inner, biased: bool) -> Experts:
        """This rank's columns of the experts of a layer."""
        shape, columns = self.layout.shape, self.layout.units("column", self.coordinate.tp).size
        return Experts(
            shape.experts,
            shape.hidden,
            columns,
            inner,
            torch.device("meta"),
            grouped=can_group(self.device, self.dtype, shape.hidden, columns),
            rows=ROWS if self.device.type == "cpu" else 1,
            biased=biased,
            adds_bias=self.coordinate.tp == 0,
        )

    def _split_layer(self, layer: Any, prefix: str) -> None:
        """Replace a decoder layer's linear modules and norms, and put `copy_to_ranks` before its blocks."""
        for parent_name, parent in list(layer.named_modules()):
            if isinstance(parent, MixtureOfExperts | SharedMLP | ScaledRouter):
                continue
            enters = False
            for name, child in list(parent.named_children()):
                path = ".".join(filter(None, (prefix, parent_name, name)))
                kind = type(child).__name__
                is_linear = isinstance(child, nn.Linear | Conv1D)
                if is_linear and f"{path}.weight" not in self.layout.specs:
                    setattr(parent, name, self._packed_linear(child, path))
                    self._count_own_heads(parent)
                    enters = True
                elif is_linear:
                    own = self._parallel_linear(child, path)
                    setattr(parent, name, own)
                    spec = self.layout.specs[f"{path}.weight"]
                    # What every rank computes as a whole has its whole gradient already.
                    enters = enters or spec.shard_dim == 0 or spec.partial_gradient
                elif isinstance(child, NewGELUActivation):  # the same, in one kernel that keeps less
                    setattr(parent, name, nn.GELU("tanh"))
                elif isinstance(child, _OURS):
                    continue
                elif kind.endswith("Norm"):
                    setattr(parent, name, self._norm(child, path))
                elif not isinstance(child, MixtureOfExperts):
                    self._take_slices(child, path)
            if enters:
                parent.register_forward_pre_hook(self._enter_block, with_kwargs=True)
            if hasattr(parent, "layer_idx"):
                number, keys_of = parent.layer_idx, self.layout.shape.keys_of
                parent.kv_index = kv_index(self.layout.kv_head_map(self.coordinate.tp, number), self.device)
                parent.keys_of = keys_of(number)
                parent.writes_keys = all(keys_of(i) != keys_of(number) for i in self.layers if i < number)
                parent.context = self.context and self.context.of_layer(number)

    def _style(self, path: str) -> str:
        """How tensor parallelism splits a linear module: as the layout says. Raises ValueError where, of an untested
        family, transformers' plan does not say the same."""
        styles = {0: "colwise", 1: "rowwise", None: "whole"}
        style = styles[self.layout.specs[f"{path}.weight"].shard_dim]
        family = self.layout.shape.family
        said = _plan(self.config).get(re.sub(r"^model\.layers\.\d+", "layers.*", path))
        if family not in FAMILIES and said != style:
            raise ValueError(f"the tensor-parallel plan of {family} does not say how to split {path}.")
        return style

    def _norm(self, theirs: Any, path: str) -> nn.Module:
        """A norm of a layer."""
        spec = self.layout.specs.get(f"{path}.weight")
        if spec is None or spec.unit is None:
            return own_norm(theirs, self._norm_offset)
        rows = self.layout.interval(spec, self.coordinate.tp)
        counted = self.layout.primary(self.holder)[spec.name]
        return NormOverRanks(theirs, rows.size, counted.within(rows), self.tp_group)

    def _enter_block(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Pass the block's input, which its column-parallel modules share, through `copy_to_ranks` once."""
        if args:
            return (copy_to_ranks(args[0], self.tp_group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": copy_to_ranks(kwargs["hidden_states"], self.tp_group)}

    def _take_slices(self, module: nn.Module, path: str) -> None:
        """Give a module that we do not replace this rank's slices of its own parameters (sinks)."""
        for name, _ in list(module.named_parameters(recurse=False)):
            if f"{path}.{name}" not in self.layout.specs:
                kind = type(module).__name__
                raise ValueError(f"{path} is a {kind}: neither a linear module nor an RMS norm.")
            size = self.layout.slice_shape(f"{path}.{name}", self.holder)
            setattr(module, name, nn.Parameter(torch.empty(size, device="meta")))

    def _parallel_linear(self, whole: nn.Linear | Conv1D, path: str) -> Any:
        """A linear module with this rank's rows or columns, and its adapter."""
        if self._style(path) != "rowwise":
            local = self._column_parallel(whole, path)
        else:
            rows, columns = self.layout.slice_shape(f"{path}.weight", self.holder)
            bias = whole.bias is not None
            local = RowParallelLinear(columns, rows, bias, self.tp_group, torch.device("meta"))
        if self.trained.lora is not None and f"{path}.lora_A.weight" in self.trained.specs:
            local.adapt(self.trained.lora)
        return local

    def _packed_linear(self, whole: nn.Linear | Conv1D, path: str) -> PackedColumns:
        """The linear modules whose weights files hold as one tensor, that of the module `path`."""
        specs = [spec for spec in self.layout.parameters if spec.name.startswith(f"{path}.")]
        if not specs:
            raise ValueError(f"{path} is a linear module that the weights lack.")
        parts = dict.fromkeys(spec.module for spec in specs)
        return PackedColumns({name: self._column_parallel(whole, f"{path}.{name}") for name in parts})

    def _count_own_heads(self, attention: Any) -> None:
        """Give an attention that cuts a packed output by its numbers of heads the numbers of this rank."""
        if hasattr(attention, "layer_idx"):
            tp_rank = self.coordinate.tp
            attention.config = copy(attention.config)
            attention.config.num_attention_heads = self.layout.units("query_head", tp_rank).size
            attention.num_key_value_heads = self.layout.units("kv_head", tp_rank).size
            attention.split_size = attention.config.num_attention_heads * attention.head_dim  # of GPT-2

    def _column_parallel(self, whole: nn.Linear | Conv1D, path: str) -> ColumnParallelLinear:
        rows, columns = self.layout.slice_shape(f"{path}.weight", self.holder)
        return ColumnParallelLinear(columns, rows, whole.bias is not None, torch.device("meta"))

    def _allocate(self, shared: Mapping[str, Tensor]) -> None:
        """Allocate the parameters that are not shared, and check all shapes against the layouts."""
        for prefix, module in list(self.named_modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                real = shared.get(f"{prefix}.{name}")
                if real is None:
                    real = torch.empty(parameter.shape, dtype=self.dtype, device=self.device)
                setattr(module, name, nn.Parameter(real.data))
        ours = {name: tuple(p.shape) for name, p in self.named_parameters()}
        theirs = {
            name: layout.slice_shape(name, self.holder)
            for layout in (self.layout, self.trained)
            for name in layout.held(self.holder)
        }
        assert ours == theirs, (
            f"stage and layout differ in {sorted(set(ours.items()) ^ set(theirs.items()))[:4]}"
        )


def _enter_backward(shares: Shares, part: int, parts: range, _: Tensor) -> None:
    """Called with the gradient of a part's output, before the part's backward pass."""
    shares.enter_backward(part, parts)
