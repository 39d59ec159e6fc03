"""Scripts and notebooks that call `train`, as a user writes them, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.flows.dask_commands import ROOT
from tests.tiny_runs import write_model, write_prompts

CONFIG = """dict(models={"actor": "actor"}, data={"train": "prompts.jsonl"}, num_generations=4, batch_size=8,
    sampling={"max_completion_length": 8}, snapshot_every=1, cluster={"devices_per_host": 1}"""
"""The beginning of a run's settings, for a script that lies beside its files."""


def files_in(folder: Path) -> Path:
    """A tiny model and prompts in a folder."""
    write_model(folder / "actor")
    write_prompts(folder / "prompts.jsonl", 16)
    return folder


def environment(prefect: Any) -> dict[str, str]:
    """Of a process that reports to a server."""
    return {**os.environ, **prefect.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_script(folder: Path, text: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder to its end."""
    (folder / "script.py").write_text(text.replace("CONFIG", CONFIG))
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=550)
