"""`train` in a notebook, whose kernel runs an event loop: progress, result, a cell that is changed and run again."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.flows.train.scripts import CONFIG, environment, files_in

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("nbclient") is None or find_spec("ipykernel") is None, reason="no notebooks"
    ),
]
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=500, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""
CELLS = (
    "from prefect_rlhf import GRPOConfig, train\nBONUS = 2.0",
    "async def judged(completions, **_):\n    return [BONUS for _ in completions]",
    f"settings = {CONFIG}, total_iterations=1, rewards=[judged], name='mine')\n"
    "result = train(GRPOConfig(**settings))",
    "result.metrics[-1]['reward']",
    "async def judged(completions, **_):\n    # the same again\n    return [BONUS for _ in completions]",
    "train(GRPOConfig(**settings | {'rewards': [judged]}), resume=result.folder).metrics == result.metrics",
    "BONUS = 3.0\ntry:\n    train(GRPOConfig(**settings | {'rewards': [judged]}), resume=result.folder)\n"
    "except ValueError as refused:\n    print(refused)",
)


def executed(folder: Path, variables: dict[str, str]) -> list[str]:
    """What each cell shows."""
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cells = [cell | {"source": source, "id": f"cell{number}"} for number, source in enumerate(CELLS)]
    notebook = folder / "notebook.ipynb"
    notebook.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    command = [sys.executable, "-c", EXECUTE, str(notebook)]
    ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=550)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    written = json.loads(notebook.read_text())["cells"]
    return ["".join(map(shown, cell["outputs"])) for cell in written]


def shown(output: dict) -> str:
    """The text of an output. Nothing else is shown: no HTML and no tracebacks."""
    return "".join(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"])


def test_a_notebook_trains_with_a_function_of_a_cell(prefect, tmp_path):
    _, _, trained, reward, _, again, refused = executed(files_in(tmp_path), environment(prefect))
    lines = trained.splitlines()
    assert [line for line in lines if line.startswith("mine: iteration 1 of 1, ") and "reward 2.000" in line]
    assert "\x1b" not in trained
    assert reward == "2.0"
    assert again.splitlines()[-1] == "True"
    assert "the function 'judged', was defined anew with other code" in refused
    assert refused.rstrip().endswith("Undo that, or accept it: train(..., accept_changes=True)")
