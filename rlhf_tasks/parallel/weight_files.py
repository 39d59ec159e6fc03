"""Which files of a Hugging Face folder hold the weights, and whether they are the model's. Loads no torch."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_tasks.parallel.shape import ParameterSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

NEW_HEAD = "score.weight"
"""The parameter that a folder of a language model lacks when it becomes a critic or a reward model."""

LENGTH_BYTES = 8  # of the number before a safetensors file's header: the header's bytes, little-endian


def weight_files(folder: Path, specs: Iterable[ParameterSpec], needs_head: bool) -> dict[str, Path]:
    """Parameter name -> the file that holds it, for those of `specs` that the folder has.

    Of the files only the headers are read.
    needs_head  False: a scalar head may be missing
    Raises ValueError, naming file and parameter, when a file is missing, damaged or cut off, and when the folder
    lacks a parameter or has one of another shape.
    """
    wanted = {spec.name: spec.shape for spec in specs}
    files = _files_of(folder)
    missing = [name for name in wanted if name not in files]
    if needs_head and NEW_HEAD in missing:
        raise ValueError(
            f"Model folder {str(folder)!r} has no {NEW_HEAD}: it is a language model, which scores nothing. Name a "
            "trained reward model."
        )
    if set(missing) - {NEW_HEAD}:
        raise ValueError(
            f"Model folder {str(folder)!r} lacks {missing[0]} (and {len(missing) - 1} more parameters). "
            "Save the whole model with save_pretrained."
        )
    held = {name: files[name] for name in wanted if name in files}
    by_file = defaultdict[Path, list[str]](list)
    for name, file in held.items():
        by_file[file].append(name)
    for file, names in by_file.items():
        _check_shapes(file, {name: wanted[name] for name in names})
    return held


def _files_of(folder: Path) -> dict[str, Path]:
    """Parameter name -> its file: as the index says, or by the header of the one file of all."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        names = _weight_map(index)
        absent = sorted(file for file in set(names.values()) if not (folder / file).is_file())
        if absent:
            raise ValueError(f"{index} names files that are not there: {', '.join(absent[:4])}.")
        return {name: folder / file for name, file in names.items()}
    if not single.is_file():
        raise ValueError(
            f"Model folder {str(folder)!r} has neither {SINGLE} nor {INDEX}. "
            "Save the model with save_pretrained, which writes safetensors."
        )
    return dict.fromkeys(_header(single), single)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        stated = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in stated.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{index} has no weight_map {{parameter: file}}. Save the model anew with save_pretrained."
        ) from None


def _check_shapes(file: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    header = _header(file)
    for name, shape in wanted.items():
        if name not in header:
            raise ValueError(f"{file} lacks {name}, which {INDEX} says is in it.")
        if header[name]["shape"] != list(shape):
            raise ValueError(
                f"{file}: {name} has shape {header[name]['shape']}; config.json says {list(shape)}."
            )


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """Parameter name -> dtype, shape and data_offsets, by a safetensors file.

    Raises ValueError when there is no such header, or less data than it says.
    """
    size_bytes = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        text = opened.read(min(length, size_bytes))
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} cannot be read as safetensors. Fetch or save it again.") from None
    whole_bytes = LENGTH_BYTES + length + end
    if size_bytes < whole_bytes:
        raise ValueError(f"{file} is cut off: {size_bytes} of {whole_bytes} bytes. Fetch or save it again.")
    return header
