"""Receipts: three numbers that say which positions of an epoch are in a gradient.

They are pushed with it as float64 and summed as it is: the number of samples, the sum of their positions + 1, and the
sum of a hash of each position, which a member takes modulo 2^32. Sums of float64 are exact below 2^53: the first two
while the samples of a round times those of an epoch are fewer (rounds of 2^20 samples of an epoch of 2^33, for
example), the third for 2^21 members and any number of samples.
"""

from __future__ import annotations

import numpy as np

from dmltrain.base.arrays import Array

SIZE = 3  # elements
MODULUS = 1 << 32

Receipt = tuple[int, int, int]


def of(positions: Array) -> Array:
    """The receipt of these positions, float64 (3,)."""
    numbers = positions.astype(np.uint64) + np.uint64(1)
    return np.array([len(numbers), numbers.sum(), _hashes(numbers).sum() % MODULUS], np.float64)


def summed(total: Array) -> Receipt:
    """What the sum of members' receipts says: samples, sum of positions + 1, sum of hashes modulo 2^32."""
    samples, positions, hashes = (int(number) for number in total)
    return samples, positions, hashes % MODULUS


def _hashes(numbers: Array) -> Array:
    """32 bits of each, uint64; the mixing function of splitmix64 (Steele, Lea, Flood 2014)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)
