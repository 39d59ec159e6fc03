"""What a family of decoders has in its layers. A family is the models of one `model_type`. Pure Python."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
"""The norms of a layer of Llama."""


HeadNorms = Literal["each head", "all heads"]
"""RMS norms on query and key: over each head, with weights that all heads share, or over all heads together."""

Packing = Literal["qkv", "gate_up"]
"""Linear modules that files hold as one tensor: q, k and v; gate and up."""


class Where(NamedTuple):
    """A value where a config key is true, else None."""

    key: str
    value: HeadNorms


class Unless(NamedTuple):
    """True unless a config key is false."""

    key: str


class Latent(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): default sizes of what queries, and
    keys with values, are computed from; of a head's rotated and other columns of query and key; of its value."""

    query_rank: int
    rank: int
    rotated: int
    plain: int
    value: int


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """MLPs of a mixture that every token passes besides the experts that the router gives it to; side by side, they
    are one.

    block    the name of the module
    columns  the config key of their columns
    count    the config key of their number, where each has the columns of an expert
    gate     the name of a linear module whose sigmoid is a factor of what they give; None: there is none
    """

    block: str
    columns: str | None = None
    count: str | None = None
    gate: str | None = None


@dataclass(frozen=True, slots=True)
class Mixture:
    """What a family's layers have in place of one MLP: experts, and a router that gives each token to some of them.

    Each default is of a config key that may be omitted.

    width            the config key of the columns of an expert
    count, per_token default numbers of experts, and of those that a token is given to
    block            the name in files of what is `mlp` in the module
    projections      the names in files of an expert's gate, up and down
    router           the name in files of the router
    biased           router and experts have biases
    alternating      files hold all experts of a layer in one tensor [experts, in, out], gate's and up's columns in
                     turns; it may be quantised as MXFP4
    clamped          gates and columns are bounded, as GPT-OSS does (`clamped`, model/tensor_parallel.py)
    shared           the experts that every token passes; None: there are none
    first_dense      default number of the first layers that have one MLP in place of experts (first_k_dense_replace);
                     None: there is no such key
    correction       the name in files of the further numbers of experts
    least_sum        added to what weights are divided by (both: of grouped ones)
    among            config keys that name further layers without experts, as Qwen's do
    groups           default numbers of groups, and of those that a token chooses experts of
    grouped          scores are sigmoids; a token chooses groups of experts first, and a further number of each expert
                     counts in its choice (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)
    beside           the config key that says whether there are experts; they stand beside the layer's MLP, and have
                     norms and a router of their own (Gemma 4). None: there are, in the MLP's place
    """

    width: str
    count: int
    per_token: int
    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    biased: bool = False
    alternating: bool = False
    clamped: bool = False
    shared: SharedExperts | None = None
    first_dense: int | None = None
    among: tuple[str, ...] = ()
    grouped: bool = False
    groups: tuple[int, int] = (1, 1)
    correction: str = "gate.e_score_correction_bias"
    least_sum: float = 1e-20
    beside: str | None = None


LayerKind = Literal["attention", "global", "delta", "convolution"]
"""What mixes the tokens of a sequence in a layer, and so what generation keeps of a sequence: the keys and values of
all its tokens ("global": of heads that have sizes of their own); a state of the gated delta rule and the last inputs
of a convolution; the latter alone."""


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of layers with the gated delta rule. Each key head belongs to `group` value heads, which stay together.

    key_dim, value_dim  sizes of a key (and query), and of a value
    """

    heads: int
    group: int
    key_dim: int
    value_dim: int

    @property
    def state(self) -> int:
        """Elements of a sequence's state."""
        return self.heads * self.group * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class VariedLayers:
    """How the layers of a Gemma 4 differ from each other, and what they are given besides hidden states.

    head_dim, kv_heads  of layers of the kind "global", which attend to all tokens; the others see a window
    values_are_keys     in these layers, values are what keys are made of: there is no v_proj
    sharing             so many last layers attend to the keys and values of the last layer of their kind before them
    doubled             the MLPs of these layers have twice the columns
    inputs              columns of the further input of a token that each layer has; 0: none has one
    vocab               tokens of the embedding of these inputs
    """

    head_dim: int
    kv_heads: int
    values_are_keys: bool
    sharing: int
    doubled: bool
    inputs: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Kinds:
    """Which layers of a family are of which kind.

    names    the values of the config's `layer_types` -> kind
    default  the kinds where the config has no `layer_types`: told the config and the number of layers. Raises
             ValueError, as `columns` of `Family` does, for what is wrong in the config
    """

    names: Mapping[str, LayerKind]
    default: Callable[[Mapping[str, Any], int], list[LayerKind]]


