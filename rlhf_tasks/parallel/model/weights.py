"""Fills a stage's parameters: from a Hugging Face folder, of which a rank reads only its own slices, or at random,
with the same whole model in every layout. Writes such folders, which `from_pretrained`, vLLM and SGLang load; of
adapters, folders for peft."""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from prefect_rlhf.rlhf_tasks.parallel.layout.below_images import PREFIXES, is_below_images, name_below
from prefect_rlhf.rlhf_tasks.parallel.layout.families import FAMILIES
from prefect_rlhf.rlhf_tasks.parallel.layout.family import Family
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import CORRECTION, FACTOR, FileTensor, ParameterSpec
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    BLOCK,
    INDEX,
    SINGLE,
    VERDICT,
    WRAPPED,
    InFile,
    LowRank,
    OfExpert,
    base_of,
    beside_weights,
    config_digest,
    has_weights,
    other_tensors,
    tensor_shapes,
    weight_files,
)
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.system.counter_random import stream_key
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount, sync
from prefect_rlhf.rlhf_tasks.system.reading import read_json

CACHED = 1 << 16  # numbers of a sum that stay in a core's cache


def load_config(folder: str | Path) -> PreTrainedConfig:
    """The model's config from its folder, or from that of an adapter's base. Never uses the network, and never runs
    code from the folder. It says nothing of how files are quantised, since weights are floats here. Of a model of
    images or sound, it is that of the language model below.

    Raises ValueError naming the folder when it has no config.json.
    """
    whole = base_of(folder)
    if not (whole / "config.json").is_file():
        raise ValueError(
            f"Model folder {str(folder)!r} has no config.json. Name a folder in Hugging Face's format."
        )
    config = _whole_config(whole)
    config = config.text_config if is_below_images(read_json(whole / "config.json")) else config
    vars(config).pop("quantization_config", None)
    return config


def _whole_config(folder: Path) -> Any:
    """The config of all that a folder holds."""
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
    Only this rank's slices are read; an adapter's folder means its base model with the adapter added. A scalar head
    that the folder lacks is initialised at random from `seed`, and so are adapters.
    Returns the names of the model's parameters that were not in the folder.
    Raises ValueError for what `weight_files` refuses.
    """
    held = stage.layout.held(stage.holder)
    specs = [stage.layout.specs[name] for name in stage.named_slices()]
    files = weight_files(Path(folder), specs, needs_head=False)
    missing = [spec.name for spec in specs if not spec.stored.keys() <= files.keys()]
    with opened(files) as stored:
        for spec in specs:
            if spec.name not in missing and spec.name not in there:
                values = stored_rows(stored, spec, held[spec.name])
                _fill(stage, spec.name, near_zero(values, spec, stage.dtype), moved)
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
            place = files[name]
            weight = tensors(place.file).get_slice(place.name)
            if place.scales is not None:
                weight = _Dequantised(weight, tensors(place.scales[0]).get_slice(place.scales[1]))
            if place.expert is not None:
                weight = _OneOfAll(weight, place.expert)
            if place.added is None:
                return weight
            a, b = (tensors(place.added.file).get_tensor(half) for half in (place.added.a, place.added.b))
            return _Merged(weight, a, b, place.added)

        yield tensor


@dataclass(frozen=True, slots=True)
class _OneOfAll:
    """An expert's weight [rows, columns], of a slice of safetensors that holds those of all experts of a layer."""

    of_all: Any
    place: OfExpert

    def __getitem__(self, wanted: tuple[slice, ...]) -> Tensor:
        rows, *columns = wanted
        number, first, count = self.place
        begin, stop, _ = rows.indices(count)
        part: Tensor = self.of_all[(slice(number, number + 1), slice(first + begin, first + stop), *columns)]
        return part[0]


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


