"""Packages that register algorithms, as pip leaves them. Import as `tests.rlhf_tasks.algorithms.registered`."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefect_rlhf.rlhf_tasks.algorithms.registry import _sources, algorithm

RECORD = """
from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.sft import SFTConfig
from prefect_rlhf.rlhf_tasks.algorithms.sft import DATASET_KEYS, graph
from prefect_rlhf.rlhf_tasks.data.rows import CompletionExample, completion_example
from typing import Literal

class TunedConfig(SFTConfig):
    type: Literal["tuned"] = "tuned"

ALGORITHM = Algorithm(
    config=TunedConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=completion_example,
    fetch=CompletionExample.values,
    functions="tuned.functions",
)
"""
FILES = {"tuned/__init__.py": RECORD, "tuned/functions.py": "import torch\n\ndef actor_train(): ...\n"}
"""A sound package `tuned`, whose algorithm has the same name."""


def install(folder: Path, package: str, entries: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Put a package of a name on a path: its files and its metadata."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    metadata = folder / f"{package.replace('-', '_')}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    lines = "".join(f"{name} = {target}\n" for name, target in entries.items())
    (metadata / "entry_points.txt").write_text(f"[prefect_rlhf.algorithms]\n{lines}")


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Inside, this process finds what was installed in a folder."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        _forget()
        try:
            yield
        finally:
            for name in sys.modules.keys() - before:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                    del sys.modules[name]
            _forget()


def _forget() -> None:
    algorithm.cache_clear()
    _sources.cache_clear()
