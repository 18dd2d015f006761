"""A network's initial weights from a seed, with numpy alone: all backends start from the same numbers.

They are made from raw random bits (see random_bits.py) by additions, multiplications, divisions and square roots of
float64, which IEEE 754 rounds identically on every machine. `numpy.log` and similar functions differ between processors
in the last bit; with them, workers on heterogeneous machines would start from different weights. (The initialiser
Orthogonal needs a singular value decomposition, and is the exception. The workers of a job start from worker 0's
weights in any case.)
"""

from __future__ import annotations

from collections.abc import Iterator

from dmltrain.base import random_bits
from dmltrain.base.arrays import Array
from dmltrain.initial.draws import CHUNK, values_of
from dmltrain.initial.normal import normal_quantile
from dmltrain.layers import Constant, Initialiser, Network, Parameter

__all__ = ["CHUNK", "each_first_value", "first_values", "normal_quantile"]
ONES = ("gamma", "moving_var")  # kinds that start as ones


def first_values(network: Network, seed: int) -> dict[str, Array]:
    """Name -> float32 array, of `network.parameters()` and then `network.auxiliary()`.

    An array starts as its layer's rule says. Without one, weights start by the network's initialiser, gammas and moving
    variances as 1, and all else as 0. UserError: seed below 0.
    """
    return dict(each_first_value(network, seed))


def each_first_value(network: Network, seed: int) -> Iterator[tuple[str, Array]]:
    """The same one by one, so that a large network need not fit into memory twice."""
    bits = random_bits.generator(seed, 0, random_bits.WEIGHTS)
    for parameter in (*network.parameters(), *network.auxiliary()):
        initialiser = parameter.initial or _usual(parameter, network.initialiser)
        yield parameter.name, values_of(initialiser, parameter.shape, bits)


def _usual(parameter: Parameter, of_weights: Initialiser) -> Initialiser:
    return of_weights if parameter.kind == "weight" else Constant(float(parameter.kind in ONES))
