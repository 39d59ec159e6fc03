"""How much of a call's work happens at a time: what the engine does and the planner prices. Loads no torch."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

PREFILL_TOKENS = 8192
"""Most tokens of a pass over prompts: enough to keep a device busy, and its activations are small beside a model."""

REFILL_SHARE = 8
"""Waiting sequences enter once an eighth of the slots is free: a pass over a prompt takes about as long as a step."""

SAMPLED_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Logits of a rank that tokens are drawn from at a time, by type of device. Their float64 copies stay in a CPU's
cache, and small beside a model on a GPU, which sums up many rows at a time as fast as one."""

LOGITS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Logits of a rank whose log-probabilities are computed at a time, by type of device. On a CPU their 4 MiB of float32
stay in the cache; on a GPU 64 MiB take longer to compute than their kernel to launch."""

LEAST_SHARED = 8
"""Fewest first tokens that neighbouring samples have in common and are computed once. Below, what is saved is less
than what attention spends on keys of another length."""


def runs_of(lengths: Sequence[int]) -> list[tuple[slice, int]]:
    """Runs of rows of a cache that are read apart, with the longest of each: a run begins where no row from there on
    is half as long as the run before."""
    longest = list(accumulate(reversed(lengths), max))[::-1]  # of the rows from each on
    starts = [0]
    for row, length in enumerate(longest):
        if 2 * length < longest[starts[-1]]:
            starts.append(row)
    return [(slice(a, b), longest[a]) for a, b in pairwise([*starts, len(lengths)])]


def rows_at_once(vocab: int, nucleus: bool, device: str) -> int:
    """The rows of logits that tokens are drawn from at a time.

    vocab    tokens of the largest part of the vocabulary
    nucleus  whether top-p is below 1: the search for the nucleus takes three times the memory
    device   its type: cpu or cuda
    """
    return max(1, SAMPLED_AT_ONCE[device] // vocab // (3 if nucleus else 1))


def slots_of(sequences: int, micro_batches: int) -> int:
    """The sequences of a group that are decoded at a time."""
    return -(-sequences // micro_batches)
