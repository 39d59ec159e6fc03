"""Folders whose language model is a part of a model of images or sound (`text_config`): its config, and its tensors'
names among those of the whole. Pure Python."""

from collections.abc import Mapping
from typing import Any, cast

PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.")
"""How the names of the language model's tensors may begin in files, in place of `model.`."""

_HEADS = ("lm_head.", "score.")
_LIFTED = ("auto_map", "quantization_config")
TIED_KEYS = ("tie_word_embeddings", "tie_embedding")
"""What configs say of tied embeddings by."""


def is_below_images(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a model of which the language model is a part."""
    return isinstance(config.get("text_config"), Mapping)


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model in a config: a part of it, or all.

    Of the whole model it has what is said of all weights: whether embeddings are tied, code, and quantisation.
    """
    if not is_below_images(config):
        return config
    below = dict(cast(Mapping[str, Any], config["text_config"]))
    below |= {key: config[key] for key in _LIFTED if key in config}
    if config.get("tie_word_embeddings") is not None:
        below = {key: value for key, value in below.items() if key not in TIED_KEYS}
        below["tie_word_embeddings"] = config["tie_word_embeddings"]
    return below


def names_in_files(name: str) -> tuple[str, ...]:
    """What a tensor of the language model may be called in files, its own name first."""
    if name.startswith(_HEADS):
        return (name, f"language_model.{name}")
    return (name, *(prefix + name.removeprefix("model.") for prefix in PREFIXES if name.startswith("model.")))


def name_below(name: str, prefix: str) -> str:
    """The name of a tensor of the language model where those of its decoder begin with one of `PREFIXES`."""
    if name.startswith("model."):
        return prefix + name.removeprefix("model.")
    return f"language_model.{name}" if prefix == "language_model.model." else name


def own_name(name: str) -> str | None:
    """The language model's name of a tensor in the files of a whole model; None of a tensor of another part."""
    if name.startswith(tuple(f"language_model.{head}" for head in _HEADS)):
        return name.removeprefix("language_model.")
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    if prefix is not None:
        return f"model.{name.removeprefix(prefix)}"
    return name if name.startswith((*_HEADS, "model.layers.", "model.embed_tokens.", "model.norm.")) else None
