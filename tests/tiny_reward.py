"""The reward of tests' runs, by itself: a reward process that imports it loads no torch."""

from typing import Any


def length_reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that depends on text and columns, cheap and deterministic."""
    return [
        len(completion) / 16 - (answer in completion)
        for completion, answer in zip(completions, columns["answer"], strict=True)
    ]
