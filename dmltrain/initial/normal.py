"""The normal distribution, with operations that IEEE 754 rounds identically on every machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dmltrain.base.arrays import Array

LN_2 = 0.6931471805599453
LOG_TERMS = 16  # of the series below, whose argument is at most 1/3: the rest is under 1e-16

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
