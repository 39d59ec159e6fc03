"""What one iteration processes: sequence lengths, passes over the data, and number formats."""

from functools import cached_property
from typing import Self

from pydantic import Field, model_validator

from rlhf_tasks.parallel.layout.shape import Head, ModelShape
from rlhf_tasks.spec import Frozen, ModelFunctionCall


class Lengths(Frozen):
    """A distribution of lengths in tokens: (length, share of the sequences) pairs; shares add up to 1."""

    points: tuple[tuple[int, float], ...] = Field(min_length=1)

    @staticmethod
    def fixed(tokens: int) -> "Lengths":
        """Every sequence has the same length."""
        return Lengths(points=((tokens, 1.0),))

    @model_validator(mode="after")
    def _is_distribution(self) -> Self:
        if any(tokens < 1 or share < 0 for tokens, share in self.points):
            raise ValueError("lengths: every length is at least 1 token, and no share is negative.")
        total = sum(share for _, share in self.points)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"lengths: the shares add up to {total:g}, not to 1.")
        return self

    @cached_property
    def mean(self) -> float:
        return sum(tokens * share for tokens, share in self.points)

    @property
    def longest(self) -> int:
        return max(tokens for tokens, share in self.points if share > 0)

    def spans(self) -> list[tuple[int, int, float]]:
        """(first step, last step, share of the sequences that still run) with a constant share inside."""
        spans, start, running = [], 1, 1.0
        for tokens, share in sorted(self.points):
            if share > 0:
                spans.append((start, tokens, running))
                start, running = tokens + 1, running - share
        return spans


class Workload(Frozen):
    """Sizes of an iteration beside those in the graph.

    prompt_tokens    tokens of a prompt
    new_tokens       distribution of the tokens that are generated
    max_new_tokens   what the KV cache is laid out for; default: the longest of new_tokens
    epochs           passes of a train_step over the batch
    itemsize         bytes of a parameter or activation
    recompute        activations are recomputed in the backward pass
    reward_s         seconds of the Python rewards for a sequence
    """

    prompt_tokens: int = Field(gt=0)
    new_tokens: Lengths
    max_new_tokens: int | None = Field(None, gt=0)
    epochs: int = Field(1, gt=0)
    itemsize: int = Field(2, gt=0)
    recompute: bool = True
    reward_s: float = Field(0.0, ge=0)

    @property
    def mean_tokens(self) -> float:
        """Tokens of a whole sequence on average."""
        return self.prompt_tokens + self.new_tokens.mean

    @property
    def cache_tokens(self) -> int:
        """Tokens per sequence that the KV cache has room for."""
        return self.prompt_tokens + (self.max_new_tokens or self.new_tokens.longest)


def fullest_share(call: ModelFunctionCall, dp: int) -> int:
    """Sequences of a call's (mini-)batch that a dp rank has at most, dealt by count. It cuts them into no more
    micro-batches than there are."""
    fullest_batch = -(-call.n_seqs // call.mini_batches)
    return -(-fullest_batch // dp)


class RoleModel(Frozen):
    """The model behind a role."""

    shape: ModelShape
    head: Head = "lm"
