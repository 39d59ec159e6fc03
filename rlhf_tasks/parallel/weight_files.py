"""Which files of a Hugging Face folder hold the weights: one, or many with an index. Loads no torch."""

import json
from pathlib import Path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> dict[str, Path] | Path:
    """Parameter name -> the file that holds it, as the index says; without an index the one file of all.

    Raises ValueError naming the file that is not there.
    """
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        absent = sorted(file for file in set(weight_map.values()) if not (folder / file).is_file())
        if absent:
            raise ValueError(f"{index} names files that are not there: {', '.join(absent[:4])}.")
        return {name: folder / file for name, file in weight_map.items()}
    if not single.is_file():
        raise ValueError(
            f"Model folder {str(folder)!r} has neither {SINGLE} nor {INDEX}. "
            "Save the model with save_pretrained, which writes safetensors."
        )
    return single