@dataclass(frozen=True, slots=True)
class _Dequantised:
    """The weights [experts, in, out] of which files hold blocks in MXFP4. Only the wanted part is computed.

    blocks, scales  slices of safetensors: [experts, out, in / 32, 16], [experts, out, in / 32]
    """

    blocks: Any
    scales: Any

    def __getitem__(self, wanted: tuple[slice, ...]) -> Tensor:
        """bfloat16, which has these numbers exactly. `out` may have a step: rows between are not computed."""
        experts, into, out = wanted
        step = out.step or 1
        first, last = into.start // BLOCK, -(-into.stop // BLOCK)
        numbers = range(experts.start, experts.stop)
        rows = len(range(out.start, out.stop, step))
        whole = torch.empty(len(numbers), rows, into.stop - into.start, dtype=torch.bfloat16)
        for place, number in enumerate(numbers):  # one after the other, so that little stands in memory
            part = (slice(number, number + 1), slice(out.start, out.stop), slice(first, last))
            blocks: Tensor = self.blocks[part][0, ::step]
            scales: Tensor = self.scales[part][0, ::step]
            inner = slice(into.start - first * BLOCK, into.stop - first * BLOCK)
            whole[place] = from_mxfp4(blocks, scales)[:, inner]
        return whole.mT


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers in MXFP4 (Open Compute Project, Microscaling Formats, version 1.0): those of a block times one scale.

    blocks  uint8 [rows, blocks, 16]: two numbers of 4 bits in a byte, the first one in its low half
    scales  uint8 [rows, blocks]: exponents of 2, plus 127
    Returns float32 [rows, columns].
    """
    factors = torch.ones(scales.shape).ldexp(scales.int() - 127)
    pairs = _pairs_of_bytes().index_select(0, blocks.flatten().int()).view(*scales.shape, BLOCK)
    return pairs.mul_(factors[..., None]).flatten(1)


@cache
def _pairs_of_bytes() -> Tensor:
    """The two numbers of each byte in MXFP4: [256, 2] float32."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat([sizes, -sizes])  # the first bit is the sign
    every = torch.arange(256)
    return torch.stack([numbers[every & 15], numbers[every >> 4]], -1)


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
    taken = _part(stored(names[0]), spec, rows)
    if spec.stacked is None:
        return taken
    whole = taken.new_empty(len(names), *taken.shape)
    for number, name in enumerate(names):  # one after the other, so that no second copy stands in memory
        whole[number] = _part(stored(name), spec, rows)
    return whole


def stored_parts(
    spec: ParameterSpec, rows: Interval, values: Tensor
) -> Iterator[tuple[str, tuple[slice, ...], Tensor]]:
    """Where some rows of a parameter, `values`, lie in files, and `stored_rows` would read them: name of a tensor,
    region of it, and the part of `values` that belongs there."""
    turned = spec.packed is not None and spec.packed.transposed
    parts = values.unbind() if spec.stacked is not None else [values.mT if turned else values]
    for name, part in zip(spec.stored, parts, strict=True):
        yield name, _region(spec, rows), part


def _region(spec: ParameterSpec, rows: Interval) -> tuple[slice, ...]:
    """Where some rows of a parameter lie in the tensor in files that holds it, or in each that it is made of."""
    of_parts = 0 if spec.stacked is None else 1
    region = [slice(0, length, 1) for length in spec.shape[of_parts:]]
    region[spec.dim - of_parts] = slice(*rows, 1)
    if (place := spec.packed) is not None:
        first, last = (
            place.start + row * place.step for row in (region[place.dim].start, region[place.dim].stop - 1)
        )
        region[place.dim] = slice(first, last + 1, place.step)
        if place.transposed:
            region[-2:] = reversed(region[-2:])
    return tuple(region)


def _part(tensor: Any, spec: ParameterSpec, rows: Interval) -> Tensor:
    """Some rows of a parameter, from a tensor in files. Of parameters that take turns, the rows of all are read, as
    they lie side by side; what is computed skips those of others."""
    region = _region(spec, rows)
    if isinstance(tensor, _Dequantised):
        part: Tensor = tensor[region]
    else:
        part = tensor[tuple(slice(each.start, each.stop) for each in region)]
        part = part[tuple(slice(None, None, each.step) for each in region)]
    return part.mT if spec.packed is not None and spec.packed.transposed else part


