"""How far two groups of measurements differ, beyond the noise in them.

Welch's interval: the difference of two means, with the range that contains the true difference in 95 of 100 repetitions
of both groups, if single measurements scatter around their mean as a normal distribution. The groups may scatter
differently. B. L. Welch, "The generalization of 'Student's' problem when several different population variances are
involved", Biometrika 34 (1947), pages 28-35.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

CONFIDENCE = 0.95
LARGEST = 1e70  # of a number; its fourth power is one, too


@dataclass(frozen=True)
class Difference:
    """The mean of the second group minus that of the first, and its interval."""

    value: float
    low: float
    high: float

    @property
    def beyond_noise(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Welch's interval. A group of one takes its scatter from the other, which then needs three. None: too few, or a
    number that is not finite or absurdly large."""
    if not all(abs(number) <= LARGEST for number in (*first, *second)):
        return None
    few, many = sorted((len(first), len(second)))
    if few < 1 or many < 2 or (few == 1 and many < 3):
        return None
    value = fmean(second) - fmean(first)
    error, freedom = _one(first, second) if few == 1 else _welch(first, second)
    reach = t_quantile(freedom) * error if error > 0 else 0.0
    return Difference(value, value - reach, value + reach)


def _welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The standard error of the difference, and the degrees of freedom by Welch and Satterthwaite."""
    squares = [variance(group) / len(group) for group in (first, second)]
    total = sum(squares)
    spread = sum(square**2 / (len(group) - 1) for square, group in zip(squares, (first, second), strict=True))
    return math.sqrt(total), total**2 / spread if spread > 0 else math.inf


def _one(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The same for one further measurement beside a group of n."""
    group = max((first, second), key=len)
    return math.sqrt(variance(group) * (1 + 1 / len(group))), len(group) - 1.0


def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """t so that a value of Student's distribution lies between -t and t with probability `confidence`."""
    low, high = 0.0, 1.0
    while _inside(high, freedom) < confidence:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return high


def _inside(t: float, freedom: float, parts: int = 100) -> float:
    """The probability between -t and t: with t = sqrt(freedom) tan(angle) the density is cos(angle)^(freedom - 1), here
    integrated by Simpson's rule."""
    if freedom > 1e6:
        return math.erf(t / math.sqrt(2))  # the normal distribution
    end = math.atan(t / math.sqrt(freedom))
    weights = [1, *(4 if part % 2 else 2 for part in range(1, parts)), 1]
    heights = (max(0.0, math.cos(end * part / parts)) ** (freedom - 1) for part in range(parts + 1))
    area = math.fsum(weight * height for weight, height in zip(weights, heights, strict=True)) * end / parts / 3
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return min(1.0, 2 * constant * area)
