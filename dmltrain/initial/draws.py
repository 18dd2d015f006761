"""The numbers of each initialiser of dmltrain/layers/initialisers.py.

Random ones come from random bits, one word each, in chunks that stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from math import prod, sqrt

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.initial.normal import normal_quantile
from dmltrain.layers import Constant, Dirac, Exactly, Initialiser, Normal, Orthogonal, Shape, Uniform, Xavier

CHUNK = 1 << 15  # values computed at once


@singledispatch
def values_of(initialiser: Initialiser, shape: Shape, bits: np.random.Philox) -> Array:
    """The first values of an array. Takes a word of `bits` for each value if some are random."""
    raise NotImplementedError(f"dmltrain/initial has no numbers for {initialiser}")


@values_of.register
def _(initialiser: Constant, shape: Shape, bits: np.random.Philox) -> Array:
    return np.full(shape, initialiser.value, np.float32)


@values_of.register
def _(initialiser: Exactly, shape: Shape, bits: np.random.Philox) -> Array:
    return np.array(initialiser.values, np.float32).reshape(shape)


@values_of.register
def _(initialiser: Normal, shape: Shape, bits: np.random.Philox) -> Array:
    return normal(shape, initialiser.sigma, bits)


@values_of.register
def _(initialiser: Uniform, shape: Shape, bits: np.random.Philox) -> Array:
    return uniform(shape, initialiser.scale, bits)


@values_of.register
def _(initialiser: Xavier, shape: Shape, bits: np.random.Philox) -> Array:
    window = prod(shape[2:])  # of a convolution
    fan_in, fan_out = shape[1] * window, shape[0] * window
    factor = {"in": fan_in, "out": fan_out, "avg": (fan_in + fan_out) / 2}[initialiser.factor_type]
    draw = normal if initialiser.rnd_type == "gaussian" else uniform
    return draw(shape, sqrt(initialiser.magnitude / factor), bits)


@values_of.register
def _(initialiser: Orthogonal, shape: Shape, bits: np.random.Philox) -> Array:
    matrix = uniform((shape[0], prod(shape[1:])), 1.0, bits)
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    orthonormal = left if left.shape == matrix.shape else right
    return (initialiser.scale * orthonormal).astype(np.float32).reshape(shape)


@values_of.register
def _(initialiser: Dirac, shape: Shape, bits: np.random.Philox) -> Array:
    values = values_of(initialiser.rest, shape, bits)
    first = np.arange(min(shape[:2]))
    values[first] = 0
    middle = tuple(edge // 2 for edge in shape[2:])
    values[(first, first) + middle] = 1
    return values


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