def near_zero(values: Tensor, spec: ParameterSpec, dtype: torch.dtype) -> Tensor:
    """A whole parameter as 16 bits should hold it: the corrections of a router's scores all less by one number, so
    that their differences are not rounded away. Others stay as they are.

    The merits of all experts become less by that number, those of all groups by twice as much: no token changes its
    experts. The number is a multiple of 1/16 near the mean: what 16 bits have held is read as it was written.
    """
    if dtype.itemsize > 2 or not spec.name.endswith(CORRECTION):
        return values
    wide = values.double()
    return wide - (wide.mean() * 16).round() / 16


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
    held = stage.trained.held(stage.holder)
    for name in stage.trained_slices().keys() - stage.layout.specs.keys():
        spec, rows = stage.trained.specs[name], held[name]
        whole = torch.zeros(())
        if name.endswith("lora_A.weight"):
            whole = torch.empty(spec.shape)
            bound = spec.shape[1] ** -0.5
            whole.uniform_(-bound, bound, generator=_generator(seed, name))
            whole = whole.narrow(spec.dim, rows.start, rows.size)
        _fill(stage, name, whole)


_CONSTANTS = {
    ".dt_bias": 1.0,
    "bias": 0.0,
    ".linear_attn.norm.weight": 1.0,
    f".{FACTOR}": 1.0,
    ".router.scale": 1.0,
    ".router.per_expert_scale": 1.0,
}
"""Ends of names -> the initial value, by the first that fits. Other vectors are weights of norms."""
MOST_DECAY = (0.01, 16.0)
"""Between these lies, at first, the rate at which a state of the gated delta rule fades; A_log is its logarithm."""


def _randomise(stage: Stage, names: Iterable[str], seed: int, moved: ByteCount | None) -> None:
    held = stage.layout.held(stage.holder)
    for name in names:
        spec, rows = stage.layout.specs[name], held[name]
        if name.endswith(".A_log"):
            whole = torch.empty(spec.shape).uniform_(*MOST_DECAY, generator=_generator(seed, name)).log()
            _fill(stage, name, whole[slice(*rows)], moved)
        elif name.endswith(tuple(_CONSTANTS)) or (name.endswith(".weight") and len(spec.shape) == 1):
            ends = (end for end in _CONSTANTS if name.endswith(end))
            constant = _CONSTANTS.get(next(ends, ""), stage.neutral_norm)
            _fill(stage, name, torch.tensor(constant), moved)
        else:
            whole = _drawn(spec, seed, stage.config)
            _fill(stage, name, whole.narrow(spec.dim, rows.start, rows.size), moved)


def _drawn(spec: ParameterSpec, seed: int, config: PreTrainedConfig) -> Tensor:
    """A whole weight: spec.shape, float32. The embedding of the padding token is zero, but for GPT-2."""
    generator = _generator(seed, spec.name)
    scale = config.initializer_range
    if (
        spec.module == "c_proj" and config.model_type == "gpt2"
    ):  # as GPT-2 begins: the sum of all layers does not grow with their number
        scale /= (2 * config.num_hidden_layers) ** 0.5
    whole = torch.empty(spec.shape).normal_(0.0, scale, generator=generator)
    padded = spec.name == "model.embed_tokens.weight" and config.model_type != "gpt2"
    if padded and config.pad_token_id is not None:
        whole[config.pad_token_id] = 0.0
    return whole


def _generator(seed: int, name: str) -> torch.Generator:
    """The source of a parameter's initial values: equal on all ranks."""
    return torch.Generator().manual_seed(stream_key(seed, f"initial {name}", 0))


def _fill(stage: Stage, name: str, values: Tensor, moved: ByteCount | None = None) -> None:
    stage.fill(name, values)
    if moved is not None:
        moved.add(stage.get_parameter(name).nbytes)


SHARD_BYTES = 5 * 1024**3  # the default of transformers for several years


