"""Finds the weight files of a Hugging Face folder and checks them against the model. Loads no torch.

A folder may hold a LoRA adapter in peft's format: it means its base model with the adapter merged in.
"""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prefect_rlhf.rlhf_tasks.parallel.layout.below_images import (
    TIED_KEYS,
    is_below_images,
    language_config,
    names_in_files,
    own_name,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.families import FAMILIES
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape, ParameterSpec
from prefect_rlhf.rlhf_tasks.system.reading import (
    MOST_JSON_BYTES,
    ConfigError,
    one_line,
    read_bytes,
    read_json,
    reading,
    shown,
)
from prefect_rlhf.rlhf_tasks.system.tensor_files import LENGTH_BYTES, header_of, same_tensor

ADAPTER = "adapter_model.safetensors"  # peft's
ADAPTER_CONFIG = "adapter_config.json"
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


def missing_base(folder: str | Path) -> str | None:
    """NAME or NAME@REVISION of the base model that a folder's adapter names, where no folder here has that name; None
    of any other folder. Raises ConfigError for an adapter_config.json that cannot be read."""
    path = Path(folder, ADAPTER_CONFIG)
    if not path.is_file() or Path(folder, "config.json").is_file():
        return None
    config = read_json(path)
    named, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(named, str) or not named or _named_folder(path, named) is not None:
        return None
    return f"{named}@{revision}" if isinstance(revision, str) and revision else named


def _base(path: Path, config: Mapping[str, Any]) -> Path:
    """The base model's folder."""
    named = config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ConfigError(
            f"{path}: base_model_name_or_path is {shown(named)}. Write the base model's folder there."
        )
    base = _named_folder(path, named)
    if base is None:
        raise ConfigError(
            f"{path}: the base model {shown(named)} is no model folder"
            f"{'' if Path(named).is_absolute() else ' in the adapter folder or one above it'}. Download it, or write "
            "its absolute path to base_model_name_or_path."
        )
    if not (base / "config.json").is_file():
        raise ConfigError(
            f"{path}: its base model {shown(str(base))} is an adapter itself. Merge that one first, with "
            "prefect-rlhf export --merged or peft's merge_and_unload."
        )
    return base


def _named_folder(path: Path, named: str) -> Path | None:
    """The model folder that an adapter names. A relative path is looked for in the adapter's folder and in those
    above it, so that it means the same on every host, whatever the current folder is."""
    with reading(path, "base_model_name_or_path is no path"):
        places = [Path(named)] if Path(named).is_absolute() else [p / named for p in path.absolute().parents]
        return next(filter(is_model_folder, places), None)


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

VERDICT = "prefect-rlhf-doctor.json"
"""Beside the weights of a model of an untested family: what the doctor has found, which exports take along."""

ORIGIN = "origin.json"
"""Beside the weights of a model that a run has made: which run, and after how many iterations."""

BESIDE_WEIGHTS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
)
"""Files of a folder that belong to the model but do not change in training."""

NEW_HEAD = "score.weight"
"""The parameter that a folder of a language model lacks when it becomes a critic or a reward model."""

_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes in which a parameter may be stored. Others are quantised and would be read as if they were not."""

_IDLE = re.compile(
    r"lm_head\.weight|score\.weight|.*rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias|mtp\..*"
)
"""Tensors that a folder may have beyond the model's: the other head, tied embeddings once more, old angles, GPT-2's
masks, heads that predict further tokens (which neither train nor are exported)."""

SAVE_ANEW = "Save the model again with save_pretrained."


class LowRank(NamedTuple):
    """What an adapter adds to a tensor: scale * B A; A [rank, in] and B [out, rank] are tensors of a file.

    transposed  the tensor is stored as [in, out]
    """

    file: Path
    a: str
    b: str
    scale: float
    transposed: bool


class InFile(NamedTuple):
    """A tensor of a file, and its name there; with what an adapter adds to it, where the folder is an adapter's.

    scales  of a tensor in MXFP4, whose blocks these are: the file and the name of its scales
    expert  of a tensor that is a part of one for all experts of a layer: which
    """

    file: Path
    name: str
    added: LowRank | None = None
    scales: tuple[Path, str] | None = None
    expert: "OfExpert | None" = None


class OfExpert(NamedTuple):
    """The rows `first` to `first + rows` of an expert's matrix, in a tensor [experts, rows of one, columns]."""

    number: int
    first: int
    rows: int


BLOCK = 32
"""Elements of a block, which have one scale, in MXFP4 (Open Compute Project, Microscaling Formats, version 1.0)."""

