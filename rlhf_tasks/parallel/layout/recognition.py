"""Which family a model is of, by its config and, if untested, by its weights; what is refused. Pure Python."""

import math
import re
from collections.abc import Mapping
from typing import Any, cast

from prefect_rlhf.rlhf_tasks.parallel.layout.families import EXPERT_COUNTS, FAMILIES, TESTED
from prefect_rlhf.rlhf_tasks.parallel.layout.family import Family, LayerKind
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, shown

_EXPERT_KEYS = (*EXPERT_COUNTS, "moe_intermediate_size")
_PACKED = ("gpt_neox", "falcon")
_KNOWN = f"Use a decoder of one of the families {TESTED}, or another dense one with layers like theirs."
_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of rotary embedding whose angles depend only on the token's position."""
_ROPE_OF_THE_BATCH = ("dynamic", "longrope")  # as in transformers' modeling_rope_utils.py


def kinds_of(config: Mapping[str, Any], family: Family, layers: int) -> tuple[LayerKind, ...]:
    """The kind of each layer; none where all have attention. Raises ValueError, without the model's name, for a list
    that is not one of the family's kinds for each layer."""
    if family.kinds is None:
        return ()
    named = config.get("layer_types")
    if named is None:
        return tuple(family.kinds.default(config, layers))
    kinds = cast(list[Any], named if isinstance(named, list) else [])
    if len(kinds) != layers:
        raise ValueError(f"layer_types in its config is not a list of {layers} kinds, one for each layer")
    unknown = next((kind for kind in kinds if kind not in list(family.kinds.names)), None)
    if unknown is not None:
        raise ValueError(
            f"layer_types in its config has {shown(unknown)}, which is not one of {', '.join(family.kinds.names)}"
        )
    return tuple(family.kinds.names[kind] for kind in kinds)


def family_of(
    config: Mapping[str, Any], source: str, weights: Mapping[str, tuple[int, ...]] | None
) -> Family:
    """The family of a config.

    source   names the model in errors
    weights  the shapes of its tensors by name, from which an untested family is read; None: they are not at hand
    Raises ConfigError, with the reason, when the engine cannot split such a model or would compute something else.
    """
    kind = config.get("model_type")
    _refuse_unsplittable(config, kind, source)
    _check_arithmetic(config, source)
    if isinstance(kind, str) and kind in FAMILIES:
        family = FAMILIES[kind]
        unknown = next((key for key in family.refused if config.get(key)), None)
        if unknown is not None:
            raise ConfigError(f"Model {source!r} ({kind}) has {unknown}, which is unknown here. {_KNOWN}")
        null = next((key for key in family.needed if key in config and config[key] is None), None)
        if null is not None:
            raise ConfigError(
                f"Model {source!r}: {null} is null in its config, without which a {family.title} is not computed. "
                "Write its number, or leave the key out for the default."
            )
        return family
    if not isinstance(kind, str) or weights is None:
        raise ConfigError(
            f"Model {source!r} has model_type {shown(kind)}, which is not a decoder of a tested family ({TESTED}). "
            "How another one can be split is read from the weights in its folder."
        )
    return read_family(weights, source)


def _refuse_unsplittable(config: Mapping[str, Any], kind: Any, source: str) -> None:
    if "auto_map" in config:
        raise ConfigError(
            f"Model {source!r} brings its own code (auto_map), which is never run. If transformers has such "
            "models built in, remove auto_map from config.json; else use another model."
        )
    mixture = FAMILIES[kind].mixture if isinstance(kind, str) and kind in FAMILIES else None
    experts = [key for key in _EXPERT_KEYS if config.get(key)]
    if experts and mixture is None:
        raise ConfigError(
            f"Model {source!r} ({shown(kind)}) is a mixture of experts ({experts[0]}) of a family whose router and "
            f"experts are unknown here. {_KNOWN}"
        )
    if mixture is not None:
        _check_router(config, source)
    if isinstance(kind, str) and kind in _PACKED:
        raise ConfigError(
            f"Model {source!r} ({kind}) has packed projections (query_key_value), which cannot be split. {_KNOWN}"
        )


def _check_router(config: Mapping[str, Any], source: str) -> None:
    """Raises ConfigError for a value of a router that is none."""
    for key in ("router_jitter_noise", "router_aux_loss_coef", "routed_scaling_factor"):
        value = config.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < math.inf):
            raise ConfigError(
                f"Model {source!r}: {key}={shown(value)} in its config is not a number of at least 0."
            )
    if config.get("use_expert_bias") is False:
        raise ConfigError(
            f"Model {source!r}: use_expert_bias is false in its config, which is unknown here. {_KNOWN}"
        )
    normalised = config.get("norm_topk_prob")
    if normalised is not None and not isinstance(normalised, bool):
        raise ConfigError(
            f"Model {source!r}: norm_topk_prob={shown(normalised)} in its config is neither true nor false."
        )