class FolderWriter:
    """Writes a Hugging Face folder parameter by parameter. `close` renames it into place, so it is never incomplete.

    Of a model of images or sound, the language model is written under the names that it has in `source`, and all
    other tensors are copied from there; with a scalar head it is written alone.

    folder       must not exist yet
    source       the folder that the model came from: its config, tokenizer and generation config are copied
    layout       of what is written: of adapters, it becomes a folder for peft, which names `source`
    dtype        dtype of the tensors that `add` will get
    shard_bytes  most bytes of tensors in one file, unless one parameter alone is larger

    Raises FileExistsError when the folder exists, ConfigError where a file of `source` is a link out of it.
    """

    def __init__(
        self,
        folder: Path,
        source: Path,
        layout: Layout,
        dtype: torch.dtype,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if folder.exists():
            raise FileExistsError(f"{folder} is there already. Remove it or name another folder.")
        beside = beside_weights(source)
        self.folder = folder
        self.dtype = dtype
        self._unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)
        self._prefix, self._below = "", ""
        self._others: dict[str, InFile] = {}
        self._shard_bytes = shard_bytes
        if layout.lora is None:
            if layout.head == "lm":
                self._others = other_tensors(base_of(source), layout.parameters)
                self._below = _prefix_in(base_of(source)) if self._others else ""
            alone = SINGLE if not self._others else ""
            self._file_of = _files(layout, dtype.itemsize, shard_bytes, alone)
            _write_config(self._unfinished, source, layout, dtype, whole=bool(self._others))
        else:
            self._file_of = dict.fromkeys(layout.specs, ADAPTER)
            self._prefix, self._below = WRAPPED, _prefix_for_peft(base_of(source))
            _write_adapter_config(self._unfinished, source, layout, self._below)
        self._specs = layout.specs
        self._waiting: dict[str, Tensor] = {}
        self._written: set[str] = set()
        for path in beside:
            shutil.copy2(path, self._unfinished / path.name)

    def add(self, name: str, whole: Tensor) -> None:
        """Add the next whole parameter, in the order of `layout.parameters`.

        whole  the parameter's global shape, of the writer's dtype
        A file is written when all its parameters have come, so memory holds the tensors of one file at most.
        """
        assert whole.shape == self._specs[name].shape, (name, whole.shape)
        assert whole.dtype == self.dtype, (name, whole.dtype)
        file = self._file_of[name]
        self._waiting[name] = whole.detach().to("cpu").contiguous()
        if self._waiting.keys() == {other for other, its in self._file_of.items() if its == file}:
            parts = defaultdict[str, list[Tensor]](list)
            places = dict[str, FileTensor]()
            for waiting, tensor in self._waiting.items():
                spec = self._specs[waiting]
                pieces = [tensor] if spec.stacked is None else tensor.unbind()
                for stored, piece in zip(spec.stored, pieces, strict=True):
                    name = self._named(stored)
                    parts[name].append(piece)
                    if spec.packed is not None:
                        places[name] = spec.packed
            tensors = {stored: _joined(of, places.get(stored)) for stored, of in parts.items()}
            save_file(tensors, self._unfinished / file, metadata={"format": "pt"})
            self._written |= self._waiting.keys()
            self._waiting = {}

    def close(self) -> None:
        """Write the index, sync all files to disk, then rename the folder to its final name."""
        missing = self._file_of.keys() - self._written
        assert not missing, f"{len(missing)} parameters were not added, such as {min(missing)}"
        if not set(self._file_of.values()) <= {SINGLE, ADAPTER}:
            files = {
                self._named(stored): file
                for name, file in self._file_of.items()
                for stored in self._specs[name].stored
            }
            both = files.keys() & self._others
            assert not both, f"{len(both)} tensors would be copied over trained ones, such as {min(both)}"
            files |= self._copy_others()
            total = sum((self._unfinished / file).stat().st_size for file in set(files.values()))
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (self._unfinished / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        # As the umask says; copied files have their source's mode.
        mode = self._unfinished.stat().st_mode & 0o666
        for path in self._unfinished.iterdir():
            path.chmod(mode)
            sync(path)
        sync(self._unfinished)
        self._unfinished.rename(self.folder)
        sync(self.folder.parent)

    def _named(self, stored: str) -> str:
        """The name of a tensor in the files that are written."""
        return self._prefix + (name_below(stored, self._below) if self._below else stored)

    def _copy_others(self) -> dict[str, str]:
        """Copy the tensors that are not the language model's, file by file. Returns name -> file."""
        files, waiting, size = dict[str, str](), dict[str, Tensor](), 0
        with opened(self._others) as stored:
            for name in self._others:
                tensor: Tensor = stored(name)[...]
                if waiting and size + tensor.nbytes > self._shard_bytes:
                    files |= self._others_written(waiting, len(set(files.values())))
                    waiting, size = {}, 0
                waiting[name] = tensor.contiguous()
                size += tensor.nbytes
        return files | self._others_written(waiting, len(set(files.values()))) if waiting else files

    def _others_written(self, tensors: dict[str, Tensor], number: int) -> dict[str, str]:
        file = f"model-other-parts-{number + 1:05d}.safetensors"
        save_file(tensors, self._unfinished / file, metadata={"format": "pt"})
        return dict.fromkeys(tensors, file)


def _prefix_in(folder: Path) -> str:
    """How the names of the language model's tensors begin in the files of a whole model."""
    names = tensor_shapes(folder)
    return next((p for p in PREFIXES if any(name.startswith(p) for name in names)), "")


def _prefix_for_peft(base: Path) -> str:
    """The same in the model that AutoModelForCausalLM makes of a folder, or else AutoModelForImageTextToText: peft
    names the adapters of its modules. Empty for a language model alone."""
    if not is_below_images(read_json(base / "config.json")):
        return ""
    config = _whole_config(base)
    theirs: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if theirs is not None and theirs.config_class is type(config.text_config):
        return ""
    in_files = _prefix_in(base) if has_weights(base) else ""
    return in_files if in_files == "model.text_model." else PREFIXES[0]


def _joined(parts: list[Tensor], place: FileTensor | None) -> Tensor:
    """The tensor that files hold, of all parameters that are parts of it."""
    if place is None:
        return parts[0]
    whole = parts[0]
    if len(parts) > 1:
        dim = place.dim
        whole = (
            torch.cat(parts, dim) if place.step == 1 else torch.stack(parts, dim + 1).flatten(dim, dim + 1)
        )
    return whole.mT.contiguous() if place.transposed else whole


def _files(layout: Layout, itemsize: int, shard_bytes: int, alone: str) -> dict[str, str]:
    """Parameter name -> file name, in order. A file exceeds `shard_bytes` only if one parameter alone does.

    alone  the name of the only file; empty: it is numbered like others
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for _, together in groupby(layout.parameters, lambda spec: tuple(spec.stored)):
        names = {spec.name: spec.size * itemsize for spec in together}
        size = sum(names.values())
        if filled and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1] += names
        filled += size
    if len(shards) == 1 and alone:
        return dict.fromkeys(shards[0], alone)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    return {name: file for file, shard in zip(files, shards, strict=True) for name in shard}


def _write_config(folder: Path, source: Path, layout: Layout, dtype: torch.dtype, whole: bool) -> None:
    """whole  of all that `source` holds, also where that is more than a language model"""
    config = _whole_config(base_of(source)) if whole else load_config(source)
    config.dtype = dtype
    family = config.model_type
    if whole and not layout.shape.tied:  # whatever the source says: its files have a head of their own
        config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    if layout.head == "scalar":
        config.num_labels = 1
        # transformers has no such class of some families.
        named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family].replace("ForCausalLM", "ForSequenceClassification")
        config.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(family, named)]
    elif not whole:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    config.save_pretrained(folder)
    of_base = base_of(source) / VERDICT
    if of_base.is_file():
        verdict = read_json(of_base)
        if verdict.get("config") == config_digest(source):
            verdict["config"] = config_digest(folder)  # of the same model, written anew
            (folder / VERDICT).write_text(json.dumps(verdict, indent=2), encoding="utf-8")


def _write_adapter_config(folder: Path, source: Path, layout: Layout, below: str) -> None:
    """peft's description of adapters; `source` is the model that they belong to.

    below  how the names of the language model's modules begin there; empty: it is all there is
    """
    head, lora = layout.head, layout.lora
    assert lora is not None
    targets: Any = list(lora.targets)
    if below:  # what sees or hears has modules of these names too
        targets = rf"{re.escape(below)}.*\.({'|'.join(lora.targets)})"
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": str(source),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "modules_to_save": None if head == "lm" else ["score"],
        "bias": "none",
        "fan_in_fan_out": FAMILIES.get(layout.shape.family, Family()).transposed,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2), encoding="utf-8")
