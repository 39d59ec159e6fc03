"""Tools, a reward and a model of tests' runs, by themselves: what imports them in a run loads no torch.

The model is random. Some of its tokens are whole calls of `add`, and it draws them often.
"""

import json
import sys
import time
from itertools import repeat
from pathlib import Path
from typing import Any

CALLS = [
    json.dumps({"name": name, "arguments": arguments})
    for name, arguments in (
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": 30, "b": 4}),
        ("add", {"a": 0, "b": 0}),
        ("add", {"a": 1}),
        ("sub", {"a": 1}),
    )
]
"""Two that are answered, one whose tool fails, and two that are malformed."""
TEMPLATE = (
    "{{ tools | map(attribute='function.name') | join(',') if tools }}{% set ns = namespace(called=false) %}"
    "{% for m in messages %}{% if m.role != 'tool' %}{% set ns.called = m.tool_calls is defined %}"
    "{% elif not ns.called %}{{ raise_exception('a tool answers, but was not called') }}{% endif %}"
    "{% if m.role == 'tool' %}<r>{{ m.content }}</r>{% else %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    if a == b:
        raise ValueError(f"{a} twice")
    return a + b


def answer_reward(
    completions: list[Any],
    tool_calls: list[int],
    malformed_calls: list[int],
    failed_calls: list[int],
    **columns: Any,
) -> list[float]:
    """A reward that depends on the last turn and on the calls."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [
        len(text) / 16 + calls - 0.5 * malformed - 0.25 * failed
        for text, calls, malformed, failed in zip(
            texts, tool_calls, malformed_calls, failed_calls, strict=True
        )
    ]


def write_tool_model(folder: Path, seed: int = 1, head: str = "lm") -> Path:
    """A model folder whose tokenizer has calls, and a chat template that offers tools."""
    import torch
    from tokenizers import AddedToken, Tokenizer
    from transformers import AutoModelForCausalLM

    from tests.tiny_runs import write_model

    write_model(folder, head=head, seed=seed, vocab_size=264, max_position_embeddings=512)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(f"<tool_call>{call}</tool_call>", normalized=False) for call in CALLS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    if head == "lm":
        model = AutoModelForCausalLM.from_pretrained(folder)
        rows = [tokenizer.token_to_id("<eos>"), *range(257, 257 + len(CALLS))]
        with torch.no_grad():
            model.get_input_embeddings().weight[rows] *= 2.5
        model.save_pretrained(folder)
    return folder


def write_conversations(path: Path, n: int = 64) -> Path:
    """Prompts as messages, of different lengths."""
    rows = [{"prompt": [{"role": "user", "content": f"{i:x} says " + "ab" * (i % 5)}]} for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def never(a: int) -> int:
    """Never answer.

    Args:
        a: Anything.
    """
    time.sleep(10_000 if a else 0)
    return a


def count(a: int) -> int:
    """Count without end, in compiled code.

    Args:
        a: Anything.
    """
    return sum(repeat(1)) if a else 0


class Notes:
    """What a response writes down."""

    def __init__(self, first: str) -> None:
        self._texts = [first]

    def note(self, text: str) -> None:
        """Write a note.

        Args:
            text: The note.
        """
        self._texts.append(text)

    def read(self) -> str:
        """Read all notes."""
        return " ".join(self._texts)

    @staticmethod
    def longer(text: str, other: str) -> bool:
        """Compare two notes.

        Args:
            text: One.
            other: The other.
        """
        return len(text) > len(other)

    @classmethod
    def kind(cls, text: str) -> str:
        """Say what a note is.

        Args:
            text: The note.
        """
        return f"{cls.__name__}: {text}"


def long(a: int) -> str:
    """Answer with ten million characters.

    Args:
        a: Anything.
    """
    return 10_000_000 * "x"


async def key_of(a: int, *, key: str) -> dict[str, Any]:
    """Answer with what it was given.

    Args:
        a: Anything.
        key: A secret.
    """
    return {"a": a, "key": key}


def spill(a: int, *, key: str) -> None:
    """Fail, and say a secret where the sentence is cut.

    Args:
        a: Characters before it.
        key: A secret.
    """
    raise ValueError(a * "x" + key)


def leave(a: int) -> None:
    """End the process.

    Args:
        a: Anything.
    """
    sys.exit(a)


def total(*numbers: int) -> int:
    """Add numbers.

    Args:
        numbers: Any.
    """
    return sum(numbers)


def silent(a: int) -> int:
    return a


def untyped(a) -> int:
    """Do nothing.

    Args:
        a: Anything.
    """
    return a
