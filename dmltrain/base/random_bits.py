"""Random 64-bit words for data and initial weights; they depend on (seed, epoch, purpose) only.

They come from numpy's raw bit generator, whose output is the same in all versions of numpy. The output of the
distributions of `numpy.random.Generator` may change between versions (NEP 19). Hosts with different versions must agree
on the permutation of each epoch; else samples would be skipped or repeated.
"""

import hashlib

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError

# One number for each purpose, so that two purposes never share words. STRAGGLERS: with a rank in place of the epoch.
ORDER, AUGMENTATION, DIGITS_SPLIT, SYNTHETIC, WEIGHTS, CHUNKS, STRAGGLERS = range(7)

BLOCK = 4  # words that Philox makes at once, and its `advance` counts


def words(count: int, seed: int, epoch: int, purpose: int) -> Array:
    """`count` random words, uint64 (count,). A longer stream begins with the shorter one. UserError: seed below 0."""
    return generator(seed, epoch, purpose).random_raw(count)


def words_from(first: int, count: int, seed: int, epoch: int, purpose: int) -> Array:
    """Words first to first + count - 1 of the same stream; the others are not computed."""
    stream = generator(seed, epoch, purpose)
    stream.advance(first // BLOCK)
    skipped = first % BLOCK
    return stream.random_raw(skipped + count)[skipped:]


def generator(seed: int, epoch: int, purpose: int) -> np.random.Philox:
    """The generator of `words`, for callers that draw them in several calls. UserError: seed below 0."""
    if seed < 0:
        raise UserError(f"the seed is {seed}: expected 0 or more")
    return np.random.Philox(np.random.SeedSequence([seed, epoch, purpose]))


def seed_of(*values: int, size: int = 8) -> int:
    """A seed for other generators, which follows from the values: 8 * size - 1 bits."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:size], "little") >> 1
