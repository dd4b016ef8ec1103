"""Scores of runs that differ in the seed alone: how large they are, and how sure a difference is.

The difference of two encodings is judged over seeds, by Welch's t-test (Welch 1947; variances may
be unequal), not over sentences: resampling a test set, as in
:mod:`~rope_fairseq.evaluation.significance`, says whether two *models* differ, and two seeds of one
encoding often do.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Fewer values on a side say nothing about their spread.
LEAST = 3
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """Values of some seeds.

    Args:
        n: how many.
        mean: their mean.
        std: sample standard deviation (n − 1); None for one value.
    """

    n: int
    mean: float
    std: float | None


def summary(values: Sequence[float]) -> Summary:
    """Raises ValueError without values."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return Summary(len(values), math.fsum(values) / len(values), std)


@dataclass(frozen=True)
class Comparison:
    """A system against a baseline.

    Args:
        difference: of the means, system − baseline.
        low, high: its 95 % confidence interval.
        p: two-sided, of the hypothesis that the means are equal.
        in_std: the difference in units of the pooled standard deviation (Cohen's d); None where
            no value differs from another.
    """

    difference: float
    low: float
    high: float
    p: float
    in_std: float | None


def welch(system: Sequence[float], baseline: Sequence[float]) -> Comparison | None:
    """Welch's t-test, or None with fewer than three values on a side.

    Where all values of both sides are equal there is no spread to judge by: p is 1 if the means are
    equal, else 0.
    """
    if min(len(system), len(baseline)) < LEAST:
        return None
    a, b = summary(system), summary(baseline)
    assert a.std is not None and b.std is not None
    difference = a.mean - b.mean
    pooled = math.sqrt(((a.n - 1) * a.std**2 + (b.n - 1) * b.std**2) / (a.n + b.n - 2))
    if pooled <= 1e-9 * max(map(abs, (*system, *baseline))):  # not more than rounding
        equal = abs(difference) <= 1e-9 * abs(b.mean)
        return Comparison(difference, difference, difference, float(equal), None)
    # Half a second, which those who only summarise need not wait.
    from scipy.stats import ttest_ind

    test = ttest_ind(system, baseline, equal_var=False)
    low, high = test.confidence_interval(CONFIDENCE)
    return Comparison(difference, float(low), float(high), float(test.pvalue), difference / pooled)
