"""Checked access to the keys of a Hugging Face config. Pure Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from prefect_rlhf.rlhf_tasks.parallel.layout.families import EXPERT_COUNTS
from prefect_rlhf.rlhf_tasks.parallel.layout.family import (
    DeltaHeads,
    HeadNorms,
    Latent,
    LayerKind,
    Mixture,
    Unless,
    VariedLayers,
    Where,
)
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, shown

MOST: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "first_k_dense_replace", "decoder_sparse_step"), 4096),
    "hidden_size": 2**20,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    **dict.fromkeys(("head_dim", "global_head_dim", "num_global_key_value_heads"), 2**16),
    "num_kv_shared_layers": 4096,
    "hidden_size_per_layer_input": 2**20,
    "vocab_size_per_layer_input": 2**28,
    "intermediate_size": 2**24,
    "moe_intermediate_size": 2**24,
    "shared_expert_intermediate_size": 2**24,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 2**20),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 2**16),
    **dict.fromkeys(("num_experts_per_tok", "n_shared_experts", "n_group", "topk_group"), 2**12),
    **dict.fromkeys(EXPERT_COUNTS, 2**12),
    "vocab_size": 2**28,
    "max_position_embeddings": 2**31,
    **dict.fromkeys(("conv_L_cache", "linear_conv_kernel_dim"), 2**10),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2**16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 2**16),
}
"""Upper bounds that no real model reaches. A larger figure is a mistake and could exhaust memory: each layer has a
dozen objects here."""


_GEMMA4_HEAD_DIM, _GEMMA4_KV_HEADS = 256, 4


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """Checked access to config keys, by Llama's names. A key that is null counts as absent.

    keys, omitted  as in `Family`
    """

    config: Mapping[str, Any]
    source: str
    keys: Mapping[str, tuple[str, ...]]
    omitted: Mapping[str, int]

    def count(self, key: str, default: int | None = None) -> int:
        names = self.keys.get(key, (key,))
        name = next((name for name in names if self.config.get(name) is not None), "")
        value = self.config.get(name, self.omitted.get(key) if default is None else default)
        name = name or (names or (key,))[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"Model {self.source!r}: {name}={shown(value)} in its config is not a positive whole number."
            )
        if value > MOST[key]:
            raise ConfigError(
                f"Model {self.source!r}: {name}={shown(value)} in its config is more than {MOST[key]:,}, which no "
                "model has."
            )
        return value

    def experts(self, mixture: Mixture) -> tuple[int, int]:
        """The numbers of experts, and of those that a token is given to."""
        key = next((key for key in EXPERT_COUNTS if self.config.get(key) is not None), EXPERT_COUNTS[0])
        count = self.count(key, mixture.count)
        per_token = self.count("num_experts_per_tok", mixture.per_token)
        if per_token > count:
            raise ConfigError(
                f"Model {self.source!r}: num_experts_per_tok={per_token} in its config is more than its "
                f"{count} experts."
            )
        if mixture.grouped:
            groups, chosen = (
                self.count(*key) for key in zip(("n_group", "topk_group"), mixture.groups, strict=True)
            )
            for key in ("n_group", "topk_group"):
                if key in self.config and self.config[key] is None:
                    raise ConfigError(
                        f"Model {self.source!r}: {key} is null in its config. Write its number, or leave the key out "
                        f"for the default (n_group={mixture.groups[0]}, topk_group={mixture.groups[1]})."
                    )
            if chosen < groups == count:
                raise ConfigError(
                    f"Model {self.source!r}: n_group={groups} in its config makes groups of one expert, but a group "
                    f"is chosen by its two best. Write topk_group={groups}, or fewer groups."
                )
            if count % groups or not per_token <= chosen * (count // groups) <= count:
                raise ConfigError(
                    f"Model {self.source!r}: n_group={groups} and topk_group={chosen} in its config do not fit "
                    f"{count} experts of which {per_token} are chosen."
                )
        return count, per_token

    def shared_columns(self, mixture: Mixture) -> int:
        """Columns of the experts that every token passes, side by side."""
        if mixture.shared is None:
            return 0
        if mixture.shared.columns is not None:
            return self.count(mixture.shared.columns)
        assert mixture.shared.count is not None
        return self._number(mixture.shared.count, 1) * self.count(mixture.width)

    def dense_layers(self, mixture: Mixture, layers: int) -> tuple[int, ...]:
        """The numbers of layers without experts."""
        first = mixture.first_dense or 0
        if mixture.first_dense is not None and "mlp_layer_types" not in mixture.among:
            first = self._number("first_k_dense_replace", first)
        named: Any = (self.config.get("mlp_only_layers") or []) if "mlp_only_layers" in mixture.among else []
        numbers = cast(list[Any], named) if isinstance(named, list) else [None]
        if not all(type(layer) is int for layer in numbers):
            raise ConfigError(
                f"Model {self.source!r}: mlp_only_layers={shown(cast(Any, named))} in its config is not a list of "
                "whole numbers."
            )
        types = self.config.get("mlp_layer_types") if "mlp_layer_types" in mixture.among else None
        if types is not None:
            if not isinstance(types, list) or len(cast(list[Any], types)) != layers:
                raise ConfigError(
                    f"Model {self.source!r}: mlp_layer_types={shown(cast(Any, types))} in its config is not a list "
                    f"of the kinds of its {layers} layers."
                )
            first, numbers = 0, [i for i, each in enumerate(cast(list[Any], types)) if each != "sparse"]
        step = self.count("decoder_sparse_step", 1) if "decoder_sparse_step" in mixture.among else 1
        dense = tuple(i for i in range(layers) if i < first or i in numbers or (i + 1) % step)
        if len(dense) == layers:
            raise ConfigError(f"Model {self.source!r}: none of its {layers} layers has experts.")
        return dense

    def latent(self, known: Latent) -> Latent:
        """Sizes of latent attention. Where the query's rank is null, queries are computed from the hidden state."""
        keys = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        sizes = Latent(*(self.count(*each) for each in zip(keys, known, strict=True)))
        heads, kv_heads = self.config.get("num_attention_heads"), self.config.get("num_key_value_heads")
        if kv_heads not in (None, heads):
            raise ConfigError(
                f"Model {self.source!r}: num_key_value_heads={shown(kv_heads)} in its config is not its "
                f"{shown(heads)} heads. In latent attention each head has its own keys and values."
            )
        rope: Any = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        rotated = rope.get("partial_rotary_factor", self.config.get("partial_rotary_factor"))
        if rotated not in (None, 1):
            raise ConfigError(
                f"Model {self.source!r}: partial_rotary_factor={shown(rotated)} in its config is not 1. In latent "
                "attention qk_rope_head_dim says how many columns rotate."
            )
        without = "q_lora_rank" in self.config and self.config["q_lora_rank"] is None
        return sizes._replace(query_rank=0) if without else sizes

    def _number(self, key: str, default: int) -> int:
        """A whole number from 0."""
        names = self.keys.get(key, (key,))
        zero = any(type(self.config.get(name)) is int and self.config[name] == 0 for name in names)
        absent = default == 0 and all(self.config.get(name) is None for name in names)
        return 0 if zero or absent else self.count(key, default)

    def head_norms(self, known: HeadNorms | Where | None) -> HeadNorms | None:
        if isinstance(known, Where):
            return known.value if self.flag(known.key, False) else None
        return known

    def kernel(self, kinds: Sequence[LayerKind]) -> int:
        """Tokens that a causal convolution reads; 0 where no layer has one."""
        if "convolution" in kinds:
            return self.count("conv_L_cache", 3)
        return self.count("linear_conv_kernel_dim", 4) if "delta" in kinds else 0

    def delta_heads(self) -> DeltaHeads:
        keys, values = self.count("linear_num_key_heads", 16), self.count("linear_num_value_heads", 32)
        if values % keys:
            raise ConfigError(
                f"Model {self.source!r}: {values} value heads are not a multiple of {keys} key heads "
                "(linear_num_value_heads, linear_num_key_heads)."
            )
        dims = self.count("linear_key_head_dim", 128), self.count("linear_value_head_dim", 128)
        return DeltaHeads(keys, values // keys, *dims)

    def mixture(self, known: Mixture | None) -> Mixture | None:
        """The family's experts, or None where the config says that this model has none."""
        without = known is not None and known.beside is not None and not self.flag(known.beside, False)
        return None if without else known

    def varied(self, kinds: Sequence[LayerKind], vocab: int) -> VariedLayers:
        """How layers differ. Sizes of heads are keys of their own, or overrides for layers by their numbers."""
        values_are_keys = self.flag("attention_k_eq_v", False)
        kv_heads = self.count("num_key_value_heads", _GEMMA4_KV_HEADS)
        overrides = self._overrides(kinds)
        if overrides is not None:
            read = ConfigKeys({"head_dim": self.config.get("head_dim"), **overrides}, self.source, {}, {})
            head_dim = read.count("head_dim", _GEMMA4_HEAD_DIM)
            kv_heads = read.count("num_key_value_heads", kv_heads)
        else:
            head_dim = self.count("global_head_dim", 512)
            if values_are_keys:
                kv_heads = self.count("num_global_key_value_heads", kv_heads)
        if kinds[-1] != "global":
            raise ConfigError(
                f"Model {self.source!r}: the last of layer_types in its config is not full_attention, as the last "
                "layer of a Gemma 4 is."
            )
        sharing = self._number("num_kv_shared_layers", 0)
        if sharing and set(kinds[: len(kinds) - sharing]) != set(kinds):
            raise ConfigError(
                f"Model {self.source!r}: num_kv_shared_layers={sharing} in its config leaves no layer of some kind "
                f"whose keys and values its {len(kinds)} layers could share. Write a smaller number."
            )
        tokens = self.count("vocab_size_per_layer_input", 262_144)
        inputs = self._number("hidden_size_per_layer_input", 256)
        if inputs and tokens < vocab:
            raise ConfigError(
                f"Model {self.source!r}: vocab_size_per_layer_input={tokens} in its config is less than its "
                f"{vocab} tokens."
            )
        doubled = self.flag("use_double_wide_mlp", False)
        return VariedLayers(head_dim, kv_heads, values_are_keys, sharing, doubled, inputs, tokens)

    def _overrides(self, kinds: Sequence[LayerKind]) -> Mapping[str, Any] | None:
        """What `per_layer_config` says of the layers of kind "global"; None where there is no such key. It must say
        the same of all of them, and of others nothing."""
        overrides: Any = self.config.get("per_layer_config")
        if overrides is None:
            return None
        by_layer = cast(Mapping[Any, Any], overrides) if isinstance(overrides, Mapping) else {"": overrides}
        named = {str(number): sizes for number, sizes in by_layer.items()}
        wide = [str(number) for number, kind in enumerate(kinds) if kind == "global"]
        first: Any = named.get(wide[0], {}) if wide else {}
        known = isinstance(first, Mapping) and first.keys() <= {"head_dim", "num_key_value_heads"}
        if not known or named.keys() - set(wide) or any(named.get(number, {}) != first for number in wide):
            raise ConfigError(
                f"Model {self.source!r}: per_layer_config={shown(cast(Any, overrides))} in its config is not "
                "head_dim and num_key_value_heads of all layers of full_attention, and of no others."
            )
        return cast(Mapping[str, Any], first)

    def flag(self, key: str, default: bool) -> bool:
        names = self.keys.get(key, (key,))
        key = next((name for name in names if self.config.get(name) is not None), key)
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(
                f"Model {self.source!r}: {key}={shown(value)} in its config is neither true nor false."
            )
        return value

    def option(self, known: bool | str | Unless) -> bool:
        """The family's value, or the config's value where the family names a config key."""
        if isinstance(known, Unless):
            return self.flag(known.key, True)
        return self.flag(known, False) if isinstance(known, str) else known
