"""Many draws of one augmentation, and whether they follow a distribution."""

import math

import numpy as np

from dmltrain.base import random_bits
from dmltrain.data.images.draws import RandomNumbers

DRAWS = 5_000


def many(draw, count=DRAWS):
    """`draw` of the random numbers of `count` samples, as the epochs of a job have them: (count, ...)."""
    words = random_bits.words(count, 1, 0, random_bits.AUGMENTATION)
    return np.array([draw(RandomNumbers(int(word))) for word in words])


def assert_uniform(values, low, high):
    """Within [low, high], with the mean and the spread of a uniform distribution, and its distribution function."""
    assert low <= values.min() and values.max() <= high
    assert_moments(values, (low + high) / 2, (high - low) / math.sqrt(12))
    quantiles = (np.sort(values) - low) / (high - low)
    distance = np.abs(quantiles - np.arange(len(values)) / len(values)).max()
    assert distance < 1.95 / math.sqrt(len(values))  # Kolmogorov and Smirnov; chance passes 999 of 1,000


def assert_whole(values, low, high):
    """Each whole number from low to high as often as the others."""
    counts = np.bincount(values.astype(int) - low, minlength=high - low + 1)
    assert len(counts) == high - low + 1 and np.array_equal(values, values.astype(int))
    freedom, expected = high - low, len(values) / len(counts)
    squares = ((counts - expected) ** 2 / expected).sum()
    assert abs(squares - freedom) < 4 * math.sqrt(2 * freedom) + 2


def assert_moments(values, mean, spread):
    """Mean and standard deviation within four standard errors."""
    assert abs(values.mean() - mean) < 4 * spread / math.sqrt(len(values)) + 1e-12
    kurtosis = ((values - values.mean()) ** 4).mean() / max(values.var() ** 2, 1e-300)
    error = spread * math.sqrt(max(kurtosis - 1, 0.1) / (4 * len(values)))
    assert abs(values.std() - spread) < 4 * error + 1e-12


def assert_alike(values, others):
    """Two samples have the same mean and spread, within four standard errors."""
    for part in (lambda v: v, lambda v: (v - v.mean()) ** 2):
        one, two = part(np.asarray(values, float)), part(np.asarray(others, float))
        error = math.sqrt(one.var() / len(one) + two.var() / len(two))
        assert abs(one.mean() - two.mean()) < 4 * error + 1e-9
