"""Exports a model as a Hugging Face folder that `from_pretrained`, vLLM and SGLang load; adapters as one for peft."""

import json
import shutil
from collections import defaultdict
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from rlhf_tasks.parallel.layout.adapter_folder import ADAPTER, ADAPTER_CONFIG, WRAPPED, base_of
from rlhf_tasks.parallel.layout.families import FAMILIES, Family
from rlhf_tasks.parallel.layout.slices import Head, Layout
from rlhf_tasks.parallel.layout.weight_files import INDEX, SINGLE, VERDICT, beside_weights, config_digest
from rlhf_tasks.parallel.model.weights import load_config
from rlhf_tasks.system.durable import sync
from rlhf_tasks.system.reading import read_json

SHARD_BYTES = 5 * 1024**3  # the default of transformers for several years


class FolderWriter:
    """Writes a Hugging Face folder parameter by parameter. `close` renames it into place, so it is never incomplete.

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
        self.folder, self.dtype = folder, dtype
        self._unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)
        self._prefix = ""
        if layout.lora is None:
            self._file_of = _files(layout, dtype.itemsize, shard_bytes)
            _write_config(self._unfinished, source, layout.head, dtype)
        else:
            self._file_of, self._prefix = dict.fromkeys(layout.specs, ADAPTER), WRAPPED
            _write_adapter_config(self._unfinished, source, layout)
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
            parts, transposed = defaultdict[str, list[Tensor]](list), set[str]()
            for waiting, tensor in self._waiting.items():
                spec = self._specs[waiting]
                pieces = [tensor] if spec.stacked is None else tensor.unbind()
                for stored, piece in zip(spec.stored, pieces, strict=True):
                    parts[f"{self._prefix}{stored}"].append(piece)
                    if spec.packed is not None and spec.packed.transposed:
                        transposed.add(f"{self._prefix}{stored}")
            tensors = {stored: of[0] if len(of) == 1 else torch.cat(of) for stored, of in parts.items()}
            tensors |= {stored: tensors[stored].T.contiguous() for stored in transposed}
            save_file(tensors, self._unfinished / file, metadata={"format": "pt"})
            self._written |= self._waiting.keys()
            self._waiting = {}

    def close(self) -> None:
        """Write the index, sync all files to disk, then rename the folder to its final name."""
        missing = self._file_of.keys() - self._written
        assert not missing, f"{len(missing)} parameters were not added, such as {min(missing)}"
        if not set(self._file_of.values()) <= {SINGLE, ADAPTER}:
            total = sum((self._unfinished / file).stat().st_size for file in set(self._file_of.values()))
            files = {
                stored: file for name, file in self._file_of.items() for stored in self._specs[name].stored
            }
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (self._unfinished / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        mode = (
            self._unfinished.stat().st_mode & 0o666
        )  # as the umask says; copied files have their source's mode
        for path in self._unfinished.iterdir():
            path.chmod(mode)
            sync(path)
        sync(self._unfinished)
        self._unfinished.rename(self.folder)
        sync(self.folder.parent)


def _files(layout: Layout, itemsize: int, shard_bytes: int) -> dict[str, str]:
    """Parameter name -> file name, in order. A file exceeds `shard_bytes` only if one parameter alone does."""
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
    if len(shards) == 1:
        return dict.fromkeys(shards[0], SINGLE)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    return {name: file for file, shard in zip(files, shards, strict=True) for name in shard}


def _write_config(folder: Path, source: Path, head: Head, dtype: torch.dtype) -> None:
    config = load_config(source)
    config.dtype = dtype
    family = config.model_type
    if head == "scalar":
        config.num_labels = 1
        config.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[family]]
    else:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    config.save_pretrained(folder)
    of_base = base_of(source) / VERDICT
    if of_base.is_file():
        verdict = read_json(of_base)
        if verdict.get("config") == config_digest(source):
            verdict["config"] = config_digest(folder)  # of the same model, written anew
            (folder / VERDICT).write_text(json.dumps(verdict, indent=2), encoding="utf-8")


def _write_adapter_config(folder: Path, source: Path, layout: Layout) -> None:
    """peft's description of adapters; `source` is the model that they belong to."""
    head, lora = layout.head, layout.lora
    assert lora is not None
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": str(source),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "modules_to_save": None if head == "lm" else ["score"],
        "bias": "none",
        "fan_in_fan_out": FAMILIES.get(layout.shape.family, Family()).transposed,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2), encoding="utf-8")