@dataclass(frozen=True, slots=True)
class Names:
    """What the modules of a layer are called, in transformers' classes as here.

    attention, mlp         the two blocks
    q_norm, k_norm         the norms inside heads
    out, gate, up, down    linear modules: the last one of the heads; those of an MLP
    qkv, gate_up           those that a family packs several in
    """

    attention: str = "self_attn"
    mlp: str = "mlp"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    out: str = "o_proj"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    qkv: str = "qkv_proj"
    gate_up: str = "gate_up_proj"


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of the models of one `model_type`, and defaults of keys that their configs may omit.

    title                         what people call it
    qkv_bias, out_bias, mlp_bias  True, False, or the config key that says which (False where it is absent)
    sinks                         each head may attend to nothing, to a score of its own
    qk_norm                       norms on query and key; None: none
    head_dim                      default size of a head; None: hidden_size // heads
    kv_heads                      default number of KV heads; None: as many as query heads
    tied                          default of tie_word_embeddings
    norms                         the norms of a layer over hidden states, in the order of the forward pass
    gated                         the MLP is down(act(gate(x)) * up(x)); False: down(act(up(x)))
    packed                        what files hold as one tensor
    mixture                       the experts of layers; None: a layer has one MLP
    latent                        keys and values of all heads are computed from one narrow vector; None: they are not
    norm_bias                     norms subtract the mean and add a bias (LayerNorm)
    learned_positions             an embedding of positions is added to that of tokens; no rotary angles
    columns_per_hidden            default columns of the MLP, in hidden sizes; None: the config must say
    columns                       columns of the MLP, told the config and its `intermediate_size`; None: as many
    kinds                         the kinds of layers; None: attention alone
    varied                        its layers differ as `VariedLayers` says
    gated_attention               each head's query is followed by a gate of the head's output
    sorted_by_heads               delta layers have two input projections, whose rows are sorted by key heads; False:
                                  a packed one of query, key and value, and one each of gate, beta and decay
    names                         of the modules of a layer
    keys                          key of Llama's configs -> the keys that mean the same, the first of which counts;
                                  none: there is no such key, and its default holds
    files                         beginning of a parameter's name -> what stands in files instead
    transposed                    files hold the weights of linear modules as [in, out]
    embedding_factor              config key of a factor on the embeddings of tokens; None: there is none
    logits_factor, logits_divisor likewise of logits
    omitted                       values of further keys that published configs leave out
    refused                       config keys that must be false: of what is unknown here
    needed                        config keys that may be absent, but not null
    """

    title: str = ""
    qkv_bias: bool | str | Unless = False
    out_bias: bool | str | Unless = False
    mlp_bias: bool | str | Unless = False
    sinks: bool = False
    qk_norm: HeadNorms | Where | None = None
    head_dim: int | None = None
    kv_heads: int | None = None
    tied: bool = False
    norms: tuple[str, ...] = LAYER_NORMS
    gated: bool = True
    packed: tuple[Packing, ...] = ()
    mixture: Mixture | None = None
    latent: Latent | None = None
    norm_bias: bool = False
    learned_positions: bool = False
    columns_per_hidden: int | None = None
    columns: Callable[[Mapping[str, Any], int], int] | None = None
    kinds: Kinds | None = None
    varied: bool = False
    gated_attention: bool = False
    sorted_by_heads: bool = False
    names: Names = Names()
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    transposed: bool = False
    embedding_factor: str | None = None
    logits_factor: str | None = None
    logits_divisor: str | None = None
    omitted: Mapping[str, int] = field(default_factory=dict[str, int])
    refused: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
