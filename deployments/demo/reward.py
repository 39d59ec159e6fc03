"""The demo's verifier: is the answer exactly right?"""

from collections.abc import Sequence


def exact(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: object
) -> list[float]:
    """1 for an answer that equals the column `answer`, 0 for any other."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]
