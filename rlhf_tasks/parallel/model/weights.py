"""Fills a stage's parameters: from a Hugging Face folder, of which a rank reads only its own slices, or at random,
with the same whole model in every layout."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from rlhf_tasks.parallel.layout.slices import Interval, ParameterSpec
from rlhf_tasks.parallel.layout.weight_files import weight_files
from rlhf_tasks.parallel.model.stage import Stage
from rlhf_tasks.system.byte_count import ByteCount
from rlhf_tasks.system.counter_random import stream_key


def load_config(folder: str | Path) -> PreTrainedConfig:
    """The model's config from its folder. Never uses the network, and never runs code from the folder.

    Raises ValueError naming the folder when it has no config.json.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(
            f"Model folder {str(folder)!r} has no config.json. Name a folder in Hugging Face's format."
        )
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load(
    stage: Stage,
    folder: str | Path,
    seed: int,
    there: Collection[str] = (),
    moved: ByteCount | None = None,
) -> tuple[str, ...]:
    """Fill a stage's parameters from a Hugging Face folder (safetensors, one file or many with an index).

    there  names of parameters that have their values already
    moved  counts the bytes of the parameters that are filled
    Only this rank's slices are read. A scalar head that the folder lacks is initialised at random from `seed`, and so
    are adapters.
    Returns the names of the model's parameters that were not in the folder.
    Raises ValueError for what `weight_files` refuses.
    """
    parameters, held = stage.named_slices(), stage.layout.held(stage.holder)
    specs = [stage.layout.specs[name] for name in parameters]
    files = weight_files(Path(folder), specs, needs_head=False)
    by_file = defaultdict(list)
    for spec in specs:
        if spec.name in files and spec.name not in there:
            by_file[files[spec.name]].append(spec)
    for file, stored in by_file.items():
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for spec in stored:
                tensor = tensors.get_slice(spec.stored_name)
                _fill(parameters[spec.name], stored_rows(tensor, spec, held[spec.name]), moved)
    missing = [name for name in parameters if name not in files]
    _randomise(stage, missing, seed, moved)
    initialise_adapters(stage, seed)
    return tuple(missing)


def stored_rows(tensor: Any, spec: ParameterSpec, rows: Interval) -> Tensor:
    """Some rows of a parameter, from the tensor that files hold it in (`stored_name`).

    tensor  a Tensor, or a slice of safetensors, of which only these rows are read
    """
    first = 0 if spec.packed is None else spec.packed.start
    part = slice(first + rows.start, first + rows.stop)
    return tensor[part] if spec.dim == 0 else tensor[:, part]


def initialise(stage: Stage, seed: int, moved: ByteCount | None = None) -> None:
    """Fill a stage's parameters at random, as transformers does for a new model.

    moved  counts their bytes

    Each whole parameter is drawn from a generator seeded with (seed, its name) and then cut, so the whole model is
    the same in every layout. Weights are normal with the config's `initializer_range` as standard deviation, biases
    are 0, and norms do not scale.
    """
    _randomise(stage, stage.named_slices(), seed, moved)
    initialise_adapters(stage, seed)


def initialise_adapters(stage: Stage, seed: int) -> None:
    """Set a stage's adapters as peft does: A uniform in +-1 / sqrt(in), the same bits in every layout; B zero."""
    adapters, held = stage.trained_slices(), stage.trained.held(stage.holder)
    for name in adapters.keys() - stage.layout.specs.keys():
        spec, rows = stage.trained.specs[name], held[name]
        whole = torch.zeros(())
        if name.endswith("lora_A.weight"):
            whole = torch.empty(spec.shape)
            bound = spec.shape[1] ** -0.5
            whole.uniform_(-bound, bound, generator=_generator(seed, name))
            whole = whole.narrow(spec.dim, rows.start, rows.size)
        _fill(adapters[name], whole)


def _randomise(stage: Stage, names: Iterable[str], seed: int, moved: ByteCount | None) -> None:
    parameters, held = stage.named_slices(), stage.layout.held(stage.holder)
    for name in names:
        spec, rows = stage.layout.specs[name], held[name]
        if len(spec.shape) == 1:
            constant = 0.0 if name.endswith(".bias") else stage.neutral_norm
            _fill(parameters[name], torch.tensor(constant), moved)
        else:
            whole = _drawn(spec, seed, stage.config)
            _fill(parameters[name], whole.narrow(spec.dim, rows.start, rows.size), moved)


def _drawn(spec: ParameterSpec, seed: int, config: PreTrainedConfig) -> Tensor:
    """A whole weight: spec.shape, float32. The embedding of the padding token is zero."""
    generator = _generator(seed, spec.name)
    whole = torch.empty(spec.shape).normal_(0.0, config.initializer_range, generator=generator)
    if spec.name == "model.embed_tokens.weight" and config.pad_token_id is not None:
        whole[config.pad_token_id] = 0.0
    return whole


def _generator(seed: int, name: str) -> torch.Generator:
    """The source of a parameter's initial values: equal on all ranks."""
    return torch.Generator().manual_seed(stream_key(seed, f"initial {name}", 0))


def _fill(parameter: Tensor, values: Tensor, moved: ByteCount | None = None) -> None:
    with torch.no_grad():
        parameter.copy_(values)
    if moved is not None:
        moved.add(parameter.nbytes)