_BLOCKS, _SCALES = "_blocks", "_scales"
"""The ends of the names of the two tensors in files in place of one [..., in, out] in MXFP4: uint8 [..., out, blocks,
bytes], each of which holds two elements, the first one in its low half, and uint8 [..., out, blocks]."""


def weight_files(folder: Path, specs: Collection[ParameterSpec], needs_head: bool) -> dict[str, InFile]:
    """Name of a tensor -> where it is, for all that the parameters in `specs` are made of.

    Reads only the headers of the files. A folder of a model without its head has names without their first part, as
    in `wte.weight` for `transformer.wte.weight`.

    needs_head  False: a scalar head may be missing, and is then left out
    Raises ConfigError, naming file and parameter, when a file is missing, damaged, cut off or quantised, and when the
    folder lacks a parameter or has one of another shape.
    """
    adapter = adapter_of(folder)
    if adapter is not None:
        return _through_adapter(adapter, specs, needs_head)
    wanted = {name: shape for spec in specs for name, shape in spec.stored.items()}
    files = _files_of(folder)
    theirs = {name: _name_in_files(name, files) for name in wanted}
    together, of_all = _experts_together(specs, files)
    missing = [name for name in wanted if theirs[name] not in files and name not in together]
    if needs_head and NEW_HEAD in missing:
        raise ConfigError(
            f"Model folder {str(folder)!r} has no {NEW_HEAD}: it is a language model, which gives no scores. Name a "
            "trained reward model."
        )
    if set(missing) - {NEW_HEAD}:
        raise ConfigError(
            f"Model folder {str(folder)!r} lacks {missing[0]} (and {len(missing) - 1} more parameters). "
            "Save the whole model with save_pretrained."
        )
    places = {name: InFile(files[there], there) for name, there in theirs.items() if there in files}
    quantised, plain = (defaultdict[Path, dict[str, tuple[int, ...]]](dict) for _ in range(2))
    for file, shapes in of_all.items():
        plain[file] |= shapes
    for name, its in places.items():
        if not its.name.endswith(_BLOCKS):
            plain[its.file][its.name] = wanted[name]
            continue
        (*_, into, out), scales = wanted[name], f"{name}{_SCALES}"
        if scales not in files:
            raise ConfigError(f"Model folder {str(folder)!r} lacks {scales}, the scales of {its.name}.")
        places[name] = its._replace(scales=(files[scales], scales))
        blocks = (*wanted[name][:-2], out, into // BLOCK)
        quantised[its.file][its.name] = (*blocks, BLOCK // 2)
        quantised[files[scales]][scales] = blocks
    for file, shapes in plain.items():
        _check_shapes(file, shapes)
    for file, shapes in quantised.items():
        _check_shapes(file, shapes, dtypes=("U8",))
    return places | together


def _name_in_files(name: str, files: Collection[str]) -> str:
    """What a tensor is called in a folder: its blocks in MXFP4 stand for it."""
    names = [form for each in names_in_files(name) for form in (each, f"{each}{_BLOCKS}")]
    names.append(name.partition(".")[2])
    return next((each for each in names if each in files), name)


_TOGETHER = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_PairOfMaps = tuple[dict[str, InFile], dict[Path, dict[str, tuple[int, ...]]]]


def _experts_together(specs: Collection[ParameterSpec], files: Mapping[str, Path]) -> _PairOfMaps:
    """Tensors of experts in files that have one for all experts of a layer, as published Qwen3.5-MoE: where each is,
    and the shapes of those tensors by file. Gate and up stand in one, the gate's rows of an expert first."""
    places: dict[str, InFile] = {}
    shapes = defaultdict[Path, dict[str, tuple[int, ...]]](dict)
    for spec in specs:
        block, _, part = (spec.stacked or "").partition(".{}.")
        if part not in _TOGETHER or _name_in_files(str(spec.stacked).format(0), files) in files:
            continue
        whole = _name_in_files(f"{block}.{'down' if part == _TOGETHER[2] else 'gate_up'}_proj", files)
        if whole not in files:
            continue
        count, rows, columns = spec.shape
        parts = 1 if part == _TOGETHER[2] else 2
        first = rows if part == _TOGETHER[1] else 0
        shapes[files[whole]][whole] = (count, parts * rows, columns)
        for number, name in enumerate(spec.stored):
            places[name] = InFile(files[whole], whole, expert=OfExpert(number, first, rows))
    return places, shapes


def _through_adapter(
    adapter: AdapterFolder, specs: Collection[ParameterSpec], needs_head: bool
) -> dict[str, InFile]:
    """The base model's tensors, each with what the adapter adds to it; a scalar head is the adapter's own."""
    file = adapter.folder / ADAPTER
    if not file.is_file():
        raise ConfigError(f"Model folder {str(adapter.folder)!r} has no {ADAPTER}. {SAVE_ANEW}")
    header, shapes = header_of(file), dict[str, tuple[int, ...]]()
    own_head = f"{WRAPPED}{NEW_HEAD}"
    held = weight_files(adapter.base, specs, needs_head and own_head not in header)
    for spec in specs:
        for name, shape in spec.stored.items():
            halves = [
                [f"{WRAPPED}{each.removesuffix('.weight')}.lora_{half}.weight" for half in "AB"]
                for each in names_in_files(name)
            ]
            a, b = next((each for each in halves if not header.keys().isdisjoint(each)), halves[0])
            if name == NEW_HEAD and own_head in header:
                held[name], shapes[own_head] = InFile(file, own_head), shape
            elif a in header or b in header:
                transposed = spec.packed is not None and spec.packed.transposed
                outputs, inputs = reversed(shape) if transposed else shape
                shapes |= {a: (adapter.rank, inputs), b: (outputs, adapter.rank)}
                held[name] = held[name]._replace(added=LowRank(file, a, b, adapter.scale, transposed))
    lacking = [name for name in shapes if name not in header]
    if lacking:
        raise ConfigError(f"{file} lacks {lacking[0]}, the other half of an adapter. {SAVE_ANEW}")
    _check_shapes(file, shapes, says=f"config.json of {adapter.base} and r={adapter.rank} say")
    return held


def _check_adapter(adapter: AdapterFolder, held: Mapping[str, InFile]) -> None:
    """Raises ConfigError for a tensor of an adapter that belongs to nothing of the model, and for one that is not
    finite: adapters are small, so all of it is read."""
    file = adapter.folder / ADAPTER
    known = {f"{WRAPPED}{NEW_HEAD}"} | {
        name for its in held.values() if its.added is not None for name in (its.added.a, its.added.b)
    }
    header = header_of(file)
    odd = [name for name in header if name not in known]
    if odd:
        raise ConfigError(
            f"{file} has {shown(odd[0])} (and {len(odd) - 1} more tensors), which belongs to no linear layer of "
            f"{adapter.base}. Merge the adapter with peft's merge_and_unload."
        )
    if not known & header.keys():
        raise ConfigError(f"{file} has no tensors. {SAVE_ANEW}")
    with file.open("rb") as opened:
        begin = LENGTH_BYTES + int.from_bytes(opened.read(LENGTH_BYTES), "little")
        for name, tensor in header.items():
            first, end = tensor["data_offsets"]
            opened.seek(begin + first)
            if not _finite(opened.read(end - first), tensor["dtype"]):
                raise ConfigError(
                    f"{file}: {shown(name)} has values that are not finite. Name an earlier one."
                )


def _finite(values: bytes, dtype: str) -> bool:
    """Whether all floats in a tensor's bytes are finite: none has all bits of its exponent set."""
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
    if dtype == "BF16":
        return bool(((np.frombuffer(values, "<u2") & 0x7F80) != 0x7F80).all())
    return dtype not in kinds or bool(np.isfinite(np.frombuffer(values, kinds[dtype])).all())


def check_weights(folder: Path, specs: Collection[ParameterSpec], needs_head: bool) -> None:
    """Check all weights of a folder against all parameters of a model.

    Raises ConfigError for what `weight_files` refuses, and for a tensor that the model does not have: without it, it
    would be another one.
    """
    held = weight_files(folder, specs, needs_head)
    adapter = adapter_of(folder)
    if adapter is not None:
        _check_adapter(adapter, held)
        check_weights(adapter.base, specs, needs_head=False)
        return
    names = {its.name for its in held.values()} | {its.scales[1] for its in held.values() if its.scales}
    idle = _idle_layers(folder, specs)
    below = is_below_images(_config_of(folder))
    extra = [
        name
        for name, file in _files_of(folder).items()
        if name not in names
        and not (below and own_name(name) is None)
        and not _IDLE.fullmatch(own_name(name) or name)
        and not name.startswith(idle)
        and 0 not in header_of(file).get(name, {}).get("shape", ())  # it has no elements
    ]
    if extra:
        raise ConfigError(
            f"Model folder {str(folder)!r} has {shown(extra[0])} (and {len(extra) - 1} more tensors), which the "
            f"model that its config.json describes has not. Correct config.json, or remove them from the weights."
        )


def _config_of(folder: Path) -> Mapping[str, Any]:
    """A folder's config.json; nothing where there is none."""
    return read_json(folder / "config.json") if (folder / "config.json").is_file() else {}


def _idle_layers(folder: Path, specs: Collection[ParameterSpec]) -> tuple[str, ...]:
    """How the names begin of layers after the last one that predict further tokens (num_nextn_predict_layers), and of
    keys and values in layers that share those of others (num_kv_shared_layers). They take no part in a model's
    logits, and transformers reads none of them."""
    layers = max((spec.layer for spec in specs if spec.layer is not None), default=-1) + 1
    config = language_config(_config_of(folder))
    further = config.get("num_nextn_predict_layers")
    count = further if type(further) is int and 0 <= further <= layers else 0
    shared = config.get("num_kv_shared_layers")
    sharing = range(layers - shared, layers) if type(shared) is int and 0 <= shared <= layers else ()
    begins = [f"model.layers.{layers + i}." for i in range(count)]
    for part in ("k_proj", "v_proj", "k_norm", "v_norm"):
        begins += [f"model.layers.{i}.self_attn.{part}." for i in sharing]
    return tuple(name for begin in begins for name in names_in_files(begin))


def beside_weights(folder: Path) -> list[Path]:
    """The files of a model folder that exports take along; of an adapter's base first, so that its own replace them.

    Raises ConfigError where one of them, or another file that exports read, is a link out of the folder: an export
    would hold whatever it points to. In the Hub's cache (`models--X/snapshots/REVISION`) links point to its `blobs`.
    """
    folders = dict.fromkeys((base_of(folder), folder))
    for each in folders:
        refuse_links_out(each)
    return [
        path
        for each in folders
        for pattern in BESIDE_WEIGHTS
        for path in each.glob(pattern)
        if path.is_file()
    ]


def refuse_links_out(folder: Path) -> None:
    """Raises ConfigError where a file of one folder that `beside_weights` names is a link out of it."""
    home = folder.resolve()
    cache = next((place.parent for place in home.parents if place.name == "snapshots"), None)
    stores = () if cache is None else _stores(cache)
    described = (*BESIDE_WEIGHTS, "config.json", ADAPTER_CONFIG, VERDICT)
    for path in (path for pattern in described for path in folder.glob(pattern)):
        with reading(path, "cannot be read"):
            target = path.resolve()
        if path.is_symlink() and not any(target.is_relative_to(place) for place in (home, *stores)):
            raise ConfigError(
                f"Model folder {str(folder)!r}: {path.name} is a link to {target}, outside of it, whose content "
                "would be in the exported model. Copy the file there in place of the link."
            )


def _stores(cache: Path) -> list[Path]:
    """Where the Hub's cache has the files of a repository (`models--X`): its own blobs, and those that repositories
    share, which the Hub's client marks."""
    shared = cache.parent / "blobs"
    marked = (shared / ".huggingface-shared-blobs").is_file()
    return [(cache / "blobs").resolve(), *([shared.resolve()] if marked else [])]


def config_digest(folder: Path) -> str:
    """SHA-256 of a folder's config.json, or of an adapter's base: what a verdict (`VERDICT`) is about."""
    folder = base_of(folder)
    with reading(folder / "config.json", "not readable"):
        return hashlib.sha256(read_bytes(folder / "config.json", MOST_JSON_BYTES)).hexdigest()


def read_shape(folder: str | Path) -> ModelShape:
    """A model's sizes, from `config.json` of its folder, or of an adapter's base; of a family that is not tested also
    from its weights' names.

    Raises ConfigError naming the folder when the config is not readable or not that of a decoder that can be split.
    """
    whole = base_of(folder)
    path = whole / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"Model folder {str(folder)!r} has no config.json. Name a folder in Hugging Face's format."
        )
    config = read_json(path)
    below, language = is_below_images(config), language_config(config)
    tested = language.get("model_type") in list(FAMILIES)
    weights = None
    if has_weights(whole) and (below or not tested):
        weights = {own_name(name) or name: shape for name, shape in tensor_shapes(whole).items()}
        if below and _is_tied(whole, language):
            language = {**language, "tie_word_embeddings": True}
            weights.pop(_HEAD, None)
        elif below:
            language = {**language, "tie_word_embeddings": False}
    elif below and (whole / INDEX).is_file():  # all that is here of a model on the Hub before its weights are
        language = {**language, "tie_word_embeddings": _head_in(_names_in_index(whole)) is None}
    return ModelShape.from_config(language, str(folder), None if tested else weights)


def _is_tied(folder: Path, language: Mapping[str, Any]) -> bool:
    """Whether embeddings are tied in a model of which the language model is a part, as transformers has it: its files
    have no head, or its config ties it and the files have the embeddings once more in its place."""
    files = _files_of(folder)
    head = _head_in(files)
    if head is None:
        return True
    family = FAMILIES.get(str(language.get("model_type")))
    said = [language[key] for key in TIED_KEYS if isinstance(language.get(key), bool)]
    if not (said[0] if said else family is not None and family.tied):
        return False
    embeddings = _name_in_files(_EMBEDDINGS, files)
    return embeddings in files and same_tensor((files[head], head), (files[embeddings], embeddings))


def _head_in(names: Collection[str]) -> str | None:
    return next((name for name in names_in_files(_HEAD) if name in names), None)


def has_weights(folder: Path) -> bool:
    """Whether a folder has weight files, sound or not: all that its index names, if it has one."""
    if not (folder / INDEX).is_file():
        return (folder / SINGLE).is_file()
    names: dict[str, Any] | None = read_json(folder / INDEX, remedy=SAVE_ANEW).get("weight_map")
    files = {str(file) for file in names.values()} if isinstance(names, dict) else set[str]()
    return all((folder / file).is_file() for file in files)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a folder's weight files. Raises ConfigError for damaged files."""
    files = _files_of(folder)
    headers = {file: header_of(file) for file in set(files.values())}
    return {
        name: tuple(headers[file][name]["shape"]) for name, file in files.items() if name in headers[file]
    }


def other_tensors(folder: Path, specs: Collection[ParameterSpec]) -> dict[str, InFile]:
    """Where the tensors of a folder are that do not belong to its language model, but to one of images or sound above
    it. None, where it holds a language model alone, or no weights.

    specs  the parameters of the language model
    """
    if not is_below_images(_config_of(folder)) or not has_weights(folder):
        return {}
    trained = {name for spec in specs for stored in spec.stored for name in names_in_files(stored)}
    return {
        name: InFile(file, name)
        for name, file in _files_of(folder).items()
        if name not in trained and own_name(name) is None and not _IDLE.fullmatch(name)
    }


def _files_of(folder: Path) -> dict[str, Path]:
    """Parameter name -> its file, from the index, or from the header of the only file."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        names = _names_in_index(folder)
        elsewhere = next((file for file in names.values() if Path(file).name != file), None)
        if elsewhere is not None:
            raise ConfigError(
                f"{index} names {shown(elsewhere)}, which is not a plain file name. {SAVE_ANEW}"
            )
        absent = sorted(set(names.values()) - {path.name for path in folder.iterdir() if path.is_file()})
        if absent:
            raise ConfigError(f"{index} names files that are not there: {one_line(', '.join(absent[:4]))}.")
        return {name: folder / file for name, file in names.items()}
    if not single.is_file():
        raise ConfigError(
            f"Model folder {str(folder)!r} has neither {SINGLE} nor {INDEX}. "
            "Save the model with save_pretrained, which writes safetensors."
        )
    return dict.fromkeys(header_of(single), single)


def _names_in_index(folder: Path) -> dict[str, str]:
    """Name of a tensor -> its file's, as the index says."""
    names: dict[Any, Any] | None = read_json(folder / INDEX, remedy=SAVE_ANEW).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ConfigError(f"{folder / INDEX} has no weight_map {{parameter: file}}. {SAVE_ANEW}")
    return names


def _check_shapes(
    file: Path,
    wanted: Mapping[str, tuple[int, ...]],
    says: str = "config.json says",
    dtypes: Collection[str] = FLOATS,
) -> None:
    header = header_of(file)
    for name, shape in wanted.items():
        if name not in header:
            raise ConfigError(f"{file} lacks {name}, which {INDEX} says is in it.")
        if header[name]["shape"] != list(shape):
            raise ConfigError(
                f"{file}: {name} has shape {shown(header[name]['shape'])}; {says} {list(shape)}."
            )
        if header[name]["dtype"] not in dtypes:
            raise ConfigError(
                f"{file}: {name} has dtype {header[name]['dtype']}, not one of {', '.join(dtypes)}. Save the model "
                "unquantised."
            )
