"""Several sources in one stream of samples. Torch-free.

The first n samples hold floor(n * w_0 / (w_0 + w_1 + ...)) samples of source 0; the others share what is left in the
same way. So every stretch of the stream has the weights' shares, to within a few samples, and a sample's source and
place in it are a function of its number alone. Each source is passed through in epochs of its own.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate
from math import floor


def place_of(sample: int, weights: Sequence[float]) -> tuple[int, int]:
    """The source of a sample, and how many samples before it are of that source.

    weights  of the sources, above 0
    """
    shares = _shares(tuple(weights))
    for source, share in enumerate(shares):
        before = floor(sample * share)
        if floor((sample + 1) * share) > before:
            return source, before
        sample -= before
    return len(shares), sample


@cache
def _shares(weights: tuple[float, ...]) -> list[Fraction]:
    """Of each source but the last: its part of what it and the sources behind it have together."""
    exact = [Fraction(weight) for weight in weights]
    left = list(accumulate(reversed(exact)))[::-1]
    return [own / both for own, both in zip(exact[:-1], left, strict=False)]
