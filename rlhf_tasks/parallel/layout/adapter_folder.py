"""A model folder that holds a LoRA adapter in peft's format: the model that it belongs to, and what it adds to it.

Such a folder means its base model with the adapter merged in. Loads no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_tasks.system.reading import ConfigError, read_json, reading, shown

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # peft's
WRAPPED = "base_model.model."  # before a parameter's name in peft's files
MOST_RANK = 2**20  # no dimension of a model is larger
MOST_ALPHA = 1e9  # no real adapter comes near

_MUST_BE_UNSET = (
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "use_qalora",
    "alora_invocation_tokens",
    "lora_bias",
)
"""Settings of peft under which an adapter is more than W + scale * B A, or has another rank for each matrix."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """What adapter_config.json says.

    base   folder of the model that the adapter belongs to
    scale  factor of B A
    """

    folder: Path
    base: Path
    rank: int
    scale: float


def adapter_of(folder: str | Path) -> AdapterFolder | None:
    """The adapter that a folder holds; None of a folder of a whole model, and of one that is not there.

    Raises ConfigError for an adapter that is not plain LoRA, for a base that is not there, and for one that is an
    adapter itself.
    """
    folder = Path(folder)
    path = folder / ADAPTER_CONFIG
    if not path.is_file() or (folder / "config.json").is_file():
        return None
    config = read_json(path)
    merge = "Merge it into its model first, with peft's merge_and_unload."
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type is {shown(config.get('peft_type'))}, not LORA. {merge}")
    odd = next((name for name in _MUST_BE_UNSET if config.get(name)), None)
    if odd is not None:
        raise ConfigError(f"{path}: {odd} is {shown(config[odd])}, which is no plain LoRA. {merge}")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{path}: bias is {shown(config['bias'])}, not none: it changes biases. {merge}")
    if isinstance(began := config.get("init_lora_weights"), str) and began not in ("gaussian", "orthogonal"):
        raise ConfigError(
            f"{path}: init_lora_weights is {shown(began)}, which changes the base model's weights. {merge}"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise ConfigError(f"{path}: r is {shown(rank)}, not a whole number from 1. Save the adapter again.")
    if not isinstance(alpha, int | float) or not abs(alpha) <= MOST_ALPHA:  # nor NaN
        raise ConfigError(
            f"{path}: lora_alpha is {shown(alpha)}, not a number of use. Save the adapter again."
        )
    scale: float = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return AdapterFolder(folder, _base(path, config), rank, scale)


def base_of(folder: str | Path) -> Path:
    """The folder of the whole model: an adapter's base, or the folder itself. Raises ConfigError as `adapter_of`."""
    adapter = adapter_of(folder)
    return Path(folder) if adapter is None else adapter.base


def own_or_base(folder: str | Path, name: str) -> Path:
    """Where a file of a model folder is: there, or else where the base model of an adapter is."""
    own = Path(folder, name)
    return own if own.is_file() else base_of(folder) / name


def is_model_folder(folder: str | Path) -> bool:
    """Whether a folder holds a model or an adapter, sound or not."""
    return any(Path(folder, name).is_file() for name in ("config.json", ADAPTER_CONFIG))


def _base(path: Path, config: Mapping[str, Any]) -> Path:
    """The base model's folder. A relative path is looked for in the adapter's folder and in those above it, so that
    it means the same on every host, whatever the current folder is."""
    named = config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ConfigError(
            f"{path}: base_model_name_or_path is {shown(named)}. Write the base model's folder there."
        )
    with reading(path, "base_model_name_or_path is no path"):
        places = [Path(named)] if Path(named).is_absolute() else [p / named for p in path.absolute().parents]
        found = next((place for place in places if is_model_folder(place)), None)
    if found is None:
        raise ConfigError(
            f"{path}: the base model {shown(named)} is no model folder"
            f"{'' if Path(named).is_absolute() else ' in the adapter folder or one above it'}. Download it, or write "
            "its absolute path to base_model_name_or_path."
        )
    if not (found / "config.json").is_file():
        raise ConfigError(
            f"{path}: its base model {shown(str(found))} is an adapter itself. Merge that one first, with "
            "prefect-rlhf export --merged or peft's merge_and_unload."
        )
    return found
