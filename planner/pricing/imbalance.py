"""How much more than its share the fullest dp rank gets where sequences differ in length."""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.plan.workload import Lengths
from rlhf_tasks.parallel.layout.transfers import partition

DRAWS, MOST_DRAWN = 32, 1 << 15
"""Batches that are drawn at most, and sequences of all of them together (but always one batch)."""


Points = tuple[tuple[int, float], ...]


class Imbalance(NamedTuple):
    """Tokens of the fullest dp rank, divided by the mean over the dp ranks: 1 where all have the same.

    by_count   where groups are dealt by their number
    by_tokens  where they are dealt by their tokens
    """

    by_count: float
    by_tokens: float


def imbalance(prompts: Lengths, answers: Lengths, n_groups: int, group_size: int, dp: int) -> Imbalance:
    """What is to be expected of a (mini-)batch, for both ways of dealing it: the mean over batches that are drawn and
    dealt as a run deals them (docs/interfaces.md, "who holds which sample").

    prompts, answers  distributions of the tokens of a prompt, and of an answer to it
    n_groups          groups of a mini-batch; each has one prompt and `group_size` answers
    The draws are the same in every process.
    """
    return _drawn_imbalance(prompts.points, answers.points, n_groups, group_size, dp)


@cache
def _drawn_imbalance(prompts: Points, answers: Points, n_groups: int, group_size: int, dp: int) -> Imbalance:
    draw, n_seqs = np.random.default_rng(0), n_groups * group_size
    heaviest = np.zeros(2)
    draws = min(DRAWS, max(1, MOST_DRAWN // n_seqs))
    for _ in range(draws):
        tokens = np.repeat(_drawn(prompts, n_groups, draw), group_size) + _drawn(answers, n_seqs, draw)
        lengths = {sample: int(n) for sample, n in enumerate(tokens)}
        for place, balance in enumerate(("count", "tokens")):
            shares = partition(range(n_seqs), dp, balance, lengths=lengths, group_size=group_size)
            fullest = max(sum(lengths[sample] for sample in share) for share in shares)
            heaviest[place] += fullest * dp / tokens.sum()
    return Imbalance(*(heaviest / draws).tolist())


def _drawn(lengths: Points, n: int, draw: np.random.Generator) -> NDArray[np.int64]:
    """n lengths."""
    tokens, shares = zip(*lengths, strict=True)
    return draw.choice(np.array(tokens), n, p=np.array(shares) / sum(shares))
