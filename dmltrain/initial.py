"""A network's initial weights from a seed, with numpy alone: all backends start from the same numbers.

They are made from raw random bits (see random_bits.py) by additions, multiplications, divisions and square roots of
float64, which IEEE 754 rounds identically on every machine. `numpy.log` and similar functions differ between processors
in the last bit; with them, workers on heterogeneous machines would start from different weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod, sqrt

import numpy as np

from dmltrain import random_bits
from dmltrain.arrays import Array
from dmltrain.layers import Network, Parameter

XAVIER_MAGNITUDE = 2  # variance of a weight times its fan-in (He et al. 2015), MXNet's choice for image classification
CHUNK = 1 << 15  # values computed at once: intermediate results stay in the processor's cache
LN_2 = 0.6931471805599453
LOG_TERMS = 16  # of the series below, whose argument is at most 1/3: the rest is under 1e-16


def first_values(network: Network, seed: int) -> dict[str, Array]:
    """Name -> float32 array, of `network.parameters()` and then `network.auxiliary()`.

    MXNet's initialiser for image classification, Xavier(rnd_type="gaussian", factor_type="in", magnitude=2): weights
    are normal with variance 2 / fan-in, gammas and moving variances are 1, all else is 0. UserError: seed below 0.
    """
    return dict(each_first_value(network, seed))


def each_first_value(network: Network, seed: int) -> Iterator[tuple[str, Array]]:
    """The same one by one, so that a large network need not fit into memory twice."""
    bits = random_bits.generator(seed, 0, random_bits.WEIGHTS)
    for parameter in (*network.parameters(), *network.auxiliary()):
        yield parameter.name, _values(parameter, bits)


def _values(parameter: Parameter, bits: np.random.Philox) -> Array:
    if parameter.kind == "weight":
        deviation = sqrt(XAVIER_MAGNITUDE / prod(parameter.shape[1:]))
        return _normal(parameter.size, deviation, bits).reshape(parameter.shape)
    return np.full(parameter.shape, 1.0 if parameter.kind in ("gamma", "moving_var") else 0.0, np.float32)


def _normal(count: int, deviation: float, bits: np.random.Philox) -> Array:
    """Normal float32 values (count,) of mean 0, one word of `bits` each."""
    values = np.empty(count, np.float32)
    for start in range(0, count, CHUNK):
        words = bits.random_raw(min(CHUNK, count - start))
        chance = ((words >> np.uint64(12)) + 0.5) * 2.0**-52  # exact, never 0 or 1
        values[start : start + CHUNK] = deviation * normal_quantile(chance)
    return values


# Wichura 1988, "Algorithm AS 241: The percentage points of the normal distribution", Applied Statistics 37, PPND7:
# (numerator, denominator), highest power first; about 1e-7 of the value.
_CENTRE = ((59.109374720, 159.29113202, 50.434271938, 3.3871327179), (67.187563600, 78.757757664, 17.895169469, 1.0))
_TAIL = ((0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777), (0.12021132975, 0.73700164250, 1.0))
_FAR_TAIL = ((0.017337203997, 0.42868294337, 3.0812263860, 6.6579051150), (0.012258202635, 0.24197894225, 1.0))


def normal_quantile(chance: Array) -> Array:
    """The quantile of the standard normal distribution at each `chance`, float64 in the open interval (0, 1)."""
    offset = chance - 0.5
    values = offset * _ratio(0.180625 - offset * offset, _CENTRE)
    outer = np.flatnonzero(np.abs(offset) > 0.425)
    distance = np.sqrt(-_log(np.minimum(chance[outer], 1.0 - chance[outer])))
    tail = np.where(distance <= 5.0, _ratio(distance - 1.6, _TAIL), _ratio(distance - 5.0, _FAR_TAIL))
    values[outer] = np.where(offset[outer] < 0, -tail, tail)
    return values


def _ratio(x: Array, polynomials: tuple[Sequence[float], Sequence[float]]) -> Array:
    numerator, denominator = (_polynomial(x, coefficients) for coefficients in polynomials)
    return numerator / denominator


def _polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    """Highest power first."""
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def _log(x: Array) -> Array:
    """The natural logarithm of positive float64 values, by log(m 2^e) = e ln 2 + 2 artanh((m - 1) / (m + 1))."""
    fraction, exponent = np.frexp(x)  # exact; fraction in 0.5..1
    z = (fraction - 1.0) / (fraction + 1.0)  # -1/3..0
    z_squared = z * z
    odd = [1.0 / (2 * power + 1) for power in reversed(range(LOG_TERMS))]
    return exponent * LN_2 + 2.0 * z * _polynomial(z_squared, odd)
