"""Fills a stage's parameters: from a Hugging Face folder, of which a rank reads only its own slices, or at random,
with the same whole model in every layout."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from rlhf_tasks.parallel.layout.adapter_folder import base_of
from rlhf_tasks.parallel.layout.slices import Interval, ParameterSpec
from rlhf_tasks.parallel.layout.weight_files import InFile, LowRank, weight_files
from rlhf_tasks.parallel.model.stage import Stage
from rlhf_tasks.system.byte_count import ByteCount
from rlhf_tasks.system.counter_random import stream_key

CACHED = 1 << 16  # numbers of a sum that stay in a core's cache


def load_config(folder: str | Path) -> PreTrainedConfig:
    """The model's config from its folder, or from that of an adapter's base. Never uses the network, and never runs
    code from the folder.

    Raises ValueError naming the folder when it has no config.json.
    """
    whole = base_of(folder)
    if not (whole / "config.json").is_file():
        raise ValueError(
            f"Model folder {str(folder)!r} has no config.json. Name a folder in Hugging Face's format."
        )
    return AutoConfig.from_pretrained(whole, local_files_only=True, trust_remote_code=False)


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
    Only this rank's slices are read; an adapter's folder means its base model with the adapter added. A scalar head
    that the folder lacks is initialised at random from `seed`, and so are adapters.
    Returns the names of the model's parameters that were not in the folder.
    Raises ValueError for what `weight_files` refuses.
    """
    parameters, held = stage.named_slices(), stage.layout.held(stage.holder)
    specs = [stage.layout.specs[name] for name in parameters]
    files = weight_files(Path(folder), specs, needs_head=False)
    missing = [spec.name for spec in specs if not spec.stored.keys() <= files.keys()]
    with opened(files) as stored:
        for spec in specs:
            if spec.name not in missing and spec.name not in there:
                _fill(parameters[spec.name], stored_rows(stored, spec, held[spec.name]), moved)
    _randomise(stage, missing, seed, moved)
    initialise_adapters(stage, seed)
    return tuple(missing)


ReadTensor = Callable[[str], Any]
"""Name of a tensor in files -> a Tensor, or a slice of safetensors, of which only the wanted rows are read."""


@contextmanager
def opened(files: Mapping[str, InFile]) -> Iterator[ReadTensor]:
    """The tensors of safetensors files. Each file is opened (mapped) when the first of its tensors is wanted.

    files  name of a tensor -> where it is
    """
    with ExitStack() as stack:

        @cache
        def tensors(file: Path) -> Any:
            return stack.enter_context(safe_open(file, framework="pt", device="cpu"))

        def tensor(name: str) -> Any:
            found = files[name]
            own = tensors(found.file).get_slice(found.name)
            if found.added is None:
                return own
            a, b = (tensors(found.added.file).get_tensor(half) for half in (found.added.a, found.added.b))
            return _Merged(own, a, b, found.added)

        yield tensor


@dataclass(frozen=True, slots=True)
class _Merged:
    """A weight of a base model with an adapter added to it: W + scale * B A. Only the wanted part is computed.

    own   a slice of safetensors
    a, b  [rank, in], [out, rank]
    """

    own: Any
    a: Tensor
    b: Tensor
    added: LowRank

    def __getitem__(self, wanted: tuple[slice, ...]) -> Tensor:
        """float32 or float64: in 16 bits, most of B A would be rounded away before it is known where it goes."""
        own: Tensor = self.own[wanted]
        first, second = (*wanted, slice(None))[:2]
        outputs, inputs = (second, first) if self.added.transposed else (first, second)
        wide = torch.promote_types(torch.promote_types(own.dtype, self.a.dtype), torch.float32)
        product = self.added.scale * _outer_sum(self.b[outputs].to(wide), self.a[:, inputs].to(wide))
        return own.to(wide) + (product.T if self.added.transposed else product)


def _outer_sum(b: Tensor, a: Tensor) -> Tensor:
    """B A, whose elements are sums in the order of the ranks: any part has the bits of the whole. A matrix product
    sums in an order that depends on the shapes, so that the layout would show.

    b, a  [out, rank], [rank, in]
    """
    total = b.new_zeros(len(b), a.shape[1])
    rows = max(1, CACHED // max(1, a.shape[1]))
    for first in range(0, len(b), rows):
        part = total[first : first + rows]
        for column, row in zip(b[first : first + rows].T, a, strict=True):
            part += column[:, None] * row
    return total


def stored_rows(stored: ReadTensor, spec: ParameterSpec, rows: Interval) -> Tensor:
    """Some rows of a parameter, from the tensors in files that it is a part of, or is made of (`spec.stored`)."""
    names = list(spec.stored)
    if spec.stacked is None:
        return _part(stored(names[0]), spec, rows)
    part = (slice(None),) * (spec.dim - 1) + (slice(*rows),)
    taken: Tensor = stored(names[0])[part]
    whole = taken.new_empty(len(names), *taken.shape)
    for number, name in enumerate(names):  # one after the other, so that no second copy stands in memory
        whole[number] = stored(name)[part]
    return whole


def _part(tensor: Any, spec: ParameterSpec, rows: Interval) -> Tensor:
    """Some rows of a parameter that a tensor in files holds, alone or with others behind each other."""
    start, transposed = (0, False) if spec.packed is None else (spec.packed.start, spec.packed.transposed)
    wanted = [slice(start, start + spec.shape[0]), *(slice(None) for _ in spec.shape[1:])]
    first = start if spec.dim == 0 else 0
    wanted[spec.dim] = slice(first + rows.start, first + rows.stop)
    return tensor[tuple(reversed(wanted))].T if transposed else tensor[tuple(wanted)]


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
    """A whole weight: spec.shape, float32. The embedding of the padding token is zero, but for GPT-2."""
    generator = _generator(seed, spec.name)
    scale = config.initializer_range
    if spec.module == "c_proj":  # as GPT-2 begins: the sum of all layers does not grow with their number
        scale /= (2 * config.num_hidden_layers) ** 0.5
    whole = torch.empty(spec.shape).normal_(0.0, scale, generator=generator)
    padded = spec.name == "model.embed_tokens.weight" and config.model_type != "gpt2"
    if padded and config.pad_token_id is not None:
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
