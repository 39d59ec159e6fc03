"""Whether one model is better than another, by their scores of the same held-out rows. Pure Python.

The interval is the normal one of the mean of the rows' differences (E. Miller, Adding Error Bars to Evals,
arXiv:2411.00640, on paired differences): its standard error is s / sqrt(n), where s is the standard deviation of the
differences of n rows. Answers to one row are averaged first, for they are not independent. Rows that both models find
hard or easy cancel out, so it is narrower than the intervals of both means.
"""

from collections.abc import Sequence
from math import ceil, sqrt
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

FEWEST_ROWS = 30
"""With fewer rows the mean of their differences is too far from normal."""


class Comparison(NamedTuple):
    """Two models on the same rows.

    rows               number of held-out rows
    candidate          mean score of the new model
    champion           mean score of the present one
    difference         candidate less champion
    low, high          confidence interval of the difference
    confidence, margin  as configured
    """

    rows: int
    candidate: float
    champion: float
    difference: float
    low: float
    high: float
    confidence: float
    margin: float

    @property
    def is_better(self) -> bool:
        """Whether the whole interval lies above the margin."""
        return self.low > self.margin

    @property
    def reason(self) -> str:
        """A sentence with the figures: better, not better, or too few rows to tell."""
        figures = (
            f"mean score {self.candidate:.4g}, the champion's {self.champion:.4g}: on {self.rows} rows the "
            f"difference {self.difference:.4g} has a confidence interval ({self.confidence:.4g}) from {self.low:.4g} "
            f"to {self.high:.4g}"
        )
        if self.is_better:
            return f"{figures}, above the margin {self.margin:g}."
        if self.difference <= self.margin:
            return f"{figures}, not above the margin {self.margin:g}."
        return (
            f"{figures}, too wide to lie above the margin {self.margin:g}: about {self.rows_to_decide} rows would "
            "decide such a difference. Add held-out rows, or lower the margin."
        )

    @property
    def rows_to_decide(self) -> int:
        """Rows on which the same difference with the same spread would be above the margin."""
        half, over = self.high - self.difference, self.difference - self.margin
        return ceil(self.rows * (half / over) ** 2) + 1


def compared(
    candidate: Sequence[float], champion: Sequence[float], confidence: float, margin: float
) -> Comparison:
    """Compare the scores of two models, row by row.

    candidate, champion  [rows], of the same rows in the same order; at least two
    """
    differences = [new - old for new, old in zip(candidate, champion, strict=True)]
    mean = fmean(differences)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * stdev(differences) / sqrt(len(differences))
    return Comparison(
        rows=len(differences),
        candidate=fmean(candidate),
        champion=fmean(champion),
        difference=mean,
        low=mean - half,
        high=mean + half,
        confidence=confidence,
        margin=margin,
    )
