"""Several sources in one stream of samples. Torch-free.

The first n samples hold floor(n * w_0 / (w_0 + w_1 + ...)) samples of source 0; the others share what is left in the
same way. So every stretch of the stream has the weights' shares, to within a few samples, and a sample's source and
place in it are a function of its number alone. Each source is passed through in epochs of its own.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import floor


def place_of(sample: int, weights: Sequence[float]) -> tuple[int, int]:
    """The source of a sample, and how many samples before it are of that source.

    weights  of the sources, above 0
    """
    left = [Fraction(weight) for weight in weights]
    for source in range(len(left) - 1):
        share = left[source] / sum(left[source:])
        before = floor(sample * share)
        if floor((sample + 1) * share) > before:
            return source, before
        sample -= before
    return len(left) - 1, sample
