"""Sample checksums: three numbers that say which positions of an epoch are in a gradient. Files call them receipts.

They are the number of samples, the sum of their positions + 1 (so that position 0 counts), and the sum of a hash of
each position, which each member takes modulo 2^32. They are pushed with the gradient, as float64, and summed like it.
Sums of float64 are exact below 2^53. So the first two are exact if the samples of a round times those of an epoch are
fewer than that (for example rounds of 2^20 samples in an epoch of 2^33), and the third for 2^21 members and any number
of samples.
"""

from __future__ import annotations

import numpy as np

from dmltrain.base.arrays import Array

SIZE = 3  # elements
MODULUS = 1 << 32

SampleChecksum = tuple[int, int, int]


def of(positions: Array) -> Array:
    """The checksum of these positions, float64 (3,)."""
    numbers = positions.astype(np.uint64) + np.uint64(1)
    return np.array([len(numbers), numbers.sum(), _hashes(numbers).sum() % MODULUS], np.float64)


def summed(total: Array) -> SampleChecksum:
    """The sum of the members' checksums as whole numbers: samples, sum of positions + 1, sum of hashes modulo 2^32."""
    samples, positions, hashes = (int(number) for number in total)
    return samples, positions, hashes % MODULUS


def _hashes(numbers: Array) -> Array:
    """32 bits of each, uint64; the mixing function of splitmix64 (Steele, Lea, Flood 2014)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)
