"""A series of tiny runs whose reward counts the letter a. Import as `tests.tiny_series`."""

import json
from pathlib import Path
from typing import Any

from tests.tiny_runs import write_model, write_prompts

REWARD = "def letters(completions):\n    return [float(c.count('a')) for c in completions]\n"


def write_rows(path: Path, letter: str, numbers: range) -> None:
    """Append rows whose completion is one letter."""
    rows = [{"prompt": f"{i:x} says ", "completion": letter * 4} for i in numbers]
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def series_document(folder: Path) -> dict[str, Any]:
    """A series by SFT with its model, its 16 rows of the letter b in rows.jsonl, and its held-out rows."""
    write_model(folder / "base")
    write_prompts(folder / "prompts.jsonl", 32)
    (folder / "judge.py").write_text(REWARD)
    write_rows(folder / "rows.jsonl", "b", range(16))
    return {
        "type": "series",
        "name": "weekly",
        "output_dir": str(folder / "runs"),
        "cluster": {"devices_per_host": 1},
        "margin": 0.5,
        "training": {
            "type": "sft",
            "models": {"actor": str(folder / "base")},
            "data": {"train": str(folder / "rows.jsonl")},
            "batch_size": 8,
            "total_iterations": 6,
            "optimizer": {"learning_rate": 1e-2},
        },
        "evaluation": {
            "type": "evaluate",
            "data": {"train": str(folder / "prompts.jsonl")},
            "sampling": {"max_completion_length": 4},
            "rewards": [{"function": f"{folder / 'judge.py'}:letters"}],
            "batch_size": 16,
        },
    }
