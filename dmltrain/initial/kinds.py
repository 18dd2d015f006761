"""The numbers of each initialiser of dmltrain/layers/initialisers.py."""

from __future__ import annotations

from functools import singledispatch
from math import prod, sqrt

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.initial.draws import normal, uniform
from dmltrain.layers import Constant, Exactly, Initialiser, Normal, Orthogonal, Shape, Uniform, Xavier


@singledispatch
def values_of(initialiser: Initialiser, shape: Shape, bits: np.random.Philox) -> Array:
    """The first values of an array. Takes as many words of `bits` as there are random values."""
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