def _check_arithmetic(config: Mapping[str, Any], source: str) -> None:
    """Raises ConfigError for settings under which the engine would compute something else than the model."""
    scaling: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(
            f"Model {source!r}: rope_scaling={shown(scaling)} in its config is not a JSON object."
        )
    whole = cast(Mapping[str, Any], scaling)
    by_layer_type = [cast(Mapping[str, Any], part) for part in whole.values() if isinstance(part, Mapping)]
    for rope in by_layer_type or [whole]:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in _STATIC_ROPE:
            why = (
                "the angles that it gives a token depend on the longest sequence of its batch"
                if kind in _ROPE_OF_THE_BATCH
                else "the engine has not been tested with it"
            )
            raise ConfigError(
                f"Model {source!r} has rope_type {shown(kind)}: {why}. "
                f"Use a model with one of {', '.join(_STATIC_ROPE)}."
            )
    quantised = config.get("quantization_config")
    if quantised and not _reads(config.get("model_type"), quantised):
        raise ConfigError(
            f"Model {source!r} has quantised weights (quantization_config), which cannot be trained. "
            "Save it unquantised."
        )
    # Gemma 4's "vision" is said of the tokens of images alone.
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ConfigError(f"Model {source!r} has use_bidirectional_attention. Use a causal decoder.")


def _reads(kind: Any, quantised: Any) -> bool:
    """Whether the weights of a model_type are read that its quantization_config describes: MXFP4, as floats."""
    mixture = FAMILIES[kind].mixture if isinstance(kind, str) and kind in FAMILIES else None
    if mixture is None or not mixture.alternating or not isinstance(quantised, Mapping):
        return False
    return cast(Mapping[str, Any], quantised).get("quant_method") == "mxfp4"


_FIRST = "model.layers.0."
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_KNOWN_IN_LAYER = re.compile(
    rf"self_attn\.({'|'.join(_ATTENTION)})\.(weight|bias)|mlp\.({'|'.join(_MLP)})\.(weight|bias)"
    r"|self_attn\.[qk]_norm\.weight|\w+norm\.weight"
)


def read_family(weights: Mapping[str, tuple[int, ...]], source: str) -> Family:
    """The family of a model whose layers are of Llama's kind, read from the names and shapes of its first layer.

    weights  tensor name -> shape; source: names the model in errors
    Raises ConfigError, naming what is there or missing, for layers of another kind.
    """
    layer = {
        name.removeprefix(_FIRST): shape
        for name, shape in weights.items()
        if name.startswith(_FIRST) and "rotary_emb" not in name
    }
    odd = sorted(name for name in layer if not _KNOWN_IN_LAYER.fullmatch(name))
    required = [f"self_attn.{name}.weight" for name in _ATTENTION] + [
        f"mlp.{name}.weight" for name in _MLP[1:]
    ]
    lacking = [name for name in required if name not in layer]
    if odd or lacking:
        what = f"has {odd[0]}, which Llama's have not" if odd else f"lacks {lacking[0]}"
        raise ConfigError(
            f"Model {source!r}: its first layer {what}, so it is unknown how to split it. {_KNOWN}"
        )
    hidden = layer["self_attn.q_proj.weight"][1:]
    norms = {name.removesuffix(".weight"): shape for name, shape in layer.items() if "norm" in name}
    if not norms and "model.norm.weight" not in weights:
        raise ConfigError(
            f"Model {source!r}: its norms have no weights (as OLMo 1's), which is unknown here. {_KNOWN}"
        )
    heads = [name for name in norms if name.startswith("self_attn.")]
    unlike = [name for name in norms if name not in heads and norms[name] != hidden]
    rows = {name: layer[name.replace("_norm", "_proj.weight")][:1] for name in heads}
    over_all = rows.get("self_attn.q_norm") == norms.get("self_attn.q_norm")
    unlike += [
        name
        for name in heads
        if len(heads) == 1 or len(norms[name]) > 1 or (over_all and norms[name] != rows[name])
    ]
    if unlike:
        raise ConfigError(
            f"Model {source!r}: {unlike[0]} in its first layer is a norm of shape {list(norms[unlike[0]])}, neither "
            f"over hidden states nor over each head of query and key nor over all, so it cannot be split. {_KNOWN}"
        )
    return Family(
        qkv_bias="self_attn.q_proj.bias" in layer,
        out_bias="self_attn.o_proj.bias" in layer,
        mlp_bias="mlp.up_proj.bias" in layer,
        qk_norm=None if not heads else "all heads" if over_all else "each head",
        tied="lm_head.weight" not in weights,
        norms=tuple(name for name in norms if name not in heads),
        gated="mlp.gate_proj.weight" in layer,
    )
