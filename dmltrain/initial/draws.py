"""Random numbers of a distribution from random bits, one word each, in chunks that stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.initial.normal import normal_quantile
from dmltrain.layers import Shape

CHUNK = 1 << 15  # values computed at once


def normal(shape: Shape, deviation: float, bits: np.random.Philox) -> Array:
    """Normal float32 values of mean 0."""
    return _drawn(shape, lambda chance: deviation * normal_quantile(chance), bits)


def uniform(shape: Shape, limit: float, bits: np.random.Philox) -> Array:
    """Uniform float32 values between -limit and limit."""
    return _drawn(shape, lambda chance: limit * (2.0 * chance - 1.0), bits)


def _drawn(shape: Shape, quantile: Callable[[Array], Array], bits: np.random.Philox) -> Array:
    """The distribution's `quantile` at random chances."""
    values = np.empty(prod(shape), np.float32)
    for start in range(0, values.size, CHUNK):
        words = bits.random_raw(min(CHUNK, values.size - start))
        chance = ((words >> np.uint64(12)) + 0.5) * 2.0**-52  # exact, never 0 or 1
        values[start : start + CHUNK] = quantile(chance)
    return values.reshape(shape)
